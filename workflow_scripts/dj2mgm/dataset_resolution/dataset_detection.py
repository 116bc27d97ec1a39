"""Detection of datasets: a folder or file of rows and images, described as a file in config/datasets would.

File names and the first rows decide; nothing is read whole. If two descriptions are possible, the user chooses.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any

from dj2mgm.dataset_resolution.file_formats import (
    ADDRESS_PATTERN,
    CONTENTS,
    FORMATS,
    NO_ROWS,
    SHOWN_NAMES,
    RecognizedFormat,
    enumerate_names,
    recognize_file,
    split_words,
)
from dj2mgm.errors import InputError
from dj2mgm.settings.dataset_files import WITH_IMAGES, FilesDataset, SourcesDataset
from dj2mgm.settings.string_formats import make_name
from dj2mgm.settings.validation import validate_settings
from dj2mgm.storage.files import find_files, format_yaml, format_yaml_line
from dj2mgm.storage.image_files import CONVERT_HEIF, HEIF_SUFFIXES, IMAGE_SUFFIXES

EVALUATION_FILE = "evaluation.jsonl"  # always a held-out split in the workflow's own format
SOURCE_NAMES = {"pretrain": "captions", "finetune": "instructions", "evaluation": "held_out"}  # by split
MAX_ENTRIES = 100_000  # files and folders that are listed in a search for files
MAX_KINDS = 64  # kinds of file names; one file of each kind is read
MAX_SUBFOLDERS = 200  # folders in which images are searched for
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
    def key(self) -> tuple:
        """Groups with the same key are one source."""
        columns = tuple(sorted(self.recognized.columns.items()))
        return self.recognized.format, columns, () if self.recognized.format in WITH_IMAGES else self.files


@dataclass(frozen=True)
class DetectedDataset:
    """A described dataset.

    Attributes:
        settings: settings that a file in config/datasets would state.
        note: lines for the user: the recognized formats, and a file with the same settings.
    """

    settings: FilesDataset | SourcesDataset
    note: str


def detect_dataset(path: Path, name: str, requested_path: Path) -> DetectedDataset:
    """Describe a folder of files, or one file.

    Args:
        path: the folder or file.
        name: name of the dataset.
        requested_path: the path or hub id that the user states, for messages.

    Raises:
        InputError: no format or several formats are recognized, or a file is damaged.
    """
    folder = path if path.is_dir() else path.parent
    advice = _Advice(name)
    training, held_back, unread = _find_groups(path, advice)
    groups_by_split = _choose_groups(training or held_back, folder, advice)
    held_back = held_back if training else []
    _check_separate(groups_by_split, held_back)
    evaluation = {}
    if path.is_dir() and os.path.lexists(path / EVALUATION_FILE):  # a broken link is reported by `check_files`
        evaluation = {"evaluation": {"file": str(path / EVALUATION_FILE), "images": str(path)}}
    elif held_out := _choose_held_out(held_back, folder):
        groups_by_split["evaluation"] = held_out
        held_back = [group for group in held_back if not set(group.files) <= set(held_out.files)]
    values = _describe(groups_by_split, folder, advice) | evaluation
    kind = SourcesDataset if "sources" in values else FilesDataset
    settings = validate_settings(kind, values, f"dataset {requested_path}")
    titles = dict.fromkeys(FORMATS[group.recognized.format].title for group in groups_by_split.values())
    skipped = [_show_files(group, folder) for group in held_back] + unread
    return DetectedDataset(settings, _write_note(requested_path, titles, values, skipped, advice))


# Search for files.


@dataclass(frozen=True)
class _Advice:
    """Ends of messages, with the lines to write into a dataset's file."""

    dataset: str

    @property
    def file(self) -> str:
        """Path of a file in config/datasets; its name is valid even if the dataset's own name is not."""
        return f"config/datasets/{make_name(self.dataset)}.yaml"

    def describe(self, file: Path, problem: str) -> str:
        """Return a sentence with the way to describe a file that has this problem."""
        if problem == NO_ROWS:
            return "The formats are in docs/data.md"
        kind = next((name for name in ("table", "parquet") if file.suffix.lower() in FORMATS[name].suffixes), None)
        if kind is None:
            return f"Describe the data in {self.file} (docs/data.md)"
        columns = {"image": "<column>", "text": "<column>"}
        source = {"format": kind, "path": str(file), "columns": columns}
        return f"Name its columns in {self.file}: `{format_yaml_line({'sources': {SOURCE_NAMES['pretrain']: source}})}`"

    def choose(self, question: str, choices: Sequence[dict]) -> InputError:
        """Return the error about several possible descriptions."""
        texts = " or ".join(f"`{format_yaml_line(choice)}`" for choice in choices)
        name = Path(self.file).stem
        return InputError(f"dataset: {question}. Save the right one as {self.file}, and use dataset={name}: {texts}")


def _find_groups(path: Path, advice: _Advice) -> tuple[list[FileGroup], list[FileGroup], list[str]]:
    """Return the groups to train on, the groups of validation and test, and the names of unrecognized files.

    Folders inside are searched only if the folder itself has nothing to train on.
    """
    folder = path if path.is_dir() else path.parent
    levels = _list_levels(path) if path.is_dir() else iter([[(path.parent, [path.name])]])
    problems: dict[str, str] = {}
    training: list[FileGroup] = []
    held_back: list[FileGroup] = []
    names: list[str] = []
    for level in (islice(levels, 1), levels):  # the folder itself, then all deeper levels
        listings = [listing for directories in level for listing in directories]
        names += [name for _, file_names in listings for name in file_names]
        for group in (*_find_captioned(listings), *_recognize_files(listings, folder, problems)):
            (held_back if _is_held_back(group, folder) else training).append(group)
        if training:
            break
    if training or held_back:
        return training, held_back, list(problems)
    if problems:
        file, problem = next(iter(problems.items()))
        raise InputError(f"dataset: {folder / file}: {problem}. {advice.describe(folder / file, problem)}")
    if not names:
        raise InputError(f"dataset: {path} is empty; put rows or images there, or correct the path")
    if any(name.lower().endswith(IMAGE_SUFFIXES) for name in names):
        raise InputError(
            f"dataset: {path} holds images without captions. Write the caption of each image to a .txt file of the "
            "same name next to it, or add a table of paths and captions (.csv)"
        )
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
            visible = _list_visible(directory)
            below += [Path(directory, entry.name) for entry in visible if entry.is_dir(follow_symlinks=False)]
            names = [entry.name for entry in visible if not _is_folder(entry)]
            listings.append((directory, names))
            entry_count += len(visible)
            if entry_count > MAX_ENTRIES:
                yield listings
                return
        yield listings
        level = below


def _list_visible(folder: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"dataset: {folder} cannot be read ({error.strerror}); allow it, or move it away") from None


def _is_folder(entry: os.DirEntry) -> bool:
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
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix.lower() not in suffixes or name == EVALUATION_FILE or (suffix == ".json" and stem in images):
                continue
            files_by_pattern.setdefault((directory, re.sub(r"\d+", "0", stem), suffix), []).append(directory / name)
    if len(files_by_pattern) > MAX_KINDS:
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
    words = _find_words(group, folder)
    return bool(words & HELD_BACK) and not words & TRAINING_WORDS


def _find_words(group: FileGroup, folder: Path) -> set[str]:
    """Return the words in the names of a group's first file and of the folders around it."""
    directory = group.files[0].relative_to(folder)
    return split_words(str(directory if group.recognized.format == "folder" else directory.with_suffix("")))


# Description of the groups.


def _join_groups(groups: Iterable[FileGroup]) -> list[FileGroup]:
    joined: dict[tuple, FileGroup] = {}
    for group in groups:
        before = joined.get(group.key)
        joined[group.key] = FileGroup(group.recognized, (*before.files, *group.files)) if before else group
    return list(joined.values())


def _choose_held_out(groups: list[FileGroup], folder: Path) -> FileGroup | None:
    """Return the pairs for validation, or else the pairs for test; None if several formats or files are possible."""
    pairs = [group for group in groups if group.recognized.split == "pretrain"]
    validation = _join_groups(group for group in pairs if _find_words(group, folder) & VALIDATION_NAMES)
    candidates = validation or _join_groups(pairs)
    return candidates[0] if len(candidates) == 1 else None


def _choose_groups(groups: list[FileGroup], folder: Path, advice: _Advice) -> dict[str, FileGroup]:
    """Return the group of each split; groups of one format are joined.

    Conversations next to Data-Juicer's pairs are for stage 2.
    """
    joined = _join_groups(groups)
    has_pairs = any(group.recognized.format == "data_juicer" for group in joined)
    splits: dict[str, list[FileGroup]] = {"pretrain": [], "finetune": []}
    for group in joined:
        splits["finetune" if has_pairs and group.recognized.is_conversation else group.recognized.split].append(group)
    others = {split: candidates[0] for split, candidates in splits.items() if len(candidates) == 1}
    for split, candidates in splits.items():
        if len(candidates) > 1:
            names = " and ".join(_show_files(group, folder) for group in candidates)
            raise advice.choose(
                f"{folder} holds {names}, and each may be the data",
                [_describe(others | {split: group}, folder, advice, has_choice=True) for group in candidates],
            )
    if not splits["pretrain"]:
        raise InputError(
            f"dataset: {splits['finetune'][0].files[0]} has conversations of several questions, which only stage 2 is "
            "trained on; add pairs of one image and one text for stage 1 (docs/data.md)"
        )
    return {split: candidates[0] for split, candidates in splits.items() if candidates}


def _check_separate(groups_by_split: dict[str, FileGroup], held_back: list[FileGroup]) -> None:
    """Raise InputError if the common folder of captioned images also holds images of validation or test."""
    for group in groups_by_split.values():
        common = os.path.commonpath(group.files)
        other = next((other.files[0] for other in held_back if other.files[0].is_relative_to(common)), None)
        if group.recognized.format == "folder" and other:
            raise InputError(
                f"dataset: {common} holds captioned images of {group.files[0]} and of {other}, which is not trained "
                "on; name one folder, or list several as sources in a config/datasets/<name>.yaml (docs/data.md)"
            )


def _show_files(group: FileGroup, folder: Path) -> str:
    names = [str(file.relative_to(folder)) if file != folder else "images" for file in group.files]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} ({group.recognized.format})"


def _describe(groups: dict[str, FileGroup], folder: Path, advice: _Advice, has_choice: bool = False) -> dict:
    """Return the keys of a dataset's file.

    Args:
        groups: groups by split.
        folder: folder of the dataset.
        advice: remedies for messages.
        has_choice: whether this is one of several choices, in which further choices are not reported.
    """
    images = {
        split: _find_images(group, folder)
        for split, group in groups.items()
        if group.recognized.format not in WITH_IMAGES
    }
    if _are_plain(groups):
        values: dict = {
            split: {"file": str(group.files[0]), "images": images[split][0]} for split, group in groups.items()
        }
        key_paths = {split: (split,) for split in groups}
    else:
        values = {"sources": {}}
        key_paths = {split: ("sources", SOURCE_NAMES[split]) for split in groups}
        for split, group in groups.items():
            source: dict[str, Any] = {"format": group.recognized.format, "path": _name_files(group, folder)}
            source |= {"images": images[split][0]} if split in images else {}
            source |= {"split": split} if split != "pretrain" else {}
            columns = {key: names[0] for key, names in group.recognized.columns.items()}
            values["sources"][SOURCE_NAMES[split]] = source | ({"columns": columns} if columns else {})
    for split, group in groups.items() if not has_choice else ():
        _check_single(
            f"{group.files[0]}: its images may be in",
            images.get(split, []),
            values,
            (*key_paths[split], "images"),
            advice,
        )
        for key, names in group.recognized.columns.items():
            question = f"{group.files[0]}: its {CONTENTS[key]} may be in the column"
            _check_single(question, names, values, (*key_paths[split], "columns", key), advice)
    return values


def _are_plain(groups: dict[str, FileGroup]) -> bool:
    """Return whether a dataset is one file of Data-Juicer's pairs, and at most one of LLaVA's conversations."""
    formats = {split: group.recognized.format for split, group in groups.items()}
    plain_formats = ({"pretrain": "data_juicer"}, {"pretrain": "data_juicer", "finetune": "llava"})
    return formats in plain_formats and all(len(group.files) == 1 for group in groups.values())


def _check_single(question: str, names: Sequence[str], values: dict, keys: tuple[str, ...], advice: _Advice) -> None:
    """Raise InputError if several names are possible for a key of a dataset's file."""
    if len(names) > 1:
        raise advice.choose(f"{question} {' or '.join(names)}", [_replace(values, keys, name) for name in names])


def _replace(values: dict, keys: tuple[str, ...], value: str) -> dict:
    """Return a copy of nested values in which the key at the end of `keys` has another value."""
    key, *more = keys
    return values | {key: _replace(values[key], tuple(more), value) if more else value}


def _name_files(group: FileGroup, folder: Path) -> str:
    """Return a path or pattern that names exactly the files of a group."""
    files, kind = sorted(group.files), group.recognized.format
    parents = [file if kind == "folder" else file.parent for file in files]
    common = Path(os.path.commonpath(parents))
    if kind == "folder":
        return str(common)
    if len(files) == 1:
        return str(files[0])
    suffix = files[0].suffix
    start = escape(os.path.commonprefix([file.stem for file in files]).rstrip("0123456789"))
    patterns = (f"{escape(str(common))}/{middle}{start}*{suffix}" for middle in ("", "*/", "**/"))
    for path in (str(folder), str(common), *patterns):
        if find_files(path, FORMATS[kind].suffixes) == files:
            return path
    raise InputError(
        f"dataset: no single path names {files[0]} and the {len(files) - 1} other files of the format {kind}; list "
        "them as several sources in a config/datasets/<name>.yaml (docs/data.md)"
    )


def _find_images(group: FileGroup, folder: Path) -> list[str]:
    """Return the folders that the image paths of a group's rows may be relative to.

    The first images must exist: in the folder of the file, in the folder of the dataset, or in a folder inside them.
    """
    home = group.files[0].parent
    if address := next((image for image in group.recognized.images if ADDRESS_PATTERN.match(image)), None):
        raise InputError(
            f"dataset: {group.files[0]} names images by addresses ({address[:100]}), and nothing is downloaded; "
            "download them (img2dataset does), and name the files"
        )
    for directory in (home, folder):
        if _count_images(group.recognized.images, directory):
            return [str(directory)]
    counts = {
        str(directory): _count_images(group.recognized.images, directory)
        for directory in _list_subfolders(home, folder)
    }
    most = max(counts.values(), default=0)
    # if no image exists, the reader of rows names the missing images
    return [directory for directory, count in counts.items() if count == most][:SHOWN_NAMES] if most else [str(home)]


def _count_images(images: Iterable[str], folder: Path) -> int:
    paths = map(os.path.normpath, images)
    return sum(os.path.lexists(folder / path) for path in paths if not path.startswith(("..", "/")))


def _list_subfolders(*folders: Path) -> Iterator[Path]:
    for folder in dict.fromkeys(folders):
        inside = (folder / entry.name for entry in _list_visible(folder) if _is_folder(entry))
        yield from islice(inside, MAX_SUBFOLDERS)


def _write_note(requested_path: Path, titles: list[str], values: dict, skipped: list[str], advice: _Advice) -> str:
    lines = [
        f"dataset {requested_path}: recognized as {' and '.join(titles)}.",
        f"To change this, save these lines as {advice.file}, edit them, and use dataset={Path(advice.file).stem}:",
    ]
    lines += [f"  {line}" for line in format_yaml(values).splitlines()]
    if skipped:
        more = f" and {len(skipped) - SHOWN_NAMES} more" if len(skipped) > SHOWN_NAMES else ""
        lines.append(f"Not read: {', '.join(skipped[:SHOWN_NAMES])}{more}.")
    return "\n".join(lines)
