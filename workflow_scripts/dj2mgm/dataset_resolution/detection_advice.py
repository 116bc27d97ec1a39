"""Remedies for problems with a detected dataset, with the lines to write into its file."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.dataset_resolution.file_formats import FORMATS, NO_ROWS, PATHS_IN_PARQUET
from dj2mgm.errors import InputError
from dj2mgm.settings.string_formats import make_name
from dj2mgm.storage.files import format_yaml_line

SOURCE_NAMES = {"pretrain": "captions", "finetune": "instructions", "evaluation": "held_out"}  # by split

# Python that writes rows of JSON to the second file from the first one
PARQUET_TO_ROWS = 'import pandas; pandas.read_parquet({}).to_json({}, orient="records", lines=True)'
COCO_TO_ROWS = (
    'import json; d = json.load(open({})); n = {{i["id"]: i["file_name"] for i in d["images"]}}; '
    'print(*(json.dumps({{"image": n[a["image_id"]], "caption": a["caption"]}}) for a in d["annotations"]), '
    'sep="\\n", file=open({}, "w"))'
)
MAPPING_TO_ROWS = (
    'import json; d = json.load(open({})); print(*(json.dumps({{"image": k, "caption": v}}) for k, v in d.items()), '
    'sep="\\n", file=open({}, "w"))'
)
SHOWN_CHOICES = 3  # descriptions in an error about several possible ones
HEAD_SIZE = 2**20  # characters of a file that are searched for COCO's keys


@dataclass(frozen=True)
class Advice:
    """Endings of error messages that tell the user what to write into a dataset's file."""

    dataset: str

    @property
    def file(self) -> str:
        """Path in config/datasets where the user can describe this dataset; its name is always valid."""
        return f"config/datasets/{make_name(self.dataset)}.yaml"

    def describe(self, file: Path, problem: str) -> str:
        """Return the remedy: what the user writes about a file with this problem."""
        if problem == NO_ROWS:
            return _advise_rows(file, COCO_TO_ROWS if _is_coco(file) else MAPPING_TO_ROWS)
        if problem.startswith(PATHS_IN_PARQUET):
            return _advise_rows(file, PARQUET_TO_ROWS)
        kind = next(
            (name for name in ("table", "parquet", "arrow") if file.suffix.lower() in FORMATS[name].suffixes), None
        )
        if kind is None:
            return f"Describe the data in {self.file} (docs/data.md)"
        columns = {"image": "<column>", "text": "<column>"}
        source = {"format": kind, "path": str(file), "columns": columns}
        return f"Name its columns in {self.file}: `{format_yaml_line({'sources': {SOURCE_NAMES['pretrain']: source}})}`"

    def make_choice_error(self, question: str, choices: Sequence[dict]) -> InputError:
        """Return the error about several possible descriptions; its lines have at most `SHOWN_CHOICES` of them."""
        remedy = f"Save the right one as {self.file}, and use dataset={Path(self.file).stem}"
        paths = dict.fromkeys(filter(os.path.exists, map(_find_path, choices)))
        if len(paths) == len(choices):
            remedy += f", or name one, as in {shlex.quote(f'dataset={next(iter(paths))}')}"
        texts = [f"`{format_yaml_line(choice)}`" for choice in choices[:SHOWN_CHOICES]]
        if more := len(choices) - len(texts):
            texts[-1] += f" (or {more} more)"
        return InputError(f"dataset: {question}.", f"{remedy}:", *texts)

    def make_outside_error(self, file: Path, image: str, folder: Path, outside: str, described: dict) -> InputError:
        """Return the error about images outside of the dataset's folder, with the lines that allow reading them."""
        return InputError(
            f"dataset: {file}: its images, such as {image[:100]}, are in {outside}.",
            f"Only images inside of {folder} are read, unless you state their folder.",
            f"If it is right, save this as {self.file}, and use dataset={Path(self.file).stem}:",
            f"`{format_yaml_line(described)}`",
        )


def _find_path(description: dict) -> str:
    """Return the path of the pairs in a description of a dataset; "" if there is none."""
    if "sources" in description:
        return next(iter(description["sources"].values()))["path"]
    return description.get("pretrain", {}).get("file", "")


def _advise_rows(file: Path, script: str) -> str:
    """Return the command that writes the rows of a file as rows of JSON, and the dataset to use then."""
    # COCO keeps its images next to the folder of annotations
    folder = file.parent.parent if file.parent.name == "annotations" else file.parent
    table = folder / f"{file.stem}.jsonl"
    command = script.format(*(json.dumps(str(path), ensure_ascii=False) for path in (file, table)))
    return f"Save it as rows of JSON with `python -c {shlex.quote(command)}`, and use {shlex.quote(f'dataset={table}')}"


def _is_coco(file: Path) -> bool:
    """Return whether a JSON object has keys of COCO's captions; otherwise it is taken for images with captions."""
    with open(file, encoding="utf-8", errors="replace") as text:
        head = text.read(HEAD_SIZE)
    return any(f'"{key}"' in head for key in ("file_name", "image_id", "annotations"))
