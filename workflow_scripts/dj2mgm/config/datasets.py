"""The dataset of an experiment: a file in config/datasets, or a folder of the user's."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.config.reading import cached_snapshot, config_file, names_folder, names_in, read_config, suggestion
from dj2mgm.config.settings.dataset_files import (
    SPLITS,
    FilesDataset,
    ReadableDataset,
    ReadableSources,
    SourceOnDisk,
    SourcesDataset,
    SourceSettings,
    dataset_kind,
)
from dj2mgm.config.settings.schema import build_schema
from dj2mgm.config.settings.strings import check_format, has_format
from dj2mgm.config.settings.validation import validated
from dj2mgm.errors import InputError
from dj2mgm.files import APPLE_DOUBLE, IMAGE_SUFFIXES, SOURCES, WITH_IMAGES, find_files
from dj2mgm.plain_files import resolve_inside

RESULTS = "results/datasets"
SUFFIXES = {  # endings of each format's files; data/sources has a reader of the same name
    "data_juicer": (".jsonl",),
    "folder": IMAGE_SUFFIXES,
    "llava": (".json", ".jsonl"),
    "parquet": (".parquet",),
    "sharegpt": (".json", ".jsonl"),
    "table": (".csv", ".tsv"),
    "webdataset": (".tar",),
}


@dataclass(frozen=True)
class Dataset:
    """A dataset whose files are on this machine."""

    name: str
    settings: ReadableDataset

    @property
    def images(self) -> dict[str, str]:
        """Folder that image paths are relative to, by split."""
        splits, folder = self.settings.splits, f"{RESULTS}/{self.name}"
        if self.settings.is_drawn:
            return dict.fromkeys(SPLITS, folder)
        if isinstance(self.settings, ReadableSources):
            return dict.fromkeys(SPLITS, f"{folder}/{SOURCES}") | {name: split.images for name, split in splits.items()}
        return {name: splits.get(name, splits["pretrain"]).images for name in SPLITS}


def resolve_dataset(value: str) -> Dataset:
    """Return a dataset by its name in config/datasets or by its folder.

    Raises:
        InputError: neither a known dataset nor a folder that holds one Data-Juicer jsonl.
    """
    known = names_in("datasets")
    if value in known and has_format("name", value):
        settings, name = _read_dataset(config_file("datasets", f"{value}.yaml")), value
    elif os.path.isdir(value):
        settings, name = _describe_folder(Path(value)), _read_name(Path(value))
    else:
        near = difflib.get_close_matches(value, [*known, *_folders_beside(value)], n=1)
        is_folder = near and near[0] not in known
        if is_folder:
            hint = f"did you mean the folder {near[0]!r}?"
        else:
            hint = "correct the path" if os.sep in value else suggestion(value, known)
        raise InputError(f"dataset: {value!r} is neither a folder nor a file in config/datasets; {hint}")
    return Dataset(name, settings)


def _folders_beside(path: str) -> list[str]:
    """Return the folders next to `path`, as paths of the same form."""
    parent = os.path.dirname(path)
    try:
        with os.scandir(parent or ".") as entries:
            return [os.path.join(parent, entry.name) for entry in entries if entry.is_dir()]
    except (OSError, ValueError):
        return []


def list_dataset_files(dataset: ReadableDataset) -> list[str]:
    """Return the user's own files that a dataset is made of; the embedded dataset has none.

    Raises:
        InputError: a source without files.
    """
    files = [
        file for split in dataset.splits.values() for file in (split.file, getattr(split, "questions", "")) if file
    ]
    for source in _sources_in(dataset).values():
        read = find_files(source.path, source.suffixes)
        captions = [file.with_suffix(".txt") for file in read] if source.format == "folder" else []
        files += [str(file) for file in (*read, *captions)]
    return files


def _sources_in(dataset: ReadableDataset) -> dict[str, SourceOnDisk]:
    return dataset.sources if isinstance(dataset, ReadableSources) else {}


def image_lists(dataset: ReadableDataset) -> list[tuple[str, str]]:
    """Return the user's files that name images, each with the folder of its images.

    Formats that contain the images themselves have none.
    """
    lists = [(split.file, split.images) for split in dataset.splits.values()]
    for source in _sources_in(dataset).values():
        if source.format not in WITH_IMAGES:
            lists += [(str(file), source.images) for file in find_files(source.path, source.suffixes)]
    return lists


def check_files(dataset: ReadableDataset) -> None:
    """Check that the files and folders that a dataset's file names are there.

    Raises:
        InputError: names the split and the missing file or folder.
    """
    for name, split in dataset.splits.items():
        for key in ("file", "questions"):
            if (file := getattr(split, key, "")) and not os.path.isfile(file):
                raise InputError(f"dataset: {name}.{key}: there is no file {file}; correct the path")
        check_folder(f"dataset: {name}.images", split.images)


def check_folder(where: str, folder: str) -> None:
    """Raise InputError if a folder is missing; the message begins with `where`, which names its key."""
    if not os.path.isdir(folder):
        raise InputError(f"{where}: there is no folder {folder}; correct the path, or create the folder")


def _read_dataset(path: Path) -> ReadableDataset:
    kind = dataset_kind(read_config(path))
    settings = validated(kind, read_config(path, build_schema(kind)), str(path))
    if not isinstance(settings, SourcesDataset):
        return settings
    sources = {name: _source(f"{path}: sources.{name}", name, values) for name, values in settings.sources.items()}
    if not any(source.split == "pretrain" for source in sources.values()):
        raise InputError(f"{path}: sources: none is of the split pretrain; stage 1 and the filters need pairs")
    stated = {key: getattr(settings, key) for key in settings.model_fields_set}
    return ReadableSources.model_construct(**stated | {"sources": sources})


def _source(where: str, name: str, values: SourceSettings) -> SourceOnDisk:
    """Return a source with its path on this machine, and the folder that its image paths are relative to."""
    check_format(where, "name", name)
    path, suffixes, folder = Path(values.path), SUFFIXES[values.format], None
    if not path.exists() and (cached := cached_snapshot(values.path, "datasets")):
        path = cached
        folder = cached.parents[1]  # the repository, to whose other files the snapshot's names are links
    if values.images:
        check_folder(f"{where}: images", values.images)
    files = find_files(path, suffixes)
    if wrong := next((file for file in files if file.suffix.lower() not in suffixes), None):
        raise InputError(f"{where}: {wrong} does not end with {' or '.join(suffixes)}; name files of this format only")
    if not files:
        hub = "" if names_folder(values.path) else f"; `hf download --repo-type dataset {path}` fetches a hub id"
        raise InputError(f"{where}: {path} names no file that ends with {' or '.join(suffixes)}{hub}")
    if path.is_dir() and values.format != "folder":  # images of a folder are checked one by one
        _check_links(where, path, files)
    if folder is None:
        folder = path if path.is_dir() else Path(os.path.commonpath([file.parent for file in files]))
    if values.images and values.format in WITH_IMAGES:
        raise InputError(f"{where}: images: {values.format} contains its images; remove the key")
    stated = {key: getattr(values, key) for key in values.model_fields_set}
    found = {"path": str(path), "images": values.images or str(folder), "split": values.split}
    return SourceOnDisk.model_construct(**stated | found, suffixes=list(suffixes))


def _check_links(where: str, folder: Path, files: list[Path]) -> None:
    """Raise InputError for a link out of the folder: a downloaded folder may contain links to the user's own files."""
    for file in files:
        try:
            resolve_inside(file, folder)
        except InputError as error:
            raise InputError(
                f"{where}: {error}. If the link is yours, name its target: path: {file.resolve().parent}/*{file.suffix}"
            ) from None


def resolve_amounts(dataset: Dataset, asked: dict[str, float]) -> dict[str, float]:
    """Return the amount of each source to train on.

    Args:
        asked: the experiment's amounts, which replace those of the dataset.

    Raises:
        InputError: the dataset has no such source.
    """
    sources = _sources_in(dataset.settings)
    for name in asked:
        if name not in sources:
            known = suggestion(name, sources) if sources else "it has one source only"
            raise InputError(f"sources: the dataset {dataset.name} has no source {name!r}; {known}")
    return {name: asked.get(name, source.amount) for name, source in sources.items()}


def _read_name(folder: Path) -> str:
    """Return the name of a folder, also of `.`; it may have spaces and umlauts."""
    name = folder.resolve().name
    check_format(f"dataset: the folder {name!r}", "folder", name)
    return name


def _describe_folder(folder: Path) -> FilesDataset:
    """Describe a folder with one Data-Juicer .jsonl, and optionally a LLaVA .json and an evaluation.jsonl."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith(APPLE_DOUBLE))
    captions = [path for path in files if path.suffix == ".jsonl" and path.name != "evaluation.jsonl"]
    instructions = [path for path in files if path.suffix == ".json"]
    if len(captions) != 1 or len(instructions) > 1:
        names = ", ".join(p.name for p in [*captions, *instructions]) or "none"
        raise InputError(
            f"dataset: {folder} must hold exactly one Data-Juicer .jsonl and at most one LLaVA .json, found {names}; "
            f"name the files in a config/datasets/<name>.yaml instead"
        )
    settings = {"pretrain": {"file": str(captions[0]), "images": str(folder)}}
    if instructions:
        settings["finetune"] = {"file": str(instructions[0]), "images": str(folder)}
    if os.path.lexists(folder / "evaluation.jsonl"):  # a broken link is reported by `check_files`
        settings["evaluation"] = {"file": str(folder / "evaluation.jsonl"), "images": str(folder)}
    return validated(FilesDataset, settings, f"dataset {folder}")
