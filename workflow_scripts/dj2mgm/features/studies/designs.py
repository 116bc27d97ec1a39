"""Designs: each lists the variants of an experiment, or the space that a search tries."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dj2mgm.errors import InputError
from dj2mgm.features.studies.axes import (
    RECIPE_PREFIX,
    MixtureSpace,
    Space,
    Values,
    check_space,
    compute_axis_value,
    compute_shares,
    count_points,
    hash_changes,
    label_changes,
    list_quantile_keys,
    list_single_source_changes,
    read_axis,
    with_row_fraction,
)
from dj2mgm.records import list_settings
from dj2mgm.settings.base import Number, Section, Seed, UniqueItems, refuse_contradiction, section, setting
from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.string_formats import Name, has_format

MAX_VARIANTS = 1000  # most variants of a grid or list
MIN_TRAINED = 6  # trained mixtures; 15 pairs can show that merging orders more than 75 % of pairs like training
GPU_HOURS = "gpu_hours"  # a goal of searches, next to the scores
Changes = Annotated[dict[str, Any], Field(min_length=1)]  # by dotted key, such as finetune.lora.r
Weight = Annotated[Number, Field(ge=0, le=1e6)]
Sampler = Literal["tpe", "gp", "random"]
Share = Annotated[Number, Field(gt=0, lt=1)]
LabeledChanges = Iterator[tuple[str, dict[str, Any]]]


class Design(Section):
    """Base class of designs. A search lists no changes: its variants are the trials that it plans."""

    @property
    def varied_keys(self) -> set[str]:
        """Dotted keys that the study states and the variants set."""
        return {*getattr(self, "space", {})}

    def list_changes(self, file: str, parent: Experiment) -> LabeledChanges:
        """Yield the label of each variant, and its changes by dotted key.

        Args:
            file: the study's file, for messages.
            parent: the merged configuration that the variants change.
        """
        raise NotImplementedError


class AblationDesign(Design):
    """Variants that each leave out one operator."""

    kind: Literal["ablation"] = setting("ablation", "the design")
    operators: Annotated[list[Name], UniqueItems(), Field(min_length=1)] = setting(
        ..., "operators of the experiment's recipes to leave out, one at a time"
    )

    def list_changes(self, file: str, parent: Experiment) -> LabeledChanges:
        return ((f"without-{operator}", {f"{RECIPE_PREFIX}{operator}": False}) for operator in self.operators)


class GridDesign(Design):
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
        check_space(self.space)
        return self

    def list_changes(self, file: str, parent: Experiment) -> LabeledChanges:
        for values in itertools.product(*self.space.values()):
            changes = dict(zip(self.space, values, strict=True))
            yield label_changes(changes), changes


class ListDesign(Design):
    """Listed variants."""

    kind: Literal["list"] = setting("list", "the design")
    variants: Annotated[dict[Name, Changes], Field(min_length=1)] = setting(..., "changed keys of each variant")

    @model_validator(mode="after")
    def _check_number(self) -> Self:
        if (number := len(self.variants)) > MAX_VARIANTS:
            refuse_contradiction(f"{number} variants, but at most {MAX_VARIANTS} are possible", "variants")
        # {finetune: {epochs: 2}} and {finetune.epochs: 2} are the same change
        flat_variants = {name: dict(list_settings(changes)) for name, changes in self.variants.items()}
        for (name, changes), (other_name, others) in itertools.combinations(flat_variants.items(), 2):
            if changes == others:
                refuse_contradiction(f"it changes the same as {name}; remove one of them", "variants", other_name)
        return self

    @property
    def varied_keys(self) -> set[str]:
        return {key for changes in self.variants.values() for key in changes}

    def list_changes(self, file: str, parent: Experiment) -> LabeledChanges:
        return iter(self.variants.items())


class SampleDesign(Design):
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
        check_space(self.space, bool(self.mixture))
        return self

    def list_changes(self, file: str, parent: Experiment) -> LabeledChanges:
        """Yield the points, then single sources of a mixture that is merged; raise InputError for too few points."""
        axes = {key: read_axis(file, key, axis, parent) for key, axis in self.space.items()}
        keys = [*axes, *list_quantile_keys(self.mixture)]
        points: dict[str, dict[str, Any]] = {}
        strata = {key: _shuffle(self.points, f"{self.seed} {key}") for key in keys}
        for point in range(self.points):
            positions = {key: (strata[key][point] + 0.5) / self.points for key in keys}
            changes = {key: compute_axis_value(axis, positions[key]) for key, axis in axes.items()}
            changes |= compute_shares(self.mixture, positions)
            points[hash_changes(changes)] = changes
        if (number := count_points(axes.values())) < self.points and not self.mixture:
            raise InputError(
                f"{file}: design.points: the space has {number} points, fewer than {self.points}; state {number}, or "
                "use the design `grid`"
            )
        yield from points.items()
        if self.merged:
            yield from list_single_source_changes(self.mixture).items()


def _shuffle(count: int, seed: str) -> list[int]:
    return random.Random(seed).sample(range(count), count)


class CurveDesign(Design):
    """Trainings on shares of the rows; each share is a part of the next one."""

    kind: Literal["curve"] = setting("curve", "the design")
    fractions: Annotated[list[Share], UniqueItems(), Field(min_length=2)] = setting(
        [0.125, 0.25, 0.5], "shares of the rows; the experiment itself has all of them"
    )
    sources: Annotated[list[str], UniqueItems()] = setting(
        [], "sources with a curve of their own, for which only their rows are reduced"
    )

    def list_changes(self, file: str, parent: Experiment) -> LabeledChanges:
        for source, fraction in itertools.product([None, *self.sources], self.fractions):
            changes = with_row_fraction(parent, {}, fraction if source is None else {source: fraction})
            label = f"rows-{fraction:g}" if source is None else f"{source}-rows-{fraction:g}"
            yield label if has_format("name", label) else hash_changes(changes), changes


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


class SearchDesign(Design):
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
        check_space(self.space, bool(self.mixture))
        return self
