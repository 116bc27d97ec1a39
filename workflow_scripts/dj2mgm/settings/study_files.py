"""Content of a study's file: variants of an experiment, and the page that compares them."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dj2mgm.settings.base import Number, Section, Seed, UniqueItems, refuse_contradiction, section, setting
from dj2mgm.settings.string_formats import Name

Changes = Annotated[dict[str, Any], Field(min_length=1)]  # by dotted key, such as finetune.lora.r
Values = Annotated[list, Field(min_length=1), UniqueItems()]


class Interval(Section):
    """Numbers from `low` to `high`; integers if both are."""

    low: Number = setting(..., "smallest value")
    high: Number = setting(..., "largest value")
    log: bool = setting(False, "whether values are spread evenly by their logarithm")

    @property
    def has_integers(self) -> bool:
        """True if only integers lie in the interval."""
        return isinstance(self.low, int) and isinstance(self.high, int)


MAX_VARIANTS = 1000  # most variants of a grid or list
MIN_TRAINED = 6  # trained mixtures; 15 pairs can show that merging orders more than 75 % of pairs like training
GPU_HOURS = "gpu_hours"  # a goal of searches, next to the scores
Weight = Annotated[Number, Field(ge=0, le=1e6)]
Space = dict[str, Values | Interval | Literal["auto"]]
Sampler = Literal["tpe", "gp", "random"]


class MixtureSpace(Section):
    """Shares of sources that vary while their sum stays the same."""

    sources: Annotated[list[str], UniqueItems(), Field(min_length=2)] = setting(
        ..., "sources of one split whose shares of the stage's samples vary"
    )
    total: Annotated[Number, Field(gt=0, le=1)] = setting(
        1.0, "sum of these shares; the split's other sources divide the rest"
    )


def _check_space(space: Mapping[str, Any], mixture: MixtureSpace | None = None) -> None:
    shares_key = next((key for key in space if key.split(".")[0] == "shares"), None)
    if shares_key and mixture:
        refuse_contradiction("`mixture` varies the shares, too; keep one of them", "space", shares_key)
    for key, axis in space.items():
        if section_key := next((name for name in space if key.startswith(f"{name}.") and name != "recipe"), None):
            refuse_contradiction(f"{section_key} contains {key}; keep one of them", "space")
        if isinstance(axis, Interval) and not axis.low < axis.high:
            refuse_contradiction(f"low, {axis.low:g}, must be below high, {axis.high:g}", "space", key)
        if isinstance(axis, Interval) and axis.log and axis.low <= 0:
            refuse_contradiction(f"log needs a low above 0, found {axis.low:g}", "space", key)


class AblationDesign(Section):
    """Variants that each leave out one operator."""

    kind: Literal["ablation"] = setting("ablation", "the design")
    operators: Annotated[list[Name], UniqueItems(), Field(min_length=1)] = setting(
        ..., "operators of the experiment's recipes to leave out, one at a time"
    )


class GridDesign(Section):
    """Variants with every combination of values."""

    kind: Literal["grid"] = setting("grid", "the design")
    space: Annotated[dict[str, Values], Field(min_length=1)] = setting(..., "values of each key")

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        if (number := math.prod(map(len, self.space.values()))) > MAX_VARIANTS:
            refuse_contradiction(
                f"the grid has {number} variants, but at most {MAX_VARIANTS} are possible; use the design `sample` or "
                "`search`",
                "space",
            )
        _check_space(self.space)
        return self


def _flatten(changes: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; `{finetune: {epochs: 2}}` and `{finetune.epochs: 2}` are the same change."""
    for key, value in changes.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class ListDesign(Section):
    """Listed variants."""

    kind: Literal["list"] = setting("list", "the design")
    variants: Annotated[dict[Name, Changes], Field(min_length=1)] = setting(..., "changed keys of each variant")

    @model_validator(mode="after")
    def _check_number(self) -> Self:
        if (number := len(self.variants)) > MAX_VARIANTS:
            refuse_contradiction(f"{number} variants, but at most {MAX_VARIANTS} are possible", "variants")
        flat_variants = {name: dict(_flatten(changes)) for name, changes in self.variants.items()}
        for (name, changes), (other_name, others) in itertools.combinations(flat_variants.items(), 2):
            if changes == others:
                refuse_contradiction(f"it changes the same as {name}; remove one of them", "variants", other_name)
        return self


class SampleDesign(Section):
    """Variants at points that fill the space evenly: a Latin hypercube."""

    kind: Literal["sample"] = setting("sample", "the design")
    space: Space = setting(
        {}, "values of each key: a list, {low, high, log}, or auto for the range that docs/configuration.md states"
    )
    mixture: MixtureSpace | None = setting(None, "sources whose shares vary; null: none")
    points: int = setting(..., "number of variants", ge=2, le=1000)
    seed: Seed = setting(0, "seed of the variants")
    merged: int = setting(
        0,
        "further mixtures that are not trained: for each, the LoRAs of single sources are merged and scored; 0: none",
        ge=0,
        le=10000,
    )

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        if not (self.space or self.mixture):
            refuse_contradiction("nothing varies; state `space` or `mixture`")
        if self.merged and (self.space or not self.mixture):
            refuse_contradiction("models are merged for mixtures; state `mixture` without `space`", "merged")
        if self.merged and self.points < MIN_TRAINED:
            refuse_contradiction(
                f"{self.points} trained mixtures cannot show that merging orders mixtures as training does; state at "
                f"least {MIN_TRAINED}, or remove `merged`",
                "points",
            )
        _check_space(self.space, self.mixture)
        return self


Share = Annotated[Number, Field(gt=0, lt=1)]


class CurveDesign(Section):
    """Trainings on shares of the rows; each share is a part of the next one."""

    kind: Literal["curve"] = setting("curve", "the design")
    fractions: Annotated[list[Share], UniqueItems(), Field(min_length=2)] = setting(
        [0.125, 0.25, 0.5], "shares of the rows; the experiment itself has all of them"
    )
    sources: Annotated[list[str], UniqueItems()] = setting(
        [], "sources with a curve of their own, for which only their rows are reduced"
    )


class Goals(Section):
    """Weights of scores after a training, and of its cost."""

    answer_probability: Weight = setting(0, "weight of the probability of the right answer")
    answer_log_likelihood: Weight = setting(0, "weight of the log-likelihood of the right answer, in nats")
    likelihood_gain: Weight = setting(0, "weight of the gain in log-likelihood over a shuffled image, in nats")
    vqa_accuracy: Weight = setting(0, "weight of the VQA accuracy, between 0 and 1")
    attribute_accuracy: Weight = setting(0, "weight of the attribute accuracy of captions, between 0 and 1")
    caption_log_likelihood: Weight = setting(0, "weight of the log-likelihood of the caption, in nats per token")
    clip_score: Weight = setting(0, "weight of the CLIPScore")
    ref_clip_score: Weight = setting(0, "weight of the RefCLIPScore")
    gpu_hours: Annotated[Number, Field(ge=-1e6, le=0)] = setting(
        0, "weight of the GPU hours of both training stages on all rows, with one seed; negative"
    )

    @property
    def weights(self) -> dict[str, float]:
        """Weights that are not 0, by goal."""
        return {key: weight for key, weight in self.model_dump().items() if weight}


class SearchDesign(Section):
    """Variants that Optuna chooses by the scores of earlier ones."""

    kind: Literal["search"] = setting("search", "the design")
    space: Space = setting(
        {},
        "as in the design `sample`; without it and without `mixture`, every setting of the trained stages that "
        "declares an interval",
    )
    mixture: MixtureSpace | None = setting(None, "sources whose shares vary; null: none")
    trainings: int = setting(
        24,
        "budget: number of trainings; a run on a share of the rows, or with one of several seeds, counts as that share",
        ge=1,
        le=1000,
    )
    gpu_hours: Annotated[Number, Field(gt=0, le=1e6)] | None = setting(
        None, "budget: hours of all stages of the variants, times GPUs; null: only `trainings` limits"
    )
    goals: Goals = section(
        Goals, "weights whose sum ranks the variants, such as {vqa_accuracy: 1, gpu_hours: -0.01}; none: the headline"
    )
    batch: int = setting(4, "variants that are chosen and trained at a time", ge=1, le=1000)
    rungs: Annotated[list[Annotated[Number, Field(gt=0, le=1)]], Field(min_length=1)] = setting(
        [1.0], "rising shares of the rows, up to 1; all variants are trained on the first, the best ones on the next"
    )
    keep: Annotated[Number, Field(gt=0, lt=1)] = setting(0.25, "share of a rung's variants that reach the next rung")
    sampler: Sampler = setting(
        "tpe",
        "tpe: tree-structured Parzen estimator; gp: regression by a Gaussian process, for shares and other numbers; "
        "random: random points",
    )
    seed: Seed = setting(0, "seed of the sampler")

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if [*sorted({*self.rungs} - {1}), 1] != self.rungs:
            refuse_contradiction("expected rising shares up to 1, as [0.125, 0.5, 1.0]", "rungs")
        if [*self.goals.weights] == [GPU_HOURS]:
            refuse_contradiction("gpu_hours alone chooses the cheapest variant; add the weight of a score", "goals")
        _check_space(self.space, self.mixture)
        return self


class StudyPage(Section):
    """The page that compares the variants."""

    title: str = setting("", "heading; empty: the study's name")
    reference: Name | None = setting(
        None, "variant that all others are compared with; null: the experiment without changes"
    )
    keeps: Annotated[Number, Field(gt=0, lt=1)] | None = setting(
        None, "share of the reference's scores; the page states which variants keep at least this share"
    )


Design = Annotated[
    AblationDesign | CurveDesign | GridDesign | ListDesign | SampleDesign | SearchDesign, Field(discriminator="kind")
]


class StudyFile(Section):
    """config/studies/<name>.yaml."""

    description: str = setting("", "purpose of the study, in a sentence")
    experiment: Name = setting("baseline", "experiment that the variants change")
    design: Design = setting(..., "the variants")
    proportional: dict[str, str] = setting(
        {},
        "keys that stay proportional to another at the experiment's ratio, as {finetune.lora.alpha: finetune.lora.r}",
    )
    controls: Annotated[list[Literal["random"]], UniqueItems()] = setting(
        [], "further variants, as in an experiment's `controls`; random is skipped if the recipes drop no rows"
    )
    page: StudyPage = section(StudyPage, "the page that compares the variants")

    @model_validator(mode="after")
    def _check_proportional(self) -> Self:
        variants = getattr(self.design, "variants", {}).values()
        varied = {*getattr(self.design, "space", {}), *(key for changes in variants for key in changes)}
        for key, other_key in self.proportional.items():
            if key in varied or other_key not in varied:
                problem = f"the variants set {key}" if key in varied else f"no variant sets {other_key}"
                refuse_contradiction(f"{problem}; remove this entry", "proportional", key)
        return self
