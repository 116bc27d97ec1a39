"""Settings that concern several experiments: pages, budgets of comparisons, plans, and images to leave out."""

from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, WithJsonSchema

from dj2mgm.score_groups import GAIN_GROUP, OWN_GROUP
from dj2mgm.settings.base import Number, Section, UniqueItems, setting
from dj2mgm.settings.string_formats import FilePath, Name
from dj2mgm.settings.training_stages import Steps

Length = Annotated[int, Field(ge=1, le=2**24)]


def _make_list(value: object) -> object:
    """Return a list of one name, or of none, for a name or null."""
    return [value] if isinstance(value, str) else [] if value is None else value


ExperimentNames = Annotated[
    list[Name],
    BeforeValidator(_make_list),
    UniqueItems(),
    WithJsonSchema(
        {"type": ["string", "array", "null"], "format": "name", "items": {"type": "string", "format": "name"}}
    ),
]
Headline = Literal[
    "answer_probability",
    "answer_log_likelihood",
    "likelihood_gain",
    "vqa_accuracy",
    "attribute_accuracy",
    "caption_log_likelihood",
    "clip_score",
    "ref_clip_score",
]
ANSWER_HEADLINES = ("answer_probability", "answer_log_likelihood", "likelihood_gain", "vqa_accuracy")
CAPTION_FALLBACK = "caption_log_likelihood"  # headline of a dataset whose held-out images have no questions
Control = Literal["random", "half_learning_rate"]
MIN_SEEDS = 2  # seeds at the first look of a decision, because one seed shows no noise between seeds
Margin = Annotated[Number, Field(ge=0, le=1e6)]


class LocatedHeadline(NamedTuple):
    """The score that decides: its key in the configuration, and its group and metric in metrics.json."""

    key: str
    group: str
    metric: str


class ReportSection(Section):
    """Report of several experiments, in results/<dataset>/<model>/report/."""

    experiments: Annotated[list[Name], UniqueItems()] = setting(
        ["baseline", "dj_synth"], "compared in results/<dataset>/<model>/report/, each with the first", min_length=1
    )
    headline: Headline = setting(
        "answer_probability",
        "score after fine-tuning that decides; all others are descriptive (docs/evaluation.md)",
    )
    margin: Margin = setting(
        0.01, "smallest difference of the headline that matters, in its unit: 0.01 is one percentage point"
    )

    def locate_headline(self, has_questions: bool = True, share_of_rows: Number = 1) -> LocatedHeadline:
        """Return the headline, or a likelihood of captions if the headline needs held-out questions and there are none.

        Trainings on a share of the rows are ranked by the likelihood gain instead of another score of answers, because
        it put more pairs in the same order as the full trainings (docs/measurements/search.md).
        """
        key = self.headline
        if key in ANSWER_HEADLINES:
            short = share_of_rows < 1
            key = CAPTION_FALLBACK if not has_questions else "likelihood_gain" if short else key
        if key == "likelihood_gain":
            return LocatedHeadline(key, GAIN_GROUP, "answer_log_likelihood")
        return LocatedHeadline(key, OWN_GROUP, key)


class DecisionBudget(Section):
    """Budget of a decision about two experiments."""

    seeds: int = setting(
        10, "budget: at most this many seeds per experiment, finished ones included", ge=MIN_SEEDS, le=1000
    )
    hours: Annotated[Number, Field(gt=0, le=1e6)] | None = setting(
        None, "budget: hours of training and evaluation of all seeds of both sides; null: only `seeds` limits"
    )


class PlanSection(Section):
    """`snakemake plan`: what it assumes about the machine of `gpu`."""

    desktop_gib: Annotated[Number, Field(ge=0, le=1000)] | None = setting(
        None, "GiB of the GPU's memory that a desktop takes; null: 1.0 on a card with a display, otherwise 0"
    )
    host_gib: Annotated[Number, Field(gt=0, le=1e6)] | None = setting(
        None, "GiB of free main memory; null: 60 with `gpu`, as on a machine of 64 GB, otherwise this machine's"
    )


class DecontaminateSection(Section):
    """Images whose near-duplicates are removed from the training data."""

    folders: Annotated[list[FilePath], UniqueItems()] = setting([], "folders of images")


class FinetuneMinimalSection(Section):
    """`snakemake finetune_minimal`."""

    max_steps: Steps = setting(10, "optimizer steps of each stage")
    save_steps: Steps = setting(5, "steps from one resume checkpoint to the next")
