"""Keys of the configuration for `export`, `publish` and `serve_check`."""

from typing import Annotated, Literal

from pydantic import Field

from dj2mgm.settings.base import Number, Section, section, setting
from dj2mgm.settings.string_formats import Address, Repository, Variable

TARGETS_BY_KEY = {
    "experiment": ("export", "publish", "serve_check"),
    "format": ("export",),
    "publish": ("publish",),
    "endpoint": ("serve_check",),
    "serve_check": ("serve_check",),
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


class ServeCheckSection(Section):
    """`snakemake serve_check`."""

    model: str | None = setting(None, "name of the model on the server; null: the only one that it lists")
    key_variable: Variable | None = setting(None, "environment variable with the server's key, never the key itself")
    connections: int = setting(8, "requests at the same time", ge=1, le=256)
    timeout_s: Annotated[Number, Field(gt=0, le=86400)] = setting(
        120, "seconds of silence after which a request failed"
    )


class PublishKeys(Section):
    """Keys for several experiments."""

    format: Literal["dj", "llava", "parquet", "webdataset"] = setting("parquet", "format of `snakemake export`")
    publish: PublishSection = section(
        PublishSection, "`snakemake publish`: model and pairs with their cards, in results/published/"
    )
    endpoint: Address | None = setting(
        None,
        "server with OpenAI's chat completions that `snakemake serve_check` asks, such as http://localhost:8000/v1",
    )
    serve_check: ServeCheckSection = section(
        ServeCheckSection, "`snakemake serve_check`: a server's answers compared with those of `experiment`"
    )


KEYS = PublishKeys
