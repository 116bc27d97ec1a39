"""A run (an experiment with one seed), and the table of stages: rule, upstream stages, settings and outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dj2mgm.dataset_resolution.experiment_dataset import Dataset
from dj2mgm.runs.experiment_recipes import is_for_instructions
from dj2mgm.runs.stage_settings import (
    build_evaluate_clip_settings,
    build_filter_settings,
    build_finetune_settings,
    build_generate_settings,
    build_jsonl_settings,
    build_pretrain_settings,
    build_synthesize_settings,
)
from dj2mgm.script_modules import import_feature_modules
from dj2mgm.settings.base import StageSettings
from dj2mgm.settings.configuration import Configuration, Experiment
from dj2mgm.settings.data import TrainedCaptionerSettings

STAGE_NOTE = "stage.yaml"  # in the folder of a shared stage: names its owner
BASE = "base_"  # prefix of features' stages of the model before training, which all seeds share
LEAK_FILES = ("summary.json", "leaks.jsonl")  # files of a search for leaks that pages read
InputKind = Literal["dataset", "model", "recipe"]  # of the user's files
Settings = Callable[[Experiment, dict], StageSettings | None]


@dataclass(frozen=True)
class Stage:
    """One stage of a run, in <folder of the run>/<name>/.

    A new stage is one rule and one entry of `STAGES`, or of what a feature's `list_stages` returns.

    Attributes:
        label: name in pages and messages.
        rule: the Snakemake rule that runs it.
        upstream: the nearest stages before it; earlier ones follow from those. Stages that an experiment does not have
            are skipped.
        settings: function (merged configuration, image folders) → the stage's config.yaml; None if the experiment
            does not have the stage.
        outputs: the files that pages read; the rule may write more. The stage is complete if the last one exists.
        reads: the kinds of the user's files that it reads, in addition to the outputs of stages before it.
        is_training: whether it is a training stage, with checkpoints, progress and memory.csv.
        optional: whether an experiment may lack it.
        uses_dataset: whether its output depends on the dataset.
        pairs_only: whether it reads only the pairs of earlier stages, so that runs with other instructions share it.
        uses_model: function (its settings) → whether its output depends on the model.
        in_report: whether reports show it; a feature's stage has scores.jsonl and metrics.json then.
    """

    label: str
    rule: str
    upstream: tuple[str, ...]
    settings: Settings
    outputs: tuple[str, ...]
    reads: tuple[InputKind, ...] = ()
    is_training: bool = False
    optional: bool = False
    uses_dataset: bool = True
    pairs_only: bool = False
    uses_model: Callable[[StageSettings], bool] = lambda settings: True
    in_report: bool = True


_TRAINING_OUTPUTS = ("metrics.jsonl", "scores.jsonl", "scored.jsonl", "memory.csv", "metrics.json")
_FILTER_OUTPUTS = ("stats.jsonl", "dropped.jsonl", "summary.json")
SCORE_OUTPUTS = ("scores.jsonl", "metrics.json")

# in the order in which data flows
STAGES = {
    "filter": Stage(
        "Filter",
        rule="filter_data",
        upstream=(),
        settings=build_filter_settings,
        outputs=("filtered.jsonl", *_FILTER_OUTPUTS),
        reads=("dataset", "recipe"),
        uses_model=lambda settings: bool(settings.clip),  # the recipe measures with the model's CLIP
    ),
    "synthesize": Stage(
        "Captions",
        rule="synthesize_captions",
        upstream=("filter",),
        settings=build_synthesize_settings,
        outputs=("config.yaml", "synthesized.jsonl", *_FILTER_OUTPUTS),
        reads=("model", "recipe"),
        optional=True,
    ),
    "jsonl": Stage(
        "Training files",
        rule="write_jsonl",
        upstream=("filter", "synthesize"),
        settings=build_jsonl_settings,
        outputs=("pretrain.jsonl", "finetune.jsonl", "summary.json"),
        reads=("dataset",),
    ),
    "pretrain": Stage(
        "Stage 1: pretraining",
        rule="pretrain",
        upstream=("jsonl",),
        settings=build_pretrain_settings,
        outputs=_TRAINING_OUTPUTS,
        reads=("model",),
        is_training=True,
        optional=True,
        pairs_only=True,
    ),
    "finetune": Stage(
        "Stage 2: fine-tuning",
        rule="finetune",
        upstream=("jsonl", "pretrain"),
        settings=build_finetune_settings,
        outputs=_TRAINING_OUTPUTS,
        reads=("model",),
        is_training=True,
    ),
    "generate": Stage(
        "Answers",
        rule="generate_answers",
        upstream=("finetune",),
        settings=build_generate_settings,
        outputs=("captions.jsonl", "answers.jsonl"),
        reads=("dataset", "model"),
    ),
    "evaluate_clip": Stage(
        "CLIPScore",
        rule="evaluate_clip",
        upstream=("generate",),
        settings=build_evaluate_clip_settings,
        outputs=("config.yaml", *SCORE_OUTPUTS),
        reads=("dataset", "model"),
    ),
    "evaluate_vqa": Stage(
        "VQA accuracy",
        rule="evaluate_vqa",
        upstream=("generate",),
        settings=lambda config, images: StageSettings(),  # answers are compared without a judge
        outputs=SCORE_OUTPUTS,
        reads=("dataset",),
    ),
}
TRAINING_STAGES = tuple(name for name, stage in STAGES.items() if stage.is_training)


def list_feature_stages(shared: Configuration) -> dict[str, Stage]:
    """Return the stages that features add by a function `list_stages` (`import_feature_modules`), by name."""
    return {
        name: stage for module in import_feature_modules("stages") for name, stage in module.list_stages(shared).items()
    }


@dataclass(frozen=True)
class Run:
    """An experiment with one seed.

    Attributes:
        name: the experiment, with the folder of a seed after the first: `baseline` or `baseline/seed-1`.
        config: the merged configuration, with this run's seed.
        settings: settings of each stage by its name.
    """

    experiment: str
    seed: int
    name: str
    config: Experiment
    dataset: Dataset
    settings: dict[str, StageSettings]

    @property
    def folder(self) -> str:
        """Folder of the run's stages, below results/."""
        return f"{self.dataset.name}/{self.config.model.folder_name}/{self.name}"

    @property
    def training_stages(self) -> list[str]:
        """Names of the run's training stages, in their order."""
        return [stage for stage in TRAINING_STAGES if stage in self.settings]

    @property
    def labels(self) -> dict[str, str | int]:
        """Labels for trackers."""
        names = {"experiment": self.experiment, "seed": self.seed, "dataset": self.dataset.name}
        names |= {"model": self.config.model.name, "recipe": self.config.recipe}
        captions = self.config.synthesize.recipe
        return names | ({"captions_recipe": captions} if captions else {})

    @property
    def captioner(self) -> str | None:
        """Experiment whose trained model writes captions, or answers questions, for this run."""
        synthesize = self.settings.get("synthesize")
        is_trained = synthesize and isinstance(synthesize.captioner, TrainedCaptionerSettings)
        return self.config.synthesize.mgm.experiment if is_trained else None

    def choose_training_stage(self, captioner: "Run") -> str:
        """Return the stage of the captioner's run whose model is used: the first for captions, the last for answers."""
        return captioner.training_stages[-1 if self.selects_instructions else 0]

    @property
    def selects_instructions(self) -> bool:
        """True if the recipe of the synthesize stage is for instructions and not for pairs."""
        return "synthesize" in self.settings and is_for_instructions(self.settings["synthesize"].recipe)
