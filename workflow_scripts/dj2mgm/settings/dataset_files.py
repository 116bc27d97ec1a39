"""Files of datasets, config/datasets/<name>.yaml, and of datasets that `fetch` knows, config/hub/<name>.yaml."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dj2mgm.settings.base import Number, Section, Seed, section, setting
from dj2mgm.settings.string_formats import FilePath, Repository
from dj2mgm.settings.validation import validate_settings
from dj2mgm.storage.files import read_yaml

RowCount = Annotated[int, Field(ge=1, le=10**8)]
FaultRate = Annotated[Number, Field(ge=0, le=1)]
CHECK_FILES = ("check/check.html", "check/check.txt")  # of `snakemake check`, in a dataset's folder of results
MAX_HELD_OUT = 500  # images that are held out of a dataset without an evaluation file
SPLITS = ("pretrain", "finetune", "evaluation")
WITH_IMAGES = ("arrow", "folder", "parquet", "webdataset")  # formats of sources that include their images
WITH_CAPTION_FILES = ("folder", "webdataset")  # formats in which an image may lack its caption's file
LICENSE = "its name on the hub, such as cc-by-4.0; a change repeats no training"


class Split(Section):
    """A file of rows and the folder of its images."""

    file: FilePath = setting()
    images: FilePath = setting(..., "the folder that image paths are relative to")

    @property
    def title(self) -> str:
        """Name of the rows in messages."""
        return self.file


class LicensedSplit(Split):
    """A split to train on."""

    license: str = setting("", LICENSE)


class PretrainSplit(LicensedSplit):
    """Image–caption pairs in Data-Juicer's jsonl."""

    questions: FilePath = setting("", "LLaVA json whose rows of the same ids have the questions")


class MergedSplit(PretrainSplit):
    """Rows of several sources in a temporary file."""

    sources: list[str] = setting()

    @property
    def title(self) -> str:
        return f"sources {', '.join(self.sources)}"


class DatasetFile(Section):
    """A dataset. Licenses are separate from the other settings, so that a change of them re-runs nothing.

    Attributes:
        is_rendered: whether the workflow draws the images itself.
    """

    is_rendered: ClassVar[bool] = False

    @property
    def splits(self) -> dict[str, Split]:
        """User's files by split."""
        return {name: split for name in SPLITS if (split := getattr(self, name, None))}

    @property
    def has_instructions(self) -> bool:
        """True if the dataset has questions and answers; otherwise stage 2 trains on the captions."""
        return self.is_rendered or "finetune" in self.splits

    @property
    def licenses(self) -> dict[str, str | None]:
        """Licenses by source or by split; None if none is stated."""
        return {name: part.license or None for name, part in self.splits.items() if isinstance(part, LicensedSplit)}

    def file_content(self) -> dict[str, Any]:
        """Return the content of the config.yaml of `make_dataset`."""
        licenses: dict = {"license": True, "sources": {"__all__": {"license"}}}
        return self.model_dump(exclude_unset=True, exclude=licenses | {split: {"license"} for split in SPLITS})


class FilesDataset(DatasetFile):
    """The user's own data: files and the folders that their image paths are relative to."""

    pretrain: PretrainSplit = setting(..., "Data-Juicer jsonl")
    finetune: LicensedSplit = setting(None, "LLaVA json or jsonl; without it, stage 2 trains on the captions")
    evaluation: Split = setting(None, "evaluation jsonl; without it, part of the pairs is held out")


class Columns(Section):
    """Names of the user's own columns or keys."""

    image: str = setting("")
    text: str = setting("")
    question: str = setting("")
    conversations: str = setting("")


USUAL_NAMES = {  # usual names of columns and keys in published datasets, the most likely first
    "image": ("image", "images", "img", "jpg", "image_path", "file_name", "path"),
    "text": ("caption", "text", "txt", "captions"),
    "question": ("question",),
    "conversations": ("conversations", "messages", "texts"),
}


class SourceSettings(Section):
    """One source of a dataset."""

    format: Literal["arrow", "data_juicer", "folder", "llava", "parquet", "sharegpt", "table", "webdataset"] = setting()
    path: FilePath = setting(..., "a file, a folder of such files, a pattern, or a hub id")
    images: FilePath = setting("", "the folder that image paths are relative to; without it, the file's folder")
    split: Literal["pretrain", "finetune", "evaluation"] = setting(
        "pretrain", f"evaluation: at most {MAX_HELD_OUT} of its images are held out"
    )
    license: str = setting("", LICENSE)
    columns: Columns = section(Columns, "the names of your own columns or keys")
    uncaptioned: Literal["drop", "keep"] = setting(
        "drop", "images without a caption: keep gives them an empty one, for a captioner to replace"
    )
    amount: Number = setting(1.0, "as in an experiment's `sources`; 1.0: every row once", ge=0, le=1e9)


class SourcesDataset(DatasetFile):
    """A dataset of several sources, by name; each experiment may weigh them differently."""

    sources: dict[str, SourceSettings] = setting(min_length=1)
    evaluation: Split = setting(None, "evaluation jsonl; without it, part of the pairs is held out")


class SourceOnDisk(SourceSettings):
    """A source whose files are on this machine."""

    suffixes: list[str] = setting(..., "endings of its files")


class ReadableSources(SourcesDataset):
    """A dataset of sources whose files are on this machine."""

    sources: dict[str, SourceOnDisk] = setting(min_length=1)

    @property
    def has_instructions(self) -> bool:
        return any(source.split == "finetune" for source in self.sources.values())

    @property
    def licenses(self) -> dict[str, str | None]:
        training_sources = {name: source for name, source in self.sources.items() if source.split != "evaluation"}
        return {name: source.license or None for name, source in training_sources.items()}


class FaultRates(Section):
    """Shares of the embedded dataset's rows with a planted fault."""

    mismatched: FaultRate = setting(0, "the caption of another scene")
    junk_text: FaultRate = setting(0, "random characters, links, shouting, one repeated word")
    short_text: FaultRate = setting(0, "one or two letters or words")
    duplicate: FaultRate = setting(0, "image and caption of an earlier row, byte for byte")
    tiny_image: FaultRate = setting(0, "6 to 24 px")
    extreme_aspect: FaultRate = setting(0, "a strip with an aspect ratio of 6 to 12")
    truncated_image: FaultRate = setting(0, "the second half of the file is missing")
    not_an_image: FaultRate = setting(0, "an error page with an image's file name")


class ShapesDataset(DatasetFile):
    """The embedded dataset's sizes and fault rates."""

    is_rendered: ClassVar[bool] = True

    generator: Literal["shapes"] = setting()
    license: str = setting("", LICENSE)
    seed: Seed = setting()
    pretrain_pairs: RowCount = setting()
    finetune_instructions: RowCount = setting()
    evaluation_images: int = setting(ge=2, le=10**8)
    fault_rates: FaultRates = setting()
    wrong_instructions: FaultRate = setting(0, "share of the instructions whose answer is wrong")

    @property
    def licenses(self) -> dict[str, str | None]:
        return {"": self.license or None}


ReadableDataset = FilesDataset | ReadableSources | ShapesDataset


def detect_dataset_kind(keys: dict) -> type[FilesDataset | SourcesDataset | ShapesDataset]:
    """Return the class of a dataset file."""
    if "generator" in keys:
        return ShapesDataset
    return SourcesDataset if "sources" in keys else FilesDataset


def load_dataset_settings(path: Path) -> ReadableDataset:
    """Return the dataset in the config.yaml of `make_dataset`."""
    keys = read_yaml(path)
    kind = detect_dataset_kind(keys)
    return validate_settings(ReadableSources if kind is SourcesDataset else kind, keys, str(path))


class HubFile(Section):
    """Keys of every such file."""

    hub_id: Repository = setting(..., "of the repository")
    license: str = setting(..., "for messages, if the repository's card states none")


class HubBenchmark(HubFile):
    """A benchmark as parquet, which is converted to the files that `benchmarks` names."""

    benchmark: Literal["textvqa", "mmbench"] = setting()
    files: FilePath = setting(..., "pattern of its parquet files")


class HubParquet(HubFile):
    """Rows with images in parquet."""

    files: FilePath = setting(..., "pattern of its parquet files, in a subset's folder if there are subsets")
    subsets: bool = setting(False, "whether its folders are subsets; dataset=<name>/<subset> chooses one")


class HubArchive(HubFile):
    """LLaVA's conversations with images in a zip file."""

    rows: FilePath = setting(..., "its JSON file")
    images: FilePath = setting(..., "its zip file; only the images of the chosen rows are downloaded from it")


HUB_KINDS = {"benchmark": HubBenchmark, "rows": HubArchive}  # by a key that no other kind has


def detect_hub_file_kind(keys: dict) -> type[HubBenchmark | HubParquet | HubArchive]:
    """Return the class for a file that has these keys."""
    return next((kind for key, kind in HUB_KINDS.items() if key in keys), HubParquet)
