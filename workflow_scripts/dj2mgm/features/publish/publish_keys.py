"""Keys of the configuration for `export` and `publish`."""

from typing import Literal

from dj2mgm.settings.base import Section, section, setting
from dj2mgm.settings.string_formats import Repository

TARGETS_BY_KEY = {
    "experiment": ("export", "publish"),
    "format": ("export",),
    "publish": ("publish",),
}


class PublishSection(Section):
    """`snakemake publish`."""

    weights: Literal["merged", "adapter"] = setting(
        "merged", "merged: a whole model; adapter: the LoRA adapter alone, which needs the base model"
    )
    repository: Repository | None = setting(None, "repository on the hub for the model; null: it is not pushed")
    dataset_repository: Repository | None = setting(None, "repository on the hub for the pairs")
    private: bool = setting(True, "whether new repositories are private")
    allow_unlearned: bool = setting(False, "true: also publish a model that has learned nothing; its card states it")


class PublishKeys(Section):
    """Keys for several experiments."""

    format: Literal["dj", "llava", "parquet", "webdataset"] = setting("parquet", "format of `snakemake export`")
    publish: PublishSection = section(
        PublishSection, "`snakemake publish`: model and pairs with their cards, in results/published/"
    )


KEYS = PublishKeys
