"""Table of the library's modules in docs/architecture.md, from docstrings and import-linter's layers."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from dj2mgm.config.settings.page_tables import renew_table
from dj2mgm.script_modules import SCRIPTS

LIBRARY = SCRIPTS / "dj2mgm"
PAGE = Path("docs/architecture.md")


def architecture_page() -> str:
    """Return docs/architecture.md with its table of modules renewed."""
    return renew_table(PAGE, ["| layer | module | content |", "|---|---|---|", *_rows()])


def _rows() -> Iterator[str]:
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = project["tool"]["importlinter"]["contracts"]
    for number, layer in enumerate(contract["layers"], start=1):
        for name in re.split(r"\W+", layer):
            folder = LIBRARY / name
            for path in sorted(folder.rglob("__init__.py")) or [folder.with_suffix(".py")]:
                module = path.relative_to(LIBRARY)
                shown = f"{module.parent}/" if path.name == "__init__.py" else module
                yield f"| {number} | `{shown}` | {_summary(path)} |"


def _summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its period."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n")[0].removesuffix(".")
