"""The explorer's page: the grid of DataTables, the page's own scripts, and its rows."""

import base64
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from dj2mgm.cli.messages import note
from dj2mgm.data.images import BadImageError, list_image_folders, load_image, locate_image
from dj2mgm.errors import InputError
from dj2mgm.features.explorer.results import Results, read_run
from dj2mgm.features.explorer.row_table import RowTable
from dj2mgm.records import PageSettings
from dj2mgm.reporting.rendering import (
    build_library_script,
    build_page_style,
    build_template_environment,
    encode_shrunk_image,
    format_integer,
    hash_source,
)
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_json, replace_folder, write_text

FOLDER = Path(__file__).parent  # of the page's template, scripts and style
PAGE_SCRIPTS = ("explore_model.js", "explore_source.js", "explore_recipe.js", "explore_limits.js", "explore_rows.js")
MAX_IMAGES, IMAGE_SIDE = 300, 96  # thumbnails per table in an offline page, about 3 KB each; their longest side in px
MAX_ROWS = 100_000  # a larger dataset gets no page with the report
SCREEN_ROWS = 12  # rows on a first screen: of all rows, of kept rows, and of those that a step drops


def build_served_page(results: Results) -> str:
    """Return a page that loads its rows from the server, below its own address."""
    return _build_page(results, {"base": results.name}, "connect-src 'self'; img-src 'self' data:", "", {})


def write_offline_page(results: Results, path: Path) -> None:
    """Write one file with all rows and some thumbnails; all images would make it as large as the dataset.

    Images without a thumbnail are read from their files, whose addresses are relative to the page. A page on another
    machine shows their names.
    """
    note = (
        f"This file contains all rows, and up to {format_integer(MAX_IMAGES)} thumbnails per table. Other images are "
        "read from the dataset's folder, or shown by name if it is not on this machine."
    )
    data, page_folder = {}, os.path.realpath(path.parent)
    folders = {
        table.name: {
            source: quote(os.path.relpath(folder, page_folder))
            for source, folder in list_image_folders(table.image_root).items()
        }
        for table in results.tables
    }
    for table in results.tables:
        data[f"{table.name}-numbers"] = _compress([pack_numbers(table)])
        data[f"{table.name}-texts"] = _compress(_encode_texts(table))
    write_text(path, _build_page(results, {"base": ""}, "img-src data: file:", note, data, folders))


def write_explorers(config: Path, folder: Path) -> None:
    """Write the page of the first run of each experiment in a report's configuration into a folder."""
    with replace_folder(folder) as pages:
        for experiment in load_settings(PageSettings, config).experiments:
            name = experiment.name
            rows = read_json(Path(experiment.dataset) / "summary.json")["pretrain"]
            if rows > MAX_ROWS:
                note(
                    f"the report has no explorer's page of {name}, because {format_integer(rows)} pairs are too many "
                    "for a file. python workflow_scripts/explore.py with the folder of its results serves them"
                )
                continue
            try:
                results = read_run(name, {stage: Path(path) for stage, path in experiment.runs[0].stages.items()})
            except InputError as error:
                note(f"the explorer's page of {name} is not written: {error}")
                continue
            write_offline_page(results, pages / f"{name}.html")


def pack_numbers(table: RowTable) -> bytes:
    """Pack all columns, then the step that dropped each row, as float64 in this machine's byte order."""
    columns = [column.values for column in table.columns.values()]
    return b"".join(values.tobytes() for values in [*columns, *([] if table.fate is None else [table.fate])])


def _build_page(
    results: Results,
    base: dict,
    sources: str,
    note: str,
    data: dict[str, str],
    folders: dict[str, dict[str, str]] | None = None,
) -> str:
    """Return the page, whose policy allows only its own scripts and styles, and images from `sources`.

    `folders` has the addresses of each table's image folders, by source.
    """
    style = build_page_style(FOLDER / "explore_style.css")
    library = build_library_script()
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in PAGE_SCRIPTS)
    scripts = " ".join(map(hash_source, (library, script)))
    policy = f"default-src 'none'; script-src {scripts}; style-src {hash_source(style)}; {sources}; base-uri 'none'"
    templates = build_template_environment(FOLDER)
    note = " ".join(dict.fromkeys(filter(None, [note, *(table.note for table in results.tables)])))
    tables = [{"name": table.name, "title": table.title, "rows": len(table)} for table in results.tables]
    described = [_describe(table) | {"folders": (folders or {}).get(table.name, {})} for table in results.tables]
    model = json.dumps(base | {"name": results.name, "tables": described}, ensure_ascii=False)
    return templates.get_template("explore.html.j2").render(
        name=results.name,
        origin=results.origin,
        policy=policy + "; form-action 'none'",
        style=Markup(style),
        tables=tables,
        note=note,
        model=Markup(model.replace("<", "\\u003c")),
        library=Markup(library),
        script=Markup(script),
        data=data,
    )


def _describe(table: RowTable) -> dict:
    return {
        "name": table.name,
        "rows": len(table),
        "shown": table.first_filter,
        "recipes": table.recipes,
        "columns": {key: {"label": column.label, "words": column.words} for key, column in table.columns.items()},
        "steps": [step.as_dict() for step in table.steps],
    }


def _compress(parts: Iterable[bytes]) -> str:
    buffer = BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6, mtime=0) as file:
        for part in parts:
            file.write(part)
    return base64.b64encode(buffer.getvalue()).decode()


def _encode_texts(table: RowTable) -> Iterator[bytes]:
    """Yield a JSON object with all texts and images, row by row."""
    yield b'{"rows": ['
    for index, row in enumerate(table.texts):
        yield (", " if index else "").encode() + json.dumps(row, ensure_ascii=False).encode()
    yield b'], "images": ' + json.dumps(dict(_encode_images(table))).encode() + b"}"


def describe_problem(error: BadImageError) -> str:
    """Return why an image cannot be shown, in one word."""
    return "damaged" if error.reason == "undecodable" else error.reason


def _encode_images(table: RowTable) -> Iterator[tuple[int, str]]:
    """Return (row, data URI) of the rows on first screens, and of rows evenly spread.

    Instead of the data URI, an image that cannot be read has a word for the reason.
    """
    fate = np.zeros(len(table)) if table.fate is None else table.fate
    groups = [np.arange(len(table)), *(np.flatnonzero(fate == step) for step in range(len(table.steps) + 1))]
    rows = {int(row) for group in groups for row in group[:SCREEN_ROWS]}
    count = min(max(MAX_IMAGES - len(rows), 0), len(table))
    rows |= {index * len(table) // count for index in range(count)}
    for row in sorted(rows):
        try:
            image = load_image(locate_image(table.image_root, table.texts[row]["image"]))
        except BadImageError as error:
            yield row, describe_problem(error)
            continue
        yield row, encode_shrunk_image(image, IMAGE_SIDE)
