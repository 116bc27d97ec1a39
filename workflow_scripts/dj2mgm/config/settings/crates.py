"""run.json of a crate: what a run was made from, and by which software. `snakemake reproduce` reads it."""

from typing import Annotated, Literal

from pydantic import Field

from dj2mgm.config.settings.base import Number, Section, Unique, setting
from dj2mgm.config.settings.strings import Folder, Name

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class CrateMachine(Section):
    """The machine on which the crate was written."""

    system: str
    architecture: str
    processor: str
    cores: int
    memory_gib: Number
    gpus: list[str]
    python: str


class CrateInput(Section):
    """A file of the user's, or of trained parts that come with the workflow."""

    of: Literal["dataset", "model", "recipe"]
    given: str = setting(
        ..., "as it was configured: a file; or a folder or hub id, in which it is `file`", min_length=1
    )
    file: str
    found_at: str
    sha256: Digest
    bytes: int = setting(ge=0)


class CrateImages(Section):
    """The images of a dataset."""

    dataset: Folder
    drawn: bool = setting(..., "by the workflow itself")
    count: int = setting(ge=0)
    sha256: Digest


class CrateRecord(Section):
    """What the crate's run was made from."""

    format: Literal[1]
    page: str = setting(..., "below results/", pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*/){0,2}report$")
    experiments: Annotated[list[Name], Unique()] = setting(min_length=1, max_length=1000)
    command_line: dict = setting(..., "what --config and --configfile said; it is checked as such")
    commit: str = setting(..., "of the code; empty: not in git")
    snakemake: str
    versions: dict[str, list[str]] = setting(..., "of packages, as jobs recorded them")
    machine: CrateMachine
    inputs: list[CrateInput]
    images: list[CrateImages]
