"""Settings of a crate, and its record, run.json, with inputs, software and machine of a run."""

from typing import Annotated, Literal

from pydantic import Field

from dj2mgm.records.page_records import PageSettings
from dj2mgm.settings.base import Number, Section, UniqueItems, setting
from dj2mgm.settings.dataset_files import ReadableDataset
from dj2mgm.settings.string_formats import Folder, Name

# Records are untrusted: these texts are printed, and a commit is a part of a command that is shown.
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=500)]
Version = Annotated[str, Field(max_length=200)]
RecordedPath = Annotated[str, Field(max_length=5000)]
InputKind = Literal["dataset", "model", "recipe"]


class CrateDataset(Section):
    """A dataset behind a page."""

    settings: ReadableDataset = setting()
    images: dict[str, str] = setting(..., "folder that image paths are relative to, by split")


class CrateCaptioner(Section):
    """A run that trained a captioning model."""

    dataset: str = setting(..., "folder of the dataset")
    stages: dict[str, str] = setting(..., "folder of each stage up to the captioning model")


class CrateSettings(PageSettings):
    """A page's settings, with the datasets and models that its crate describes."""

    page: str = setting(..., "folder of the page, below results/")
    datasets: dict[str, CrateDataset] = setting()
    models: list[str] = setting(..., "folders of models and of their parts")
    captioners: list[CrateCaptioner] = setting()
    foundations: dict[str, str] = setting(..., "folders of trained parts that come with the workflow, by model")
    command_line: dict = setting()
    snakemake: str = setting(..., "version")


class CrateMachine(Section):
    """The machine on which the crate was written."""

    system: Text
    architecture: Text
    processor: Text
    cores: int = setting(ge=1, le=1_000_000)
    memory_gib: Number = setting(ge=0, le=1e9)
    gpus: list[Text] = setting(max_length=1000)
    python: Version


class CrateInput(Section):
    """A file of the user's, or of trained parts that come with the workflow."""

    kind: InputKind = setting(alias="of")
    configured_path: RecordedPath = setting(
        ..., "the file itself, or the folder or hub id that contains `file`", min_length=1, alias="given"
    )
    file: RecordedPath
    found_at: RecordedPath
    sha256: Digest
    bytes: int = setting(ge=0, le=1 << 60)


class CrateImages(Section):
    """Number and joint digest of a dataset's images."""

    dataset: Folder
    drawn: bool = setting(..., "whether the workflow draws the images itself")
    count: int = setting(ge=0)
    sha256: Digest


class CrateRecord(Section):
    """Inputs, software and machine of a run. `snakemake reproduce` reads it."""

    format: Literal[1]
    page: str = setting(..., "below results/", max_length=300, pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*/){0,2}report$")
    experiments: Annotated[list[Name], UniqueItems()] = setting(min_length=1, max_length=1000)
    command_line: dict = setting(..., "values of --config and --configfile; checked like those of a command line")
    commit: str = setting(..., "commit of the code; empty: not in git", pattern="^([0-9a-f]{40,64}(-dirty)?)?$")
    snakemake: Version
    versions: dict[Version, Annotated[list[Version], Field(max_length=100)]] = setting(
        ..., "versions of packages, as jobs recorded them", max_length=1000
    )
    machine: CrateMachine
    inputs: list[CrateInput] = setting(max_length=200_000)  # all images and captions of a folder
    images: list[CrateImages] = setting(max_length=1000)
