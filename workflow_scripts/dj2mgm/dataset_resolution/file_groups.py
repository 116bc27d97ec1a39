"""Search of a dataset's folder for files of known formats, and remedies with the lines to write into its file."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dj2mgm.dataset_resolution.file_formats import (
    FORMATS,
    NO_ROWS,
    PATHS_IN_PARQUET,
    SHOWN_NAMES,
    RecognizedFormat,
    enumerate_names,
    recognize_file,
    split_words,
)
from dj2mgm.dataset_resolution.file_samples import SAVED_RECORDS, list_cached
from dj2mgm.errors import InputError
from dj2mgm.settings.dataset_files import WITH_IMAGES
from dj2mgm.settings.string_formats import make_name
from dj2mgm.storage.files import format_yaml_line
from dj2mgm.storage.image_files import ARCHIVE_SUFFIXES, CONVERT_HEIF, HEIF_SUFFIXES, IMAGE_SUFFIXES, advise_unpacking

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


EVALUATION_FILE = "evaluation.jsonl"  # always a held-out split in the workflow's own format
NO_ROWS_FILES = {EVALUATION_FILE, *SAVED_RECORDS}
MAX_ENTRIES = 100_000  # files and folders that are listed in a search for files
MAX_KINDS = 64  # kinds of file names; one file of each kind in each folder is read
MAX_READ = 1000  # files that are read
# words in names of files and folders (https://huggingface.co/docs/datasets/repository_structure)
TRAINING_WORDS = {"train", "training"}
VALIDATION_NAMES = {"validation", "valid", "val", "dev", "eval", "evaluation"}
HELD_BACK = VALIDATION_NAMES | {"test", "testing"}


@dataclass(frozen=True)
class FileGroup:
    """Files whose names differ only in numbers, or folders of captioned images, with their recognized format."""

    recognized: RecognizedFormat
    files: tuple[Path, ...]

    @property
    def form(self) -> tuple:
        """Format, columns and split."""
        columns = tuple(sorted(self.recognized.columns.items()))
        return self.recognized.format, columns, self.recognized.split

    @property
    def key(self) -> tuple:
        """Groups with the same key are one source."""
        return *self.form[:2], () if self.recognized.format in WITH_IMAGES else self.files


def find_groups(path: Path, advice: Advice) -> tuple[list[FileGroup], list[FileGroup], list[str]]:
    """Return the groups to train on, the groups of validation and test, and the names of unrecognized files.

    Folders inside are searched only if the folder itself has nothing to train on.
    """
    folder = path if path.is_dir() else path.parent
    levels = _list_levels(path) if path.is_dir() else iter([[(path.parent, [path.name])]])
    problems: dict[str, str] = {}
    training: list[FileGroup] = []
    held_back: list[FileGroup] = []
    files: list[Path] = []
    for level in (islice(levels, 1), levels):  # the folder itself, then all deeper levels
        listings = [listing for directories in level for listing in directories]
        files += [directory / name for directory, file_names in listings for name in file_names]
        for group in (*_find_captioned(listings), *_recognize_files(listings, folder, problems)):
            (held_back if _is_held_back(group, folder) else training).append(group)
        if training:
            break
    if training or held_back:
        return training, held_back, list(problems)
    if problems:
        file, problem = next(iter(problems.items()))
        raise InputError(f"dataset: {folder / file}: {problem}. {advice.describe(folder / file, problem)}")
    names = [file.name for file in files]
    if not names:
        raise InputError(f"dataset: {path} is empty; put rows or images there, or correct the path")
    if any(name.lower().endswith(IMAGE_SUFFIXES) for name in names):
        texts = sum(name.lower().endswith(".txt") for name in names)
        others = f", and {texts} .txt files whose names are those of no image" if texts else ""
        raise InputError(
            f"dataset: {path} holds images without captions{others}. Write the caption of each image to a .txt file of "
            "the same name next to it, or add a table of paths and captions (.csv)"
        )
    if archive := next((file for file in files if file.name.lower().endswith(ARCHIVE_SUFFIXES)), None):
        raise InputError(f"dataset: {archive} is an archive, which is not read. {advise_unpacking(archive)}")
    suffixes = ", ".join(dict.fromkeys(suffix for format in FORMATS.values() for suffix in format.suffixes[:2]))
    remedy = (
        CONVERT_HEIF
        if any(name.lower().endswith(HEIF_SUFFIXES) for name in names)
        else "docs/data.md lists the formats"
    )
    raise InputError(
        f"dataset: {path} holds {enumerate_names(sorted(names)[:SHOWN_NAMES])}, but no files of a known format "
        f"({suffixes}); {remedy}"
    )


Listing = tuple[Path, list[str]]  # a folder, and the names of its files


def _list_levels(folder: Path) -> Iterator[list[Listing]]:
    """Yield the folders at each depth with the names of their files, of MAX_ENTRIES entries; links are not followed.

    Hidden files and folders are left out.
    """
    level, entry_count = [folder], 0
    while level:
        listings, below = [], []
        for directory in level:
            visible = list_visible(directory)
            below += [Path(directory, entry.name) for entry in visible if entry.is_dir(follow_symlinks=False)]
            names = [entry.name for entry in visible if not is_folder(entry)]
            listings.append((directory, names))
            entry_count += len(visible)
            if entry_count > MAX_ENTRIES:
                yield listings
                return
        yield listings
        level = below


def list_visible(folder: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"dataset: {folder} cannot be read ({error.strerror}); allow it, or move it away") from None


def is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # circular links
        return False


def _find_captioned(listings: list[Listing]) -> Iterator[FileGroup]:
    """Yield the folders with images that have a .txt of the same name."""
    for directory, names in listings:
        captions = {name[:-4] for name in names if name.endswith(".txt")}
        if any(name.lower().endswith(IMAGE_SUFFIXES) and os.path.splitext(name)[0] in captions for name in names):
            yield FileGroup(RecognizedFormat("folder"), (directory,))


def _recognize_files(listings: list[Listing], folder: Path, problems: dict[str, str]) -> Iterator[FileGroup]:
    """Yield the recognized files; put the first file of each other kind of name into `problems`, with a sentence."""
    files_by_pattern: dict[tuple, list[Path]] = {}
    suffixes = {suffix for name, format in FORMATS.items() if name != "folder" for suffix in format.suffixes}
    for directory, names in listings:
        images = {os.path.splitext(name)[0] for name in names if name.lower().endswith(IMAGE_SUFFIXES)}
        skipped = NO_ROWS_FILES | {file.name for file in list_cached(directory / name for name in names)}
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix.lower() not in suffixes or name in skipped or (suffix == ".json" and stem in images):
                continue
            files_by_pattern.setdefault((directory, re.sub(r"\d+", "0", stem), suffix), []).append(directory / name)
    if len({key[1:] for key in files_by_pattern}) > MAX_KINDS or len(files_by_pattern) > MAX_READ:
        raise InputError(
            f"dataset: {folder} holds files with more than {MAX_KINDS} kinds of names; name one of the files, or "
            "describe the data in a config/datasets/<name>.yaml (docs/data.md)"
        )
    for files in files_by_pattern.values():
        outcome = recognize_file(files[0], folder)
        if isinstance(outcome, RecognizedFormat):
            yield FileGroup(outcome, tuple(files))
        else:
            problems[str(files[0].relative_to(folder))] = outcome


def _is_held_back(group: FileGroup, folder: Path) -> bool:
    """Return whether the names of a group's files or folders contain a word for validation or test."""
    words = find_words(group, folder)
    return bool(words & HELD_BACK) and not words & TRAINING_WORDS


def find_words(group: FileGroup, folder: Path) -> set[str]:
    """Return the words in the names of a group's first file and of the folders around it."""
    directory = group.files[0].relative_to(folder)
    return split_words(str(directory if group.recognized.format == "folder" else directory.with_suffix("")))
