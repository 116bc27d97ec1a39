"""Detection of datasets: a folder or file of rows and images, described as a file in config/datasets would.

File names and the first rows decide; nothing is read whole. If two descriptions are possible, the user chooses.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any

from dj2mgm.dataset_resolution.file_formats import ADDRESS_PATTERN, CONTENTS, FORMATS, SHOWN_NAMES
from dj2mgm.dataset_resolution.file_groups import (
    EVALUATION_FILE,
    SOURCE_NAMES,
    VALIDATION_NAMES,
    Advice,
    FileGroup,
    find_groups,
    find_words,
    is_folder,
    list_visible,
)
from dj2mgm.errors import InputError
from dj2mgm.settings.dataset_files import WITH_IMAGES, FilesDataset, SourcesDataset
from dj2mgm.settings.validation import validate_settings
from dj2mgm.storage.files import MIB, find_files, format_yaml
from dj2mgm.storage.image_files import leads_up

MAX_SUBFOLDERS = 200  # folders in which images are searched for


def detect_dataset(path: Path, name: str, requested_path: Path) -> tuple[FilesDataset | SourcesDataset, str]:
    """Describe a folder of files, or one file.

    Args:
        path: the folder or file.
        name: name of the dataset.
        requested_path: the path or hub id that the user states, for messages.

    Returns:
        The settings that a file in config/datasets would state, and lines for the user: the recognized formats, and a
        file with the same settings.

    Raises:
        InputError: no format or several formats are recognized, or a file is damaged.
    """
    folder = path if path.is_dir() else path.parent
    advice = Advice(name)
    training, held_back, unread = find_groups(path, advice)
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
    return settings, _write_note(requested_path, titles, values, skipped, advice)


def _join_groups(groups: Iterable[FileGroup]) -> list[FileGroup]:
    joined: dict[tuple, FileGroup] = {}
    for group in groups:
        before = joined.get(group.key)
        joined[group.key] = FileGroup(group.recognized, (*before.files, *group.files)) if before else group
    lists = [group for group in joined.values() if group.recognized.format not in WITH_IMAGES]
    if not _have_own_images(lists):
        return list(joined.values())
    joined_list = FileGroup(lists[0].recognized, tuple(file for group in lists for file in group.files))
    return [joined_list, *(group for group in joined.values() if group not in lists)]


def _have_own_images(lists: list[FileGroup]) -> bool:
    """Return whether lists of the same form are each in a folder of their own, with the images that they name.

    Lists with the same content may be copies.
    """
    files = [group.files[0] for group in lists]
    if len(files) < 2 or len({group.form for group in lists}) > 1 or len({file.parent for file in files}) < len(files):
        return False
    has_images = (_count_images(group.recognized.images, group.files[0].parent) for group in lists)
    return all(has_images) and len(set(map(_read_beginning, files))) == len(files)


def _read_beginning(file: Path) -> bytes:
    with open(file, "rb") as content:  # a regular file, as its sample shows
        return content.read(MIB)


def _choose_held_out(groups: list[FileGroup], folder: Path) -> FileGroup | None:
    """Return the pairs for validation, or else the pairs for test; None if several formats or files are possible."""
    pairs = [group for group in groups if group.recognized.split == "pretrain"]
    validation = _join_groups(group for group in pairs if find_words(group, folder) & VALIDATION_NAMES)
    candidates = validation or _join_groups(pairs)
    return candidates[0] if len(candidates) == 1 else None


def _choose_groups(groups: list[FileGroup], folder: Path, advice: Advice) -> dict[str, FileGroup]:
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
            raise advice.make_choice_error(
                f"{folder} holds {names}, and each may be the data",
                [_describe(others | {split: group}, folder, advice, has_choice=True) for group in candidates],
            )
    if not splits["pretrain"]:
        [group] = splits["finetune"]
        raise InputError(
            f"dataset: {group.files[0]} has conversations with {group.recognized.no_pairs}, which only stage 2 is "
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


def _describe(groups: dict[str, FileGroup], folder: Path, advice: Advice, has_choice: bool = False) -> dict:
    """Return the keys of a dataset's file.

    Args:
        groups: groups by split.
        folder: folder of the dataset.
        advice: remedies for messages.
        has_choice: whether this is one of several choices, in which further choices are not reported.
    """
    image_folders = {
        split: _find_images(group, folder)
        for split, group in groups.items()
        if group.recognized.format not in WITH_IMAGES
    }
    # if no image exists, the reader of rows names the missing images
    images = {split: folders or [str(groups[split].files[0].parent)] for split, folders in image_folders.items()}
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
        if image_folders.get(split) == [] and (outside := _find_outside_images(group, folder)):
            described = _replace(values, (*key_paths[split], "images"), outside)
            raise advice.make_outside_error(group.files[0], group.recognized.images[0], folder, outside, described)
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
    """Return whether a dataset is one file of Data-Juicer's pairs, and at most one of LLaVA's conversations.

    Image paths with `..` need sources, which read them relative to the file.
    """
    if any(map(leads_up, (image for group in groups.values() for image in group.recognized.images))):
        return False
    formats = {split: group.recognized.format for split, group in groups.items()}
    plain_formats = ({"pretrain": "data_juicer"}, {"pretrain": "data_juicer", "finetune": "llava"})
    return formats in plain_formats and all(len(group.files) == 1 for group in groups.values())


def _check_single(question: str, names: Sequence[str], values: dict, keys: tuple[str, ...], advice: Advice) -> None:
    """Raise InputError if several names are possible for a key of a dataset's file."""
    if len(names) > 1:
        raise advice.make_choice_error(
            f"{question} {' or '.join(names)}", [_replace(values, keys, name) for name in names]
        )


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
    """Return the folders that the image paths of a group's rows may be relative to; none if no image is found.

    The first images must exist: in the folder of the file, in the folder of the dataset, or in a folder inside them.
    Paths with `..` are relative to the file, and like absolute paths they must lead into one of the first two folders.
    """
    home = group.files[0].parent
    if any(file.parent != home for file in group.files):  # lists that each name images in their own folder
        return [os.path.commonpath([file.parent for file in group.files])]
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
    if most := max(counts.values(), default=0):
        return [directory for directory, count in counts.items() if count == most][:SHOWN_NAMES]
    targets = _locate_elsewhere(group)
    directories = (home, folder) if targets else ()
    return [str(directory) for directory in directories if any(_is_inside(path, directory) for path in targets)][:1]


def _find_outside_images(group: FileGroup, folder: Path) -> str | None:
    """Return the folder outside of the dataset in which the first images are, if there is one besides `/`."""
    if targets := _locate_elsewhere(group):
        common = os.path.commonpath(list(map(os.path.dirname, targets)))
        return common if common != os.sep else None
    above = (str(parent) for parent in Path(os.path.abspath(folder)).parents if parent != parent.parent)
    return next((parent for parent in above if _count_images(group.recognized.images, Path(parent))), None)


def _locate_elsewhere(group: FileGroup) -> list[str]:
    """Return the paths of existing images with an absolute path, or one with `..` from the file's folder.

    Their folders are resolved. The images are not, because files in the hub's cache are links.
    """
    paths = [image for image in group.recognized.images if os.path.isabs(image) or leads_up(image)]
    joined = (os.path.join(os.path.abspath(group.files[0].parent), path) for path in paths)
    return [
        os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        for path in joined
        if os.path.lexists(path)
    ]


def _is_inside(path: str, folder: Path) -> bool:
    return Path(path).is_relative_to(os.path.realpath(folder))


def _count_images(images: Iterable[str], folder: Path) -> int:
    paths = map(os.path.normpath, images)
    return sum(os.path.lexists(folder / path) for path in paths if not path.startswith(("..", "/")))


def _list_subfolders(*folders: Path) -> Iterator[Path]:
    for folder in dict.fromkeys(folders):
        inside = (folder / entry.name for entry in list_visible(folder) if is_folder(entry))
        yield from islice(inside, MAX_SUBFOLDERS)


def _write_note(requested_path: Path, titles: list[str], values: dict, skipped: list[str], advice: Advice) -> str:
    lines = [
        f"dataset {requested_path}: recognized as {' and '.join(titles)}.",
        f"To keep or change this, save these lines as {advice.file}, and use dataset={Path(advice.file).stem}:",
    ]
    lines += [f"  {line}" for line in format_yaml(values).splitlines()]
    if skipped:
        more = f" and {len(skipped) - SHOWN_NAMES} more" if len(skipped) > SHOWN_NAMES else ""
        lines.append(f"Not read: {', '.join(skipped[:SHOWN_NAMES])}{more}.")
    return "\n".join(lines)
