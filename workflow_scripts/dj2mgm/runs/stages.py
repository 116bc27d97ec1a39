"""Runs (an experiment with one seed), the table of stages (rule, upstream stages, settings, outputs), and their reuse.

Equal stages of different runs are run once, in the folder of one of them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dj2mgm.dataset_resolution.experiment_dataset import Dataset
from dj2mgm.runs.experiment_recipes import is_for_instructions
from dj2mgm.runs.experiments import REFERENCE, Experiments
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
from dj2mgm.storage.files import read_if_whole, write_yaml

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
    def stage_2_weights(self) -> list[str]:
        """Files of weights that stage 2 writes into its folder."""
        projector = ["projector.safetensors"]
        if not self.config.finetune.lora:
            return ["language_model.safetensors", *projector]
        adapter = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
        return adapter + (projector if "pretrain" in self.settings else [])

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


class Reuse:
    """Search for the run that owns a stage's output."""

    def __init__(self, experiments: Experiments, stages: Mapping[str, Stage], get_run: Callable[[str, int], Run]):
        """Find owners among the runs of these experiments; `get_run` returns the run of an experiment with a seed."""
        self._experiments, self._stages, self._get_run = experiments, stages, get_run
        self._signatures: dict[tuple[str, int, str], str] = {}
        self._owners: dict[tuple[str, int, str], Run] = {}
        self._variants: dict[tuple[str, str, int, int], dict[str, list[Run]]] = {}
        self._shared: dict[tuple[str, str, int, str], Run] = {}
        self._begun: dict[Path, bool] = {}

    def find_owner(self, run: Run, stage: str) -> Run:
        """Return the run in whose folder a stage is run, for all runs with the same output of this stage.

        Outputs are the same if the stage's settings, dataset, model and captioner are the same, and also the outputs of
        the stages before it. The owner is the first of these that has the same output:

        1. the reference,
        2. the parent of the variant,
        3. the variant itself, if it has begun the stage, so that a new study does not run it again,
        4. another variant of the same parent; all variants that share the stage get the same owner.

        Owners are remembered, because results that appear during a run must not change them.
        """
        key = run.experiment, run.seed, stage
        if key not in self._owners:
            self._owners[key] = self._choose_owner(run, stage)
        return self._owners[key]

    def _choose_owner(self, run: Run, stage: str) -> Run:
        experiments, signature = self._experiments, self._find_signature(run, stage)
        variant = experiments.variants.get(run.experiment)
        parent = None if variant is None else variant.parent
        for name in (REFERENCE, parent or run.experiment):
            for candidate in self._find_runs(name, stage, run.seed):
                if self._find_signature(candidate, stage) == signature:
                    return candidate
        if parent is None or self._has_run(run, stage):
            return run
        key = parent, stage, run.seed, signature
        if key not in self._shared:
            candidates = self._group_variants(parent, stage, run.seed)[signature]
            self._shared[key] = next((run for run in candidates if self._has_run(run, stage)), candidates[0])
        return self._shared[key]

    def _has_run(self, run: Run, stage: str) -> bool:
        """Return whether a run had begun a stage with its present settings in its own folder.

        The answer of the first call is kept, because the run itself writes into the folder.
        """
        folder = Path("results", run.folder, stage)
        if folder not in self._begun:
            settings = {} if (folder / STAGE_NOTE).exists() else read_if_whole(folder / "config.yaml")
            settings.pop("labels", None)
            self._begun[folder] = settings == run.settings[stage].file_content()
        return self._begun[folder]

    def _find_runs(self, name: str, stage: str, seed: int) -> Iterator[Run]:
        """Yield the runs of an experiment with its first seed and with `seed`, if they have the stage."""
        if config := self._experiments.configs.get(name):
            for run_seed in dict.fromkeys((config.seeds[0], seed)):
                run = self._get_run(name, run_seed)
                if stage in run.settings:
                    yield run

    def _group_variants(self, parent: str, stage: str, seed: int) -> dict[str, list[Run]]:
        """Return the runs of a parent's variants by their signature of a stage, also of variants that a search adds."""
        variants = self._experiments.variants
        key = parent, stage, seed, len(variants)
        if key not in self._variants:
            runs_by_signature = self._variants[key] = {}
            for name in [variant.name for variant in variants.values() if variant.parent == parent]:
                for run in self._find_runs(name, stage, seed):
                    runs_by_signature.setdefault(self._find_signature(run, stage), []).append(run)
        return self._variants[key]

    def write_notes(self, runs: Iterable[Run]) -> None:
        """Write a stage.yaml for each stage that one of the runs shares, which names the owner's folder."""
        for run in runs:
            folder = Path("results", run.folder)
            for stage in run.settings:
                note, owner = folder / stage / STAGE_NOTE, self.find_owner(run, stage)
                if owner.folder == run.folder:
                    note.unlink(missing_ok=True)
                else:
                    write_yaml(note, {"same_as": f"results/{owner.folder}/{stage}"})

    def _find_signature(self, run: Run, stage: str) -> str:
        """Return the signature of a stage: equal for two runs if all inputs of the stage's output are equal."""
        key = run.experiment, run.seed, stage
        if key not in self._signatures:
            self._signatures[key] = self._sign(run, stage)
        return self._signatures[key]

    def _sign(self, run: Run, stage: str, pairs_only: bool = False) -> str:
        """Compute the signature of a stage; `pairs_only` leaves out everything that affects only instructions."""
        settings, definition = run.settings[stage], self._stages[stage]
        parts: dict = {"settings": settings.file_content()}
        if pairs_only and stage == "jsonl":
            parts["settings"] |= _find_pair_amounts(run)
        if definition.uses_dataset:
            parts["dataset"] = [run.dataset.name, run.dataset.settings.file_content()]
        if definition.uses_model(settings):
            parts["model"] = run.config.model.model_dump()
        if stage == "synthesize" and run.captioner:
            captioner = self._get_run(run.captioner, run.seed)
            parts["captioner"] = self._find_signature(captioner, run.choose_training_stage(captioner))
        if stage == "jsonl" and (other_experiment := run.config.jsonl.same_size_as):
            other_run = self._get_run(other_experiment, run.seed)
            if not pairs_only:
                parts["same_size_as"] = self._find_signature(other_run, stage)
            elif not other_run.selects_instructions:  # otherwise it does not affect the number of pairs
                parts["same_size_as"] = self._sign(other_run, stage, pairs_only=True)
        for upstream_stage in definition.upstream:
            if (
                upstream_stage not in run.settings
                or pairs_only
                and upstream_stage == "synthesize"
                and run.selects_instructions
            ):
                continue  # the pairs then come from the filter stage
            parts[upstream_stage] = (
                self._sign(run, upstream_stage, pairs_only=True)
                if pairs_only or definition.pairs_only
                else self._find_signature(run, upstream_stage)
            )
        return json.dumps(parts, sort_keys=True)


def _find_pair_amounts(run: Run) -> dict[str, dict[str, float]]:
    """Return the amounts and the shares of the sources that have pairs."""
    sources, amounts = getattr(run.dataset.settings, "sources", {}), {}
    for key, values in {"sources": run.config.sources, "shares": run.config.shares}.items():
        amounts[key] = {name: value for name, value in values.items() if sources[name].split == "pretrain"}
    return amounts
