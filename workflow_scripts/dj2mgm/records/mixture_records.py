"""Contents of the files of merged mixtures: which LoRAs are merged, and the scores of the merged models."""

from typing import Annotated

from pydantic import Field

from dj2mgm.settings.base import Number, Section, setting
from dj2mgm.settings.string_formats import Name


class MergedMixture(Section):
    """Shares of sources, for which LoRAs of the single sources are merged."""

    shares: dict[str, Number] = setting(..., "share of each source")
    variant: Name | None = setting(None, "variant of the study that is trained on this mixture; null: not trained")


class MergeSettings(Section):
    """Settings of the script that merges and scores (config.yaml)."""

    sources: dict[str, str] = setting(..., "by source: folder of the stage 2 that was trained on it alone")
    mixtures: Annotated[list[MergedMixture], Field(min_length=1)] = setting(...)


class ScoredMixture(MergedMixture):
    """A mixture with the score of its merged model."""

    score: Number = setting(..., "mean probability of the right answers to the held-out questions")


class MixtureScores(Section):
    """Scores of merged models (scores.yaml)."""

    sources: int = setting(..., "number of sources, each of which was trained alone")
    mixtures: list[ScoredMixture] = setting(...)
