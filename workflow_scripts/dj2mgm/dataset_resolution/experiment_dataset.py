"""The dataset of an experiment: a file in config/datasets, a dataset of the hub, or the user's own folder or file."""

import difflib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dj2mgm.dataset_resolution.dataset_detection import detect_dataset
from dj2mgm.dataset_resolution.file_formats import FORMATS
from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import find_cached_snapshot, is_folder_path
from dj2mgm.settings.base import build_schema
from dj2mgm.settings.config_files import list_config_names, locate_config_file, read_config, suggest_name
from dj2mgm.settings.dataset_files import (
    CHECK_FILES,
    SPLITS,
    WITH_CAPTION_FILES,
    WITH_IMAGES,
    DatasetFile,
    HubArchive,
    HubBenchmark,
    HubParquet,
    ReadableDataset,
    ReadableSources,
    SourceOnDisk,
    SourcesDataset,
    SourceSettings,
    detect_dataset_kind,
    detect_hub_file_kind,
)
from dj2mgm.settings.string_formats import check_format, has_format
from dj2mgm.settings.targets import RESERVED_NAMES
from dj2mgm.settings.validation import validate_settings
from dj2mgm.storage.files import discard_files, find_files, read_if_whole, resolve_inside
from dj2mgm.storage.image_files import IMAGE_FOLDERS_FILE

DOWNLOADS_FOLDER = Path("downloads")
FETCH_RECORD = ".fetched.json"  # names the source of a complete folder; readers of data skip hidden files


@dataclass(frozen=True)
class HubData:
    """A dataset or benchmark of the hub.

    Attributes:
        name: name that the user states: the name of its file, with `/<subset>` if it has subsets.
        file: content of its file.
    """

    name: str
    file: HubBenchmark | HubParquet | HubArchive

    @property
    def folder(self) -> Path:
        """Folder that the data is fetched into."""
        return DOWNLOADS_FOLDER / self.name

    @property
    def subset(self) -> str:
        """Name of the subset; empty if there are none."""
        return self.name.partition("/")[2]

    @property
    def is_fetched(self) -> bool:
        """True if all files are on this machine."""
        return (self.folder / FETCH_RECORD).is_file()


def find_hub_dataset(value: str) -> HubData | None:
    """Return a known dataset of the hub by a value of `dataset`, or None if it names none.

    Raises:
        InputError: the dataset has subsets, and none is named.
    """
    name, _, subset = value.partition("/")
    if name not in list_config_names("hub"):
        return None
    file = read_hub_file(name)
    if isinstance(file, HubBenchmark):
        raise InputError(f"dataset: {name} is a benchmark; fetch it with --config 'fetch={{benchmarks: [{name}]}}'")
    if bool(subset) != (isinstance(file, HubParquet) and file.subsets):
        url = f"https://huggingface.co/datasets/{file.hub_id}"
        remedy = f"it has no subsets; write dataset={name}"
        if not subset:
            remedy = f"name one of its subsets, dataset={name}/<subset>; {url} lists them"
        raise InputError(f"dataset: {value}: {remedy}")
    if subset:
        check_format(f"dataset: the subset {subset!r}", "folder", subset)
    return HubData(value, file)


def read_hub_file(name: str) -> HubBenchmark | HubParquet | HubArchive:
    path = locate_config_file("hub", f"{name}.yaml")
    kind = detect_hub_file_kind(read_config(path))
    return validate_settings(kind, read_config(path, build_schema(kind)), str(path))


DATASETS_FOLDER = "results/datasets"
SHARE_TOLERANCE = 1e-6  # tolerance for the sum of shares


@dataclass(frozen=True)
class Dataset:
    """A dataset whose files are on this machine.

    Attributes:
        note: lines about a recognized folder or file; empty for a file in config/datasets.
    """

    name: str
    settings: ReadableDataset
    note: str = ""

    @property
    def images(self) -> dict[str, str]:
        """Folder that image paths are relative to, by split."""
        splits, folder = self.settings.splits, f"{DATASETS_FOLDER}/{self.name}"
        if self.settings.is_rendered:
            return dict.fromkeys(SPLITS, folder)
        if isinstance(self.settings, ReadableSources):
            return dict.fromkeys(SPLITS, f"{folder}/{IMAGE_FOLDERS_FILE}") | {
                name: split.images for name, split in splits.items()
            }
        return {name: splits.get(name, splits["pretrain"]).images for name in SPLITS}


def resolve_dataset(value: str) -> Dataset:
    """Return a dataset by its name in config/datasets or config/hub, by its folder or file, or by its hub id.

    Raises:
        InputError: no dataset is there, or its format is not recognized.
    """
    dataset_names = list_config_names("datasets")
    if value in dataset_names and has_format("name", value):
        return Dataset(name_dataset(value), _read_dataset(locate_config_file("datasets", f"{value}.yaml")))
    if os.path.isdir(value) or os.path.isfile(value):
        return _detect(Path(value), Path(value))
    if os.path.exists(value):
        raise InputError(f"dataset: {value!r} is a device, a pipe or a socket; name a folder or a file")
    if data := find_hub_dataset(value):
        if not data.is_fetched:
            raise InputError(
                f"dataset: {value} is not on this machine; run `snakemake fetch --config dataset={value}` first: "
                f"{data.file.hub_id}, license {data.file.license}"
            )
        return _add_license(_detect(data.folder, Path(value)), data.file.license)
    if has_format("repository", value) and (snapshot := find_cached_snapshot(value, "datasets")):
        return _detect(snapshot, Path(value))
    made = Path(DATASETS_FOLDER, value)
    if similar_path := _suggest_similar_path(value, dataset_names):
        hint = f"did you mean {similar_path!r}?"
    elif has_format("repository", value) and not is_folder_path(value):
        hint = f"if it is a dataset of the hub, run `snakemake fetch --config dataset={value}` first"
    elif os.sep not in value and (source := find_dataset_source(value, read_if_whole(made / "config.yaml"))):
        hint = f"{made} was made from {source}: name this path again, or describe it in config/datasets/{value}.yaml"
    else:
        hint = "correct the path" if os.sep in value else suggest_name(value, dataset_names)
    raise InputError(f"dataset: {value!r} is neither a folder, nor a file, nor a name in config/datasets; {hint}")


def _detect(path: Path, requested_path: Path) -> Dataset:
    """Return the dataset in a folder or file, for which the user states the path or hub id `requested_path`."""
    name = name_dataset(str(requested_path))
    try:
        settings, note = detect_dataset(path, name, requested_path)
    except InputError:
        discard_files(Path(DATASETS_FOLDER, name), CHECK_FILES)  # they show other data
        raise
    return Dataset(name, _locate_sources(settings, f"dataset {requested_path}"), note)


def _add_license(dataset: Dataset, license: str) -> Dataset:
    """Return a dataset of sources, each with a license that its files do not state."""
    sources = {
        name: source.model_copy(update={"license": license}) for name, source in dataset.settings.sources.items()
    }
    return replace(dataset, settings=dataset.settings.model_copy(update={"sources": sources}))


def _suggest_similar_path(path: str, dataset_names: list[str]) -> str | None:
    """Return the file or folder next to `path` with the most similar name; None if a known name is more similar."""
    parent, name = os.path.split(path.rstrip(os.sep))
    try:
        names = os.listdir(parent or ".")
    except (OSError, ValueError):
        return None
    similar_names = difflib.get_close_matches(name, [*dataset_names, *names], n=1)
    return os.path.join(parent, similar_names[0]) if similar_names and similar_names[0] not in dataset_names else None


def list_dataset_files(dataset: ReadableDataset) -> list[str]:
    """Return the user's own files that a dataset is made of; the embedded dataset has none.

    Raises:
        InputError: a source without files.
    """
    files = [
        file for split in dataset.splits.values() for file in (split.file, getattr(split, "questions", "")) if file
    ]
    for source in _get_sources(dataset).values():
        read = find_files(source.path, source.suffixes)
        captions = [file.with_suffix(".txt") for file in read] if source.format == "folder" else []
        files += [str(file) for file in (*read, *filter(Path.is_file, captions))]
    return files


def _get_sources(dataset: ReadableDataset) -> dict[str, SourceOnDisk]:
    return dataset.sources if isinstance(dataset, ReadableSources) else {}


def list_image_path_files(dataset: ReadableDataset) -> list[tuple[str, str]]:
    """Return the user's files that name images, each with the folder of its images.

    Formats that contain the images themselves have none.
    """
    lists = [(split.file, split.images) for split in dataset.splits.values()]
    for source in _get_sources(dataset).values():
        if source.format not in WITH_IMAGES:
            lists += [(str(file), source.images) for file in find_files(source.path, source.suffixes)]
    return lists


def check_files(dataset: ReadableDataset) -> None:
    """Check that the files and folders that a dataset's file names exist.

    Raises:
        InputError: names the split and the missing file or folder.
    """
    for name, split in dataset.splits.items():
        for key in ("file", "questions"):
            if (file := getattr(split, key, "")) and not os.path.isfile(file):
                raise InputError(f"dataset: {name}.{key}: there is no file {file}; correct the path")
        require_folder(f"dataset: {name}.images", split.images)


def require_folder(location: str, folder: str) -> None:
    """Raise InputError if a folder is missing; the message begins with `location`, which names its key."""
    if not os.path.isdir(folder):
        raise InputError(f"{location}: there is no folder {folder}; correct the path, or create the folder")


def _read_dataset(path: Path) -> ReadableDataset:
    kind = detect_dataset_kind(read_config(path))
    return _locate_sources(validate_settings(kind, read_config(path, build_schema(kind)), str(path)), str(path))


def _locate_sources(settings: DatasetFile, location: str) -> ReadableDataset:
    """Return a dataset with the paths of its sources on this machine; messages begin with `location`."""
    if not isinstance(settings, SourcesDataset):
        return settings
    sources = {
        name: _locate_source(f"{location}: sources.{name}", name, values) for name, values in settings.sources.items()
    }
    if not any(source.split == "pretrain" for source in sources.values()):
        raise InputError(f"{location}: sources: no source has `split: pretrain`; stage 1 and the filters need pairs")
    held_out = next((name for name, source in sources.items() if source.split == "evaluation"), None)
    if held_out and settings.evaluation:
        raise InputError(f"{location}: the source {held_out} and `evaluation` both name held-out images; remove one")
    explicit_settings = {key: getattr(settings, key) for key in settings.model_fields_set}
    return ReadableSources.model_construct(**explicit_settings | {"sources": sources})


def _locate_source(location: str, name: str, values: SourceSettings) -> SourceOnDisk:
    """Return a source with its path on this machine, and the folder that its image paths are relative to."""
    check_format(location, "name", name)
    path, suffixes = Path(values.path), FORMATS[values.format].suffixes
    if not path.exists() and (cached := find_cached_snapshot(values.path, "datasets")):
        path = cached
    if values.images:
        require_folder(f"{location}: images", values.images)
    files = find_files(path, suffixes)
    if wrong := next((file for file in files if file.suffix.lower() not in suffixes), None):
        raise InputError(
            f"{location}: {wrong} does not end with {' or '.join(suffixes)}; name files of this format only"
        )
    if not files:
        hub = "" if is_folder_path(values.path) else f"; `hf download --repo-type dataset {path}` fetches a hub id"
        raise InputError(f"{location}: {path} names no file that ends with {' or '.join(suffixes)}{hub}")
    if path.is_dir() and values.format != "folder":  # images of a folder are checked one by one
        _check_links(location, path, files)
    folder = path if path.is_dir() else Path(os.path.commonpath([file.parent for file in files]))
    if values.images and values.format in WITH_IMAGES:
        raise InputError(f"{location}: images: {values.format} contains its images; remove the key")
    if "uncaptioned" in values.model_fields_set and values.format not in WITH_CAPTION_FILES:
        raise InputError(f"{location}: uncaptioned: {values.format} has no files of captions; remove the key")
    explicit_settings = {key: getattr(values, key) for key in values.model_fields_set}
    path_settings = {"path": str(path), "images": values.images or str(folder), "split": values.split}
    return SourceOnDisk.model_construct(**explicit_settings | path_settings, suffixes=list(suffixes))


def _check_links(location: str, folder: Path, files: list[Path]) -> None:
    """Raise InputError for a link out of the folder: a downloaded folder may contain links to the user's own files."""
    for file in files:
        try:
            resolve_inside(file, folder)
        except InputError as error:
            raise InputError(
                f"{location}: {error}. If the link is yours, name its target: path: "
                f"{file.resolve().parent}/*{file.suffix}"
            ) from None


def resolve_amounts(dataset: Dataset, amounts: dict[str, float]) -> dict[str, float]:
    """Return the amount of each source to train on.

    Args:
        amounts: the experiment's amounts, which replace the dataset's amounts.

    Raises:
        InputError: the dataset has no such source.
    """
    sources = _select_trained_sources(dataset, "sources", amounts)
    return {name: amounts.get(name, source.amount) for name, source in sources.items()}


def check_shares(dataset: Dataset, shares: dict[str, float], amounts: dict[str, float]) -> None:
    """Check the sources' shares of samples.

    Args:
        dataset: the dataset.
        shares: the experiment's shares by source.
        amounts: the experiment's amounts by source.

    Raises:
        InputError: the dataset has no such source, a source also has an amount, or the shares of a split exceed 1.
    """
    sources = _select_trained_sources(dataset, "shares", shares)
    if both := next((name for name in shares if name in amounts), None):
        raise InputError(f"shares.{both}: sources.{both} states an amount, too; keep one of them")
    totals: Counter[str] = Counter()
    for name, share in shares.items():
        totals[sources[name].split] += share
    for split, total in totals.items():
        if total > 1 + SHARE_TOLERANCE:
            raise InputError(f"shares: those of the split {split} add up to {total:g}, which exceeds 1; lower one")


def _select_trained_sources(dataset: Dataset, key: str, names: Iterable[str]) -> dict[str, SourceOnDisk]:
    """Return the sources to train on; raise InputError if `names`, from the setting `key`, has another name."""
    sources = {name: source for name, source in _get_sources(dataset.settings).items() if source.split != "evaluation"}
    for name in names:
        if name not in sources:
            hint = suggest_name(name, sources) if sources else "it has one source only"
            raise InputError(f"{key}: the dataset {dataset.name} has no source {name!r}; {hint}")
    return sources


def name_dataset(value: str) -> str:
    """Return the name of a dataset, by which its results are found.

    It is the name of its file in config/datasets, or that of its folder (also of `.`), hub id or file without the
    ending. It may have spaces and umlauts.

    Raises:
        InputError: a folder cannot have this name.
    """
    if value in list_config_names("datasets") and has_format("name", value):
        if value.lower() in RESERVED_NAMES:
            file = locate_config_file("datasets", f"{value}.yaml")
            raise InputError(f"{file}: {value} is a rule or a folder of results of the workflow; rename the dataset")
        return value
    path, is_file = Path(value), os.path.isfile(value)
    name = path.stem if is_file else path.resolve().name
    if not name:
        raise InputError(f"dataset: {value!r} holds all files of the machine; name the folder of the data")
    check_format(f"dataset: the {'file' if is_file else 'folder'} {name!r}", "folder", name)
    is_used = name.lower() in RESERVED_NAMES or name in list_config_names("datasets")
    return f"{name}_data" if is_used else name


def find_dataset_source(dataset: str, settings: dict) -> Path | None:
    """Return the folder or file of a dataset's rows: a path with the dataset's name, otherwise its image folder."""
    sources = settings.get("sources")
    parts = [*(sources.values() if isinstance(sources, dict) else ()), settings.get("pretrain")]
    part = next((part for part in parts if isinstance(part, dict)), {})
    paths = [Path(part[key]) for key in ("path", "file", "images") if isinstance(part.get(key), str)]
    candidates = (candidate for path in paths for candidate in (path, *path.parents))
    matches = (candidate for candidate in candidates if dataset in (candidate.resolve().name, candidate.stem))
    return next(matches, paths[-1] if paths else None)
