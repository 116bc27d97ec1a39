"""DataTables, the grid of pages with many rows, as the package itables ships it: one script, one style."""

import base64
import hashlib
import re
from importlib.util import find_spec
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.reporting.rendering import TEMPLATES

EXPORT = re.compile(r"export\{[^}]*?(\w+) as default[^}]*\}")  # in the library's bundle, which is a module


def build_library_script() -> str:
    """Return the bundle as a script that defines the global `DataTable`."""
    text, count = EXPORT.subn(r"globalThis.DataTable=\1", _read_library_file("dt_bundle.js"))
    if count != 1 or "</script" in text.lower():
        raise InputError("itables does not have the version in pyproject.toml; install that version")
    return text


def build_page_style(own: Path) -> str:
    """Return the styles of a page with a grid: of the library, of all pages, and of the page's own file."""
    texts = (path.read_text(encoding="utf-8") for path in (TEMPLATES / "base_style.css", own))
    return "".join([_read_library_file("dt_bundle.css"), *texts])


def hash_source(text: str) -> str:
    """Return a script or style as a source of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read_library_file(name: str) -> str:
    spec = find_spec("itables")
    if spec is None:
        raise InputError("the package itables, which draws the table, is not installed; run `make install`")
    return (Path(spec.origin).parent / "html" / name).read_text(encoding="utf-8")
