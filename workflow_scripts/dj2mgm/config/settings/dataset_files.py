"""Dataset files, config/datasets/<name>.yaml: the user's files, several sources, or the embedded dataset."""

from typing import Annotated, Literal

from pydantic import Field

from dj2mgm.config.settings.base import Number, Section, Seed, section, setting
from dj2mgm.config.settings.strings import FilePath

Rows = Annotated[int, Field(ge=1, le=10**8)]
Share = Annotated[Number, Field(ge=0, le=1)]
LICENSE = "the hub's name of it, such as cc-by-4.0; a change trains nothing again"


class Split(Section):
    """A file of rows and the folder of its images."""

    file: FilePath = setting()
    images: FilePath = setting(..., "the folder that image paths are relative to")


class LicensedSplit(Split):
    """A split to train on."""

    license: str = setting("", LICENSE)


class PretrainSplit(LicensedSplit):
    """Image–caption pairs in Data-Juicer's jsonl."""

    questions: FilePath = setting("", "LLaVA json whose rows of the same ids have the questions")


class FilesDataset(Section):
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


class SourceSettings(Section):
    """One source of a dataset."""

    format: Literal["data_juicer", "folder", "llava", "parquet", "sharegpt", "table", "webdataset"] = setting()
    path: FilePath = setting(..., "a file, a folder of such files, a pattern, or a hub id")
    images: FilePath = setting("", "the folder that image paths are relative to; without it, the file's folder")
    split: Literal["pretrain", "finetune"] = setting("pretrain")
    license: str = setting("", LICENSE)
    columns: Columns = section(Columns, "the names of your own columns or keys")
    amount: Number = setting(1.0, "as in an experiment's `sources`; 1.0: every row once", ge=0, le=1e9)


class SourcesDataset(Section):
    """A dataset of several sources, by name; each experiment may weigh them differently."""

    sources: dict[str, SourceSettings] = setting(min_length=1)
    evaluation: Split = setting(None, "evaluation jsonl; without it, part of the pairs is held out")


class FaultRates(Section):
    """Shares of the embedded dataset's rows with a planted fault."""

    mismatched: Share = setting(0)
    junk_text: Share = setting(0)
    short_text: Share = setting(0)
    duplicate: Share = setting(0)
    tiny_image: Share = setting(0)
    extreme_aspect: Share = setting(0)
    truncated_image: Share = setting(0)
    not_an_image: Share = setting(0)


class ShapesDataset(Section):
    """The embedded dataset's sizes and fault rates."""

    generator: Literal["shapes"] = setting()
    license: str = setting("", LICENSE)
    seed: Seed = setting()
    pretrain_pairs: Rows = setting()
    finetune_instructions: Rows = setting()
    evaluation_images: int = setting(ge=2, le=10**8)
    fault_rates: FaultRates = setting()


def dataset_kind(keys: dict) -> type[Section]:
    """Return the class of a dataset file."""
    if "generator" in keys:
        return ShapesDataset
    return SourcesDataset if "sources" in keys else FilesDataset
