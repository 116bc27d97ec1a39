"""Batches of a search in the workflow: their inputs, the end of the search, and the checks before it."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

from dj2mgm.config.looks import check_headline
from dj2mgm.config.pages import has_diverged, page_files, page_settings
from dj2mgm.config.runs import Runs
from dj2mgm.config.searches import batch_folder, is_exhausted, read_batch
from dj2mgm.config.seed_times import format_hours, sum_seconds
from dj2mgm.config.settings.search_records import BatchScores, SearchSettings, count_next, price_of_training
from dj2mgm.config.settings.study_files import SearchDesign
from dj2mgm.config.settings.validation import load_settings
from dj2mgm.errors import InputError


def find_search(runs: Runs, study: str) -> SearchSettings | None:
    """Return the search of a study; None for another design. Raises InputError for a study that is not valid."""
    runs.experiments.require(study)
    return runs.experiments.searches.get(study)


def take_batches(
    runs: Runs, study: str, asked: Callable[[SearchSettings, int], str], scored: Callable[[SearchSettings, int], str]
) -> list[str]:
    """Return the files of the scores of all batches; none for a study that is not a search.

    Args:
        runs: all runs, to which the trials are added.
        study: its name.
        asked: function that returns the file of the trials of a batch, and raises Snakemake's exception if it is not
            there yet.
        scored: such a function for the scores.
    """
    search, files = find_search(runs, study), []
    if search is None:
        return []
    budget = runs.experiments.studies[study].design
    check_headline(runs, search.experiment)
    _check_hours(study, search, budget, _measured(runs, search.experiment))
    for number in count():
        if number:
            asked(search, number)
            runs.add_trials(study)
        files.append(scored(search, number))
        batches = [load_settings(BatchScores, file) for file in files]
        if number == 0:
            _check_hours(study, search, budget, price_of_training(batches))
        if not count_next(budget, batches) or is_exhausted(search, number, budget.trainings):
            return files
    return files


def describe_progress(runs: Runs, study: str) -> str:
    """Return the state of a finished search in a sentence; empty for another design."""
    search, budget = find_search(runs, study), runs.experiments.studies[study].design
    if search is None:
        return ""
    batches = []
    for number in count():
        file = Path(batch_folder(search, number), "scores.yaml")
        if not file.is_file():
            break
        batches.append(load_settings(BatchScores, file))
    scores = [score for batch in batches[1:] for score in batch.scores.values()]
    hours = sum(batch.seconds or 0 for batch in batches[1:]) / 3600
    limit = "" if budget.gpu_hours is None else f" of at most {budget.gpu_hours:g}"
    diverged = f" {scores.count(None)} diverged." if None in scores else ""
    return (
        f"The search has trained {len(scores)} of at most {budget.trainings} variants in {format_hours(hours)} GPU "
        f"hours{limit}.{diverged} The best of many has a score that is too high by chance; confirm it with other seeds."
    )


def _measured(runs: Runs, experiment: str) -> float | None:
    """Return the GPU seconds of the finished stages of an experiment; None if it has not run."""
    own = [runs.get(experiment, seed) for seed in runs.experiments.configs[experiment].seeds]
    finished = all(Path(runs.stage_folder(run, "evaluate_vqa"), "metrics.json").is_file() for run in own)
    folders = {Path(runs.stage_folder(run, stage)) for run in own for stage in run.settings}
    seconds = sum_seconds(folders) if finished else None
    return seconds and seconds * own[0].config.gpus


def _check_hours(study: str, search: SearchSettings, budget: SearchDesign, price: float | None) -> None:
    if budget.gpu_hours is not None and price and price > 3600 * budget.gpu_hours:
        raise InputError(
            f"{study}: design.gpu_hours: {budget.gpu_hours:g} is less than one training takes, as {search.experiment} "
            f"did; raise it to at least {format_hours(price / 3600)}"
        )


def batch_names(runs: Runs, search: SearchSettings, number: int) -> list[str]:
    """Return the trials of a batch whose training did not diverge; of batch 0, the experiment that they change."""
    if number == 0:
        return [search.experiment]  # without its score, the search stops as any experiment does
    return [trial.name for trial in read_batch(search, number) if not has_diverged(runs, trial.name)]


def batch_settings(runs: Runs, search: SearchSettings, number: int) -> dict:
    """Return the settings of the scores of a batch."""
    names = batch_names(runs, search, number)
    return page_settings(runs, list(dict.fromkeys([search.experiment, *names]))) if names else {"experiments": []}


def batch_files(runs: Runs, search: SearchSettings, number: int) -> list[str]:
    """Return the files that the scores of a batch are read from."""
    names = batch_names(runs, search, number)
    return page_files(runs, [search.experiment, *names]) if names else []


def score_files(search: SearchSettings, number: int) -> list[str]:
    """Return the files of the scores of the batches before this one."""
    return [f"{batch_folder(search, earlier)}/scores.yaml" for earlier in range(number)]
