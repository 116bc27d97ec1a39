"""Datasets and benchmarks of the hub that `snakemake fetch` knows by name: config/hub, and their folders here."""

from dataclasses import dataclass
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.settings.config_files import list_config_names, locate_config_file, read_config, suggest_name
from dj2mgm.settings.hub_files import HubArchive, HubBenchmark, HubParquet, detect_hub_file_kind
from dj2mgm.settings.schema import build_schema
from dj2mgm.settings.string_formats import check_format
from dj2mgm.settings.validation import validate_settings

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
    file = _read(name)
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


def find_hub_benchmark(name: str) -> HubData:
    """Return a known benchmark of the hub.

    Raises:
        InputError: there is none of this name.
    """
    files = {file_name: _read(file_name) for file_name in list_config_names("hub")}
    benchmarks = [file_name for file_name, file in files.items() if isinstance(file, HubBenchmark)]
    if name not in benchmarks:
        raise InputError(f"fetch.benchmarks: {name} is unknown; {suggest_name(name, benchmarks)}")
    return HubData(name, files[name])


def _read(name: str) -> HubBenchmark | HubParquet | HubArchive:
    path = locate_config_file("hub", f"{name}.yaml")
    kind = detect_hub_file_kind(read_config(path))
    return validate_settings(kind, read_config(path, build_schema(kind)), str(path))
