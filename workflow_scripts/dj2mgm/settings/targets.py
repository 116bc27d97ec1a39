"""Settings that concern several experiments: pages, budgets, plans and their GPUs, and reserved names."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, WithJsonSchema

from dj2mgm.score_groups import GAIN_GROUP, OWN_GROUP
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.settings.base import Number, Section, UniqueItems, setting
from dj2mgm.settings.string_formats import FilePath, Name
from dj2mgm.settings.training_stages import Steps

# Names that experiments, studies and datasets cannot have, in lower case; a test compares them with the workflow.
# Rules of settings have no `rule` line: Snakefile makes them from SETTINGS_FILES.
RULE = re.compile(r'^(?:rule|checkpoint) (\w+):|^use rule \w+ as (\w+) |"(configure_\w+)"', re.MULTILINE)
RULES = frozenset(
    next(filter(None, names))
    for path in (SCRIPTS.parent / "rules").rglob("*.smk")
    for names in RULE.findall(path.read_text(encoding="utf-8"))
)
# folders in results/ without a rule of their name
FOLDERS = frozenset({"captions", "datasets", "evaluations", "foundation", "models", "published", "report"})
RESERVED_NAMES = RULES | FOLDERS

# GPUs that `snakemake plan` can plan for, listed only here. Rates are those of NVIDIA's data sheets, for dense matrices
# in bf16 with sums in float32. Memory is what CUDA reports as a whole, which is less than the data sheet's number.
DESKTOP_GIB = 1.0  # GPU memory that a desktop with a browser takes; an assumption, not a measurement


@dataclass(frozen=True)
class GpuCard:
    """A GPU.

    Attributes:
        title: name for messages.
        devices: names that CUDA reports.
        memory_gib: memory that CUDA reports.
        bf16_tflops: TFLOP/s of the data sheet.
        memory_gb_per_s: bandwidth of the data sheet.
        pcie_gb_per_s: bandwidth in one direction.
        has_display: whether the card usually shows a desktop.
        is_measured: whether the workflow's trainings were measured on it (docs/measurements/training.md).
    """

    title: str
    devices: tuple[str, ...]
    memory_gib: float
    bf16_tflops: float
    memory_gb_per_s: float
    pcie_gb_per_s: float
    has_display: bool = False
    is_measured: bool = False

    @property
    def free_gib(self) -> float:
        """Memory that a desktop leaves, if the card shows one."""
        return self.memory_gib - (DESKTOP_GIB if self.has_display else 0)

    def describe(self) -> str:
        """Return the numbers, and where they come from."""
        source = "trainings measured, rates of the data sheet" if self.is_measured else "data sheet, not measured"
        return (
            f"{self.memory_gib:g} GiB, {self.bf16_tflops:g} TFLOP/s in bf16, {self.memory_gb_per_s:g} GB/s, "
            f"PCIe {self.pcie_gb_per_s:g} GB/s ({source})"
        )


CARDS = {
    "rtx-3090": GpuCard("RTX 3090", ("NVIDIA GeForce RTX 3090",), 23.68, 71, 936, 32, has_display=True),
    "rtx-4090": GpuCard("RTX 4090", ("NVIDIA GeForce RTX 4090",), 23.64, 165, 1008, 32, has_display=True),
    "rtx-5090": GpuCard("RTX 5090", ("NVIDIA GeForce RTX 5090",), 31.36, 209, 1792, 64, has_display=True),
    "a10": GpuCard("A10", ("NVIDIA A10",), 22.06, 125, 600, 32),
    "l4": GpuCard("L4", ("NVIDIA L4",), 22.03, 121, 300, 32),
    "a100": GpuCard("A100 80 GB", ("NVIDIA A100-SXM4-80GB",), 79.2, 312, 2039, 32),
    "h100": GpuCard("H100", ("NVIDIA H100 80GB HBM3",), 79.1, 989, 3350, 64, is_measured=True),
    "h200": GpuCard("H200", ("NVIDIA H200",), 139.8, 989, 4800, 64, is_measured=True),
}


def find_card(device: str) -> GpuCard | None:
    """Return the card that CUDA calls `device`, or None for one that is not in the table."""
    return next((card for card in CARDS.values() if device in card.devices), None)


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
