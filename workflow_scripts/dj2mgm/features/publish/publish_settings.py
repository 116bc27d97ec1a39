"""Content of the config.yaml of exports and publications."""

from typing import Annotated, Literal

from pydantic import Field

from dj2mgm.records.page_records import RecipeContents
from dj2mgm.settings.base import ImageRootSettings, StageSettings, setting


class SharedPairs(StageSettings):
    """Origin of exported or published pairs."""

    experiment: str = setting()
    dataset: str = setting(..., "name of the dataset")
    licenses: dict[str, str | None] = setting(..., "by source or by split; null: none is stated")
    recipes: RecipeContents = setting()


class ExportSettings(SharedPairs, ImageRootSettings):
    """Settings of an export of a run's pairs."""


class PublishSettings(SharedPairs):
    """Settings of a published model, its pairs and their cards.

    They do not include repositories, so that a change of a repository repeats nothing.
    """

    seed: int = setting()
    model: str = setting(..., "name of the model")
    license: Annotated[str, Field(min_length=1)] = setting(..., "of the model")
    base_models: list[str] = setting(..., "hub ids")
    adapter_base: str | None = setting(..., "hub id of the model that an adapter belongs to; null: there is none")
    mgm: bool = setting(..., "whether the model is an MGM, for which transformers has no class")
    trained_by_workflow: bool = setting(..., "whether this workflow trained all parts of the model")
    weights: Literal["merged", "adapter"] = setting()
    allow_unlearned: bool = setting(..., "whether a model that has learned nothing is published, too")
    question: str = setting(..., "request for a caption")
    max_new_tokens: int = setting(..., "tokens of an answer", ge=1)
    records: dict[str, str] = setting(..., "files whose figures the cards state, by their names next to the cards")
