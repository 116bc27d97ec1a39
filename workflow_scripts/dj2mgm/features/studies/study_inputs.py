"""Inputs of a study's page and of its merged mixtures, and the batches of a search in the workflow."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from dj2mgm.divergence import DIVERGED
from dj2mgm.errors import InputError
from dj2mgm.features.studies.axes import MixtureSpace, draw_mixtures, list_single_source_changes, read_setting
from dj2mgm.features.studies.designs import GPU_HOURS, SampleDesign, SearchDesign
from dj2mgm.features.studies.halving import SearchHistory, compute_smallest_budget, plan_next, read_history
from dj2mgm.features.studies.studies_variants import (
    Study,
    list_full_trials,
    locate_batch_folder,
    read_planned_batches,
    read_search_batch,
)
from dj2mgm.features.studies.study_records import (
    BatchResult,
    MergedMixture,
    MergeSettings,
    SearchSettings,
    ShownBatch,
    ShownSearch,
    ShownTrial,
)
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.pages import (
    build_page_settings,
    check_headline,
    check_reported,
    format_hours,
    list_page_files,
    sum_seconds,
)
from dj2mgm.runs.stages import STAGES, TRAINING_STAGES
from dj2mgm.settings.validation import load_settings

LOG_END = 20_000  # bytes at the end of a log, in which a diverged training is reported


def find_study(runs: Runs, name: str) -> Study:
    """Return a study. Raises InputError if it is not valid."""
    runs.require_target(name)
    return runs.experiments.sources[name]


def take_batches(
    runs: Runs,
    study: str,
    trials_file: Callable[[SearchSettings, int], str],
    scores_file: Callable[[SearchSettings, int], str],
) -> list[str]:
    """Return the files of the scores of all batches; none for a study that is not a search.

    Args:
        runs: all runs, to which the trials are added.
        study: name of the study.
        trials_file: function that returns the file with the trials of a batch, and raises Snakemake's exception if
            there is none yet.
        scores_file: the same function for the scores of a batch.
    """
    source, files = find_study(runs, study), []
    search, budget = source.search, source.content.design
    if search is None:
        return []
    check_headline(runs, search.experiment)
    for key in budget.goals.weights:
        if key != GPU_HOURS:
            check_reported(runs, search.experiment, key, "design.goals")
    _check_hours(study, search, budget, _measure_seconds(runs, search.experiment))
    files.append(scores_file(search, 0))
    history = read_history(budget, search, files)
    _check_hours(study, search, budget, history.batch_0.seconds)
    while plan_next(history) is not None:
        trials_file(search, len(files))
        record = read_search_batch(search, len(files))
        if not {*runs.experiments.variant_names[study]} >= {*record.names}:
            runs.add_late_variants(study)
        files.append(scores_file(search, len(files)))
        # `with_batch` reads each file only once per start of Snakemake
        history = history.with_batch(record, load_settings(BatchResult, files[-1]))
    return files


def show_search(runs: Runs, study: str) -> ShownSearch | None:
    """Return the state of a finished search for its page; None for another design, and before the first batch."""
    source = find_study(runs, study)
    search, budget = source.search, source.content.design
    files = map(partial(_find_score_file, search), count()) if search else ()
    if not (files := list(takewhile(os.path.isfile, files))):
        return None
    history = read_history(budget, search, files)
    rungs = [history.collect_scores(rung) for rung in range(len(budget.rungs))]
    fewer_rows = {name for _, result in history.finished_batches for name in result.fewer_rows}
    return ShownSearch(
        progress=_describe_progress(history),
        rungs=budget.rungs,
        goals=budget.goals.weights,
        axes=search.axes,
        batches=[
            ShownBatch(
                step=record.step,
                fraction=record.fraction,
                runs=result.runs,
                price=record.price,
                seconds=result.seconds,
            )
            for record, result in history.finished_batches
        ],
        trials=[
            ShownTrial(
                name=name,
                changes=trial.changes,
                scores=[scores.get(name) for scores in rungs],
                fewer_rows=name in fewer_rows and runs.experiments.selects_rows(name),
            )
            for name, trial in history.trials_by_name.items()
        ],
    )


def _describe_progress(history: SearchHistory) -> str:
    """Return the state of a search in a sentence."""
    budget, scores = history.design, history.collect_scores(0)
    limit = "" if budget.gpu_hours is None else f" of at most {budget.gpu_hours:g}"
    diverged = f" {len(history.diverged_trials)} diverged." if history.diverged_trials else ""
    terms = [f"{weight:g} × {key}" for key, weight in budget.goals.weights.items()]
    goal = f" The trials are ranked by the sum of {', '.join(terms)}." if terms else ""
    warning = " The best of many scores is too high by chance; confirm it with other seeds."
    return (
        f"The search has tried {len(scores)} variants. It spent {history.trainings:.4g} of at most {budget.trainings} "
        f"trainings and {format_hours(history.seconds / 3600)}{limit} GPU hours.{goal}{diverged}{warning}"
    )


def _measure_seconds(runs: Runs, experiment: str) -> float | None:
    """Return the GPU seconds of the finished stages of an experiment; None if it has not run."""
    own_runs = [runs.get(experiment, seed) for seed in runs.experiments.configs[experiment].seeds]
    finished = all(Path(runs.find_stage_folder(run, "evaluate_vqa"), "metrics.json").is_file() for run in own_runs)
    folders = {Path(runs.find_stage_folder(run, stage)) for run in own_runs for stage in run.settings}
    seconds = sum_seconds(folders) if finished else None
    if seconds is None:
        return None
    return seconds * own_runs[0].config.gpus


def _check_hours(study: str, search: SearchSettings, budget: SearchDesign, seconds_per_training: float | None) -> None:
    minimum_seconds = (seconds_per_training or 0) * compute_smallest_budget(budget)
    if budget.gpu_hours is not None and minimum_seconds > 3600 * budget.gpu_hours:
        raise InputError(
            f"{study}: design.gpu_hours: {budget.gpu_hours:g} is less than one variant takes, if its trainings take as "
            f"long as {search.experiment} did; raise it to at least {format_hours(minimum_seconds / 3600)}"
        )


def list_batch_runs(runs: Runs, search: SearchSettings, number: int) -> list[str]:
    """Return the experiments of a batch whose training did not diverge.

    Batch 0 is the experiment that the trials change. If it has no score, the search stops as any experiment does.
    """
    if number == 0:
        return [search.experiment]
    return [name for name in read_search_batch(search, number).names if not has_diverged(runs, name)]


def has_diverged(runs: Runs, experiment: str) -> bool:
    """Return whether an experiment's training diverged for any of its seeds. It would diverge again."""
    for seed in runs.experiments.configs[experiment].seeds:
        run = runs.get(experiment, seed)
        for stage in (stage for stage in TRAINING_STAGES if stage in run.settings):
            folder = Path(runs.find_stage_folder(run, stage))
            finished = (folder / STAGES[stage].outputs[-1]).is_file()
            if not finished and any(DIVERGED in _read_end(log) for log in folder.glob("*.log")):
                return True
    return False


def _read_end(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_END))
        return file.read().decode(errors="replace")


def build_batch_settings(runs: Runs, study: str, search: SearchSettings, number: int) -> dict:
    """Return the page settings of a batch's runs, and the goals that rank its trials."""
    names = list_batch_runs(runs, search, number)
    settings = build_page_settings(runs, names) if names else {"experiments": []}
    return settings | {"goals": find_study(runs, study).content.design.goals.weights}


def list_batch_files(runs: Runs, search: SearchSettings, number: int) -> list[str]:
    """Return the files that the scores of a batch are read from."""
    names = list_batch_runs(runs, search, number)
    return list_page_files(runs, names) if names else []


def list_score_files(search: SearchSettings, number: int) -> list[str]:
    """Return the files of the scores of the batches before this one."""
    return [_find_score_file(search, earlier_number) for earlier_number in range(number)]


def _find_score_file(search: SearchSettings, number: int) -> str:
    return f"{locate_batch_folder(search, number)}/scores.yaml"


def locate_reference_summary(runs: Runs) -> str:
    """Return the file with the number of rows that the baseline's recipe keeps."""
    return f"{runs.find_stage_folder(runs.first_seed(REFERENCE), 'jsonl')}/summary.json"


def list_study_experiments(runs: Runs, study: str) -> list[str]:
    """Return the experiments on a study's page, beginning with the one that others are compared with.

    Raises:
        InputError: the study is not valid.
    """
    source = find_study(runs, study)
    names, reference = [source.experiment, *runs.experiments.variant_names[study]], source.content.page.reference
    if reference and source.name_variant(reference) in names:
        names.insert(0, source.name_variant(reference))
    if source.search:
        trained = {name for record in read_planned_batches(source.search) for name in record.names}
        shown_names = {name for name in list_full_trials(source.search) if not has_diverged(runs, name)}
        names = [name for name in names if name not in trained or name in shown_names]
    return list(dict.fromkeys(names))


def build_study_settings(runs: Runs, study: str) -> dict:
    """Return the settings of a study's page."""
    names, variants = list_study_experiments(runs, study), runs.experiments.variants
    settings = build_page_settings(runs, names)
    keys = dict.fromkeys(key for name in names if name in variants for key in variants[name].settings)
    for experiment in settings["experiments"]:
        config = runs.experiments.configs[experiment["name"]]
        if "control" not in experiment:
            experiment["changes"] = {key: read_setting(config, experiment["recipes"], key) for key in keys}
    shown = find_study(runs, study).content.model_dump(include={"experiment", "description", "page"})
    shown["merged"] = locate_scores_file(runs, study)
    if search := show_search(runs, study):
        shown["search"] = search.model_dump()
    return settings | {"study": shown}


def find_merging_design(runs: Runs, study: str) -> SampleDesign | None:
    """Return the design of a study that merges LoRAs; None for other studies."""
    design = find_study(runs, study).content.design
    return design if isinstance(design, SampleDesign) and design.merged else None


def build_merge_settings(runs: Runs, study: str) -> MergeSettings:
    """Return the sources whose LoRAs are merged, and the mixtures.

    Raises:
        InputError: the experiment trains no LoRA, or a source has pairs, not instructions.
    """
    design, merging = find_merging_design(runs, study), find_study(runs, study)
    file, experiment = merging.file, merging.experiment
    dataset = runs.first_seed(experiment).dataset
    if runs.experiments.configs[experiment].finetune.lora is None:
        raise InputError(f"{file}: design.merged: {experiment} trains no LoRA; set finetune.lora, or remove `merged`")
    if any(dataset.settings.sources[source].split != "finetune" for source in design.mixture.sources):
        raise InputError(f"{file}: design.merged: the sources must have instructions, not pairs; remove `merged`")
    singles = list_single_source_changes(design.mixture)
    trained_names = map(merging.name_variant, singles)
    own_names = [name if name in runs.experiments.configs else experiment for name in trained_names]  # no change
    folders = {
        source: runs.find_stage_folder(runs.first_seed(name), "finetune")
        for source, name in zip(design.mixture.sources, own_names, strict=True)
    }
    variants = runs.experiments.variants
    changes = {name: variants[name].settings for name in runs.experiments.variant_names[study]}
    trained = {name: _read_shares(design.mixture, values) for name, values in changes.items() if values}
    single_shares = [_read_shares(design.mixture, values) for values in singles.values()]
    mixtures = [
        MergedMixture(shares=shares, variant=name) for name, shares in trained.items() if shares not in single_shares
    ]
    drawn = draw_mixtures(design.mixture, design.merged, design.seed)
    mixtures += [MergedMixture(shares=shares) for shares in drawn if shares not in trained.values()]
    return MergeSettings(sources=folders, mixtures=mixtures)


def _read_shares(mixture: MixtureSpace, changes: Mapping[str, Any]) -> dict[str, float]:
    return {source: changes[f"shares.{source}"] for source in mixture.sources}


def locate_scores_file(runs: Runs, study: str) -> str | None:
    """Return the file with the scores of merged models; None if the study merges none."""
    file = f"results/{runs.results_prefix}{study}/merged/scores.yaml"
    return file if find_merging_design(runs, study) else None
