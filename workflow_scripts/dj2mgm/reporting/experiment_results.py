"""Results of experiments, read from the files of their stages.

The configuration (records.py) names the folder of each stage, because runs and experiments share
stages.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dj2mgm.errors import InputError
from dj2mgm.evaluation.run_scores import GroupEstimates, RunScores, aggregate, read_run_scores
from dj2mgm.recipes.catalogue import INSTRUCTIONS
from dj2mgm.records import (
    JsonlSummary,
    Judge,
    PageSettings,
    RecipeContents,
    RecipeSummary,
    ShownConfiguration,
    ShownControl,
    ShownExperiment,
    TrainingRecord,
    read_image_root,
    read_jsonl_summary,
    read_recipe_summary,
    read_training_record,
)
from dj2mgm.runs.stages import LEAK_FILES, STAGES, TRAINING_STAGES
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_json, read_jsonl

# {stage/file: rule that writes it}
FILE_RULES = {f"{name}/{file}": stage.rule for name, stage in STAGES.items() for file in stage.outputs}


@dataclass(frozen=True)
class RunResults:
    """An experiment with one seed."""

    seed: int
    filter: RecipeSummary
    synthesize: RecipeSummary | None  # None: the experiment has no such stage
    jsonl: JsonlSummary
    records: dict[str, TrainingRecord]  # by training stage
    steps: dict[str, list[dict]]  # by training stage: rows of metrics.jsonl
    # by training stage: rows of scores.jsonl, empty if no questions were asked
    checkpoint_scores: dict[str, list[dict]]
    judges: list[Judge]  # the first and, if there is one, the second
    prompt: str  # text before each caption that a judge reads
    question_count: int  # about held-out images
    versions: list[dict[str, str]]  # versions of packages, as each stage recorded them
    scores: RunScores  # values per image, of all evaluations
    stages: dict[str, Path]  # folder of every stage, for files that are read on demand

    @property
    def selects_instructions(self) -> bool:
        """True if the stage synthesize works on instructions and not on pairs."""
        return self.synthesize is not None and self.synthesize.rows == INSTRUCTIONS


@dataclass(frozen=True)
class ExperimentResults:
    """An experiment with its runs and its dataset."""

    name: str
    description: str
    dataset: Path
    leaks: Path | None  # folder of the leak search; None if none was made
    licenses: dict[str, str | None]  # by source, or by split
    dataset_counts: dict  # the dataset's summary.json: pretrain, finetune, evaluation, …
    config: ShownConfiguration
    recipes: RecipeContents
    runs: list[RunResults]
    evaluation: list[dict]
    image_root: Path
    control: ShownControl | None = None  # None: it is not a control of another experiment
    changes: dict[str, Any] = field(default_factory=dict)  # on a study's page: the settings that its variants change

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @property
    def scores(self) -> list[RunScores]:
        return [run.scores for run in self.runs]

    def select_seeds(self, seeds: list[int]) -> "ExperimentResults":
        """Return the experiment with the runs of these seeds, whose scores are the means of a paired difference."""
        return self if set(self.seeds) <= set(seeds) else replace(self, runs=[r for r in self.runs if r.seed in seeds])

    @property
    def judges(self) -> list[Judge]:
        return self.runs[0].judges

    @cached_property
    def groups(self) -> GroupEstimates:
        """Estimates over all seeds, by group (`finetune/own`, …, `reference`) and metric."""
        return aggregate(self.scores)


def load_experiments(config: str | Path) -> list[ExperimentResults]:
    """Read the experiments of a configuration, in its order."""
    if not Path(config).is_file():
        raise InputError(f"{config} is missing; it lists the experiments to compare")
    return [load_experiment(entry) for entry in load_settings(PageSettings, config).experiments]


def group_experiments(
    experiments: list[ExperimentResults], key: Callable[[ExperimentResults], Path | None]
) -> dict[Path | None, list[ExperimentResults]]:
    """Return the experiments that share a folder by the folder, so that its content is shown once."""
    groups: dict[Path | None, list[ExperimentResults]] = {}
    for experiment in experiments:
        groups.setdefault(key(experiment), []).append(experiment)
    return groups


def load_experiment(entry: ShownExperiment) -> ExperimentResults:
    """Read the results of an experiment."""
    name, dataset = entry.name, Path(entry.dataset)
    for file in (dataset / "summary.json", dataset / "evaluation.jsonl"):
        _check_file(file, name, "make_dataset")
    leaks = Path(entry.leaks) if entry.leaks else None
    for file in (leaks / file_name for file_name in LEAK_FILES) if leaks else ():
        _check_file(file, name, "find_leaks")
    runs = [_load_run(name, run.seed, run.stages) for run in entry.runs]
    return ExperimentResults(
        name=name,
        description=entry.description,
        dataset=dataset,
        leaks=leaks,
        licenses=entry.licenses,
        dataset_counts=read_json(dataset / "summary.json"),
        config=entry.config,
        recipes=entry.recipes,
        runs=runs,
        evaluation=list(read_jsonl(dataset / "evaluation.jsonl")),
        image_root=read_image_root(runs[0].stages["evaluate_clip"]),
        control=entry.control,
        changes=entry.changes,
    )


def _load_run(experiment: str, seed: int, folders: dict[str, str]) -> RunResults:
    """Read the results of one seed; raise InputError if a file of a stage is missing or empty."""
    stages = {stage: Path(folder) for stage, folder in folders.items()}
    for name, rule in FILE_RULES.items():
        stage, file = name.split("/")
        if stage in stages:
            _check_file(stages[stage] / file, f"{experiment} with seed {seed}", rule)
    training_stages = [stage for stage in TRAINING_STAGES if stage in stages]
    metrics = {stage: read_json(stages[stage] / "metrics.json") for stage in ("evaluate_clip", "evaluate_vqa")}
    # stages of features
    metrics |= {stage: read_json(folder / "metrics.json") for stage, folder in stages.items() if stage not in STAGES}
    score_files = [stages[stage] / "scores.jsonl" for stage in metrics]
    for path, groups in zip(score_files, (values["groups"] for values in metrics.values()), strict=True):
        next(read_jsonl(path, may_be_empty=not groups), None)
    filter_summary = read_recipe_summary(stages["filter"] / "summary.json")
    records = {stage: read_training_record(stages[stage] / "metrics.json") for stage in training_stages}
    versions = [record.versions for record in records.values()]
    versions += [metrics[stage].get("versions", {}) for stage in ("evaluate_clip", "evaluate_vqa")]
    return RunResults(
        seed=seed,
        filter=filter_summary,
        synthesize=read_recipe_summary(stages["synthesize"] / "summary.json") if "synthesize" in stages else None,
        jsonl=read_jsonl_summary(stages["jsonl"] / "summary.json"),
        records=records,
        steps={
            stage: list(read_jsonl(stages[stage] / "metrics.jsonl", may_be_empty=False)) for stage in training_stages
        },
        checkpoint_scores={stage: list(read_jsonl(stages[stage] / "scores.jsonl")) for stage in training_stages},
        judges=[Judge(**judge) for judge in metrics["evaluate_clip"]["judges"]],
        prompt=metrics["evaluate_clip"]["prompt"],
        question_count=metrics["evaluate_vqa"]["questions"],
        versions=[*versions, {"data-juicer": filter_summary.data_juicer}],
        scores=read_run_scores(experiment, seed, *score_files),
        stages=stages,
    )


def _check_file(path: Path, subject: str, rule: str) -> None:
    if not path.is_file():
        raise InputError(f"{path} is missing, so {subject} cannot be reported; run the rule {rule} first")
