"""Parts of all pages: templates, the grid DataTables, images, links, formats of numbers and lists, shown rows."""

import base64
import hashlib
import re
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from dj2mgm.data.images import BadImageError, encode_data_url, load_image, locate_image
from dj2mgm.errors import InputError

T = TypeVar("T")
TEMPLATES = Path(__file__).parent / "templates"
EXPLORER = "explorer"  # folder of the explorer's pages, next to a report
EXPORT = re.compile(r"export\{[^}]*?(\w+) as default[^}]*\}")  # in the bundle of DataTables, which is a module
THUMBNAIL_SIDE = 320  # px
THUMBNAIL_QUALITY = 85


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    interval: str = ""  # in small type below the text
    css_class: str = ""  # better, worse or same; empty for cells without a verdict


@dataclass(frozen=True)
class TableRow:
    """A row of a table."""

    head: str
    cells: list[Cell | None]  # None: not measured
    highlighted: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a report."""

    label: str  # for screen readers
    columns: list[str]  # titles, with that of the heads
    rows: list[TableRow]
    colored: bool = False  # whether heads are experiments, which have colors


def build_template_environment(*folders: Path) -> Environment:
    """Return the templates; they escape all values, since captions come from models and web crawls.

    `folders` are those of a feature's own templates.
    """
    environment = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        # lines may break after "_" and "."
        "breakable": lambda text: Markup(str(escape(text)).replace("_", "_<wbr>").replace(".", ".<wbr>")),
        # no line breaks between a number and its unit
        "unbroken": lambda text: re.sub(r"(?<=\d) (?=%|points|seeds?\b|images\b|min\b|s\b|h\b)", "\u00a0", text),
        "thousands": format_integer,
        "score": lambda value: format_number(value, 2),
        "minus": lambda text: text.replace("-", "−"),
        "listed": join_words,
    }
    return environment


def build_library_script() -> str:
    """Return DataTables, as the package itables ships it, as a script that defines the global `DataTable`."""
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


def load_thumbnail(image_root: Path, relative: str, longest_side: int = THUMBNAIL_SIDE) -> str:
    """Return the image as a WebP data URI, shrunk to `longest_side` px if it is larger."""
    try:
        image = load_image(locate_image(image_root, relative))
    except BadImageError as error:
        raise InputError(f"the gallery's image {error}; restore the image or remove its row") from None
    return encode_shrunk_image(image, longest_side, THUMBNAIL_QUALITY)


def encode_shrunk_image(image: Image.Image, longest_side: int, quality: int = 80) -> str:
    """Encode the image as a WebP data URI, shrunk in place to `longest_side` px if it is larger."""
    image.thumbnail((longest_side, longest_side))
    return encode_data_url(image, "WEBP", quality=quality)


def format_number(value: float, digits: int, signed: bool = False) -> str:
    """Format a number with a true minus and commas between thousands; `signed` adds a plus, except to zero."""
    value = round(value, digits) + 0.0  # no minus in front of zero
    text = f"{value:{'+' if signed and value else ''},.{digits}f}"
    return text.replace("-", "−")


def format_snakemake_command(target: str, settings: dict[str, str]) -> str:
    """Return the command of a target with settings of the command line, each in YAML."""
    arguments = [shlex.quote(f"{key}={value}") for key, value in settings.items()]
    return " ".join(["snakemake", target, *(["--config", *arguments] if arguments else [])])


def list_counts(counts: dict[str, int]) -> str:
    """List the counts that are not 0: {"empty": 3, "missing": 0} → "empty 3"."""
    return ", ".join(f"{name.replace('_', ' ')} {format_integer(count)}" for name, count in counts.items() if count)


def format_integer(number: int) -> str:
    """Format a whole number with a true minus and commas: 12345 → "12,345"."""
    return f"{number:,}".replace("-", "−")


def join_words(items: list[str]) -> str:
    """Join words in a sentence: ["a", "b", "c"] → "a, b and c"."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def locate_explorer_page(name: str) -> str:
    """Return the path of an experiment's or a dataset's page in the explorer, below the folder of its report."""
    return f"{EXPLORER}/{name}.html"


def build_step_key(stage: str, number: int) -> str:
    """Return the name of an operator in links: its stage and its position in the recipe, from 1."""
    return f"{stage}-{number}"


def link_rows(experiment: str, **filters: str) -> str:
    """Link to rows of an experiment by operator (`drop`), `table`, id (`find`), or a column's value."""
    return f"{quote(locate_explorer_page(experiment))}#{urlencode(filters)}"


def select_evenly(rows: list[T], count: int) -> list[T]:
    """Return `count` rows at equal distances, or all rows if there are fewer."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]
