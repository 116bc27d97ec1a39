"""Files of datasets and benchmarks of the hub that `snakemake fetch` knows, config/hub/<name>.yaml."""

from typing import Literal

from dj2mgm.settings.base import Section, setting
from dj2mgm.settings.string_formats import FilePath, Repository


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
