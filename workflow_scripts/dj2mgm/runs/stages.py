"""The table of stages: rule, upstream stages, settings and outputs of each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dj2mgm.runs.stage_settings import (
    build_answer_settings,
    build_base_answer_settings,
    build_benchmark_settings,
    build_evaluate_clip_settings,
    build_filter_settings,
    build_finetune_settings,
    build_generate_settings,
    build_jsonl_settings,
    build_pretrain_settings,
    build_synthesize_settings,
)
from dj2mgm.settings.base import StageSettings
from dj2mgm.settings.configuration import Experiment

STAGE_NOTE = "stage.yaml"  # in the folder of a shared stage: names its owner
EVALUATIONS, BASE_EVALUATIONS = "evaluations/", "base_evaluations/"  # prefixes of stages, before the name of a task
TASK_PREFIXES = (EVALUATIONS, BASE_EVALUATIONS)
LEAK_FILES = ("summary.json", "leaks.jsonl")  # files of a search for leaks that pages read
InputKind = Literal["dataset", "model", "recipe"]  # of the user's files
Settings = Callable[[Experiment, dict], StageSettings | None]


@dataclass(frozen=True)
class Stage:
    """One stage of a run, in <folder of the run>/<name>/. A new stage is one entry of `STAGES` and one rule.

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


_TRAINING_OUTPUTS = ("metrics.jsonl", "scores.jsonl", "scored.jsonl", "memory.csv", "metrics.json")
_FILTER_OUTPUTS = ("stats.jsonl", "dropped.jsonl", "summary.json")
_SCORE_OUTPUTS = ("scores.jsonl", "metrics.json")

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
        outputs=("config.yaml", *_SCORE_OUTPUTS),
        reads=("dataset", "model"),
    ),
    "evaluate_vqa": Stage(
        "VQA accuracy",
        rule="evaluate_vqa",
        upstream=("generate",),
        settings=lambda config, images: StageSettings(),  # answers are compared without a judge
        outputs=_SCORE_OUTPUTS,
        reads=("dataset",),
    ),
}
TRAINING_STAGES = tuple(name for name, stage in STAGES.items() if stage.is_training)


def build_benchmark_stages(name: str) -> dict[str, Stage]:
    """Return the stages of a benchmark by name: of the fine-tuned model, and of the model before training.

    The report does not show them.
    """
    common = {
        "rule": "answer_benchmark",
        "settings": partial(build_benchmark_settings, name),
        "outputs": ("answers.jsonl",),
    }
    return {
        f"benchmarks/{name}": Stage(name, upstream=("finetune",), **common),
        f"base_benchmarks/{name}": Stage(f"{name}, before training", upstream=(), uses_dataset=False, **common),
    }


def build_evaluation_stages(task: str) -> dict[str, Stage]:
    """Return the stages of a task of lmms-eval by name: of the fine-tuned model, and of the model before training."""
    common = {"rule": "score_evaluation", "outputs": _SCORE_OUTPUTS, "reads": ("model",), "optional": True}
    base_settings = partial(build_base_answer_settings, task)
    return {
        f"{EVALUATIONS}{task}": Stage(
            task, upstream=("finetune",), settings=partial(build_answer_settings, task), **common
        ),
        f"{BASE_EVALUATIONS}{task}": Stage(
            f"{task}, before training", upstream=(), settings=base_settings, uses_dataset=False, **common
        ),
    }


def find_stage(name: str) -> Stage:
    """Return a stage of a report by its name, which may contain a task of lmms-eval."""
    return STAGES[name] if name in STAGES else build_evaluation_stages(name.partition("/")[2])[name]
