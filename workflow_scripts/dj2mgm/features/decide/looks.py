"""Looks of `snakemake decide`: their seeds and files, and the checks of its settings."""

from collections.abc import Callable
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.features.decide.look_records import LookRecord, needs_another_seed
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.layers import locate_experiment_file
from dj2mgm.runs.pages import build_page_settings, list_page_files
from dj2mgm.runs.scored_runs import check_headline
from dj2mgm.runs.seed_times import choose_unused_seeds, format_hours, sum_measured_seconds
from dj2mgm.settings.config_files import suggest_name
from dj2mgm.settings.targets import MIN_SEEDS
from dj2mgm.settings.validation import load_settings

EXAMPLE_COMMAND = "`snakemake decide --config experiment=dj_synth`"


def choose_seeds(runs: Runs, experiment: str, number: int) -> list[int]:
    """Return the seeds of both sides: those of the configuration, then the numbers after the largest."""
    configured = runs.experiments.configs[experiment].seeds
    return [*configured, *choose_unused_seeds(configured, max(0, number - len(configured)))][:number]


def build_look_settings(runs: Runs, experiment: str, opponent: str, number: int) -> dict:
    """Return the settings of the look after this number of seeds; raises as `build_page_settings` does."""
    return build_page_settings(runs, [opponent, experiment], choose_seeds(runs, experiment, number))


def list_look_inputs(runs: Runs, experiment: str, opponent: str, number: int) -> list[str]:
    """Return the files of both sides that a look reads."""
    return list_page_files(runs, [opponent, experiment], choose_seeds(runs, experiment, number))


def locate_decision_folder(runs: Runs, experiment: str) -> str:
    """Return the folder of an experiment's decisions, below results/."""
    return f"{runs.results_prefix}{experiment}/decide"


def name_subfolder(opponent: str) -> str:
    """Return the subfolder of the looks at an opponent, as "/name"; empty for the reference."""
    return "" if opponent == REFERENCE else f"/{opponent}"


def find_opponent(subfolder: str) -> str:
    """Return the opponent whose looks have this subfolder, as `name_subfolder` returns it."""
    return subfolder.removeprefix("/") or REFERENCE


def list_looks(runs: Runs, look_file: Callable[[str, int], str]) -> list[str]:
    """Return the files of all looks at each opponent, up to the one that decides or that spends the budget.

    Args:
        runs: all runs.
        look_file: function that returns the file of the look at an opponent after a number of seeds, and raises
            Snakemake's exception if it was not taken yet.
    """
    budget, files = runs.shared.decide, []
    for opponent in budget.against:
        for number in range(MIN_SEEDS, budget.seeds + 1):
            files.append(look_file(opponent, number))
            if not needs_another_seed(load_settings(LookRecord, files[-1]), budget):
                break
    return files


def check_decidable(runs: Runs) -> str:
    """Return the experiment to decide about.

    Raises:
        InputError: it is not named or not valid, is its own opponent or has an unknown one, the budget is smaller than
            its number of seeds, or no run reports the headline.
    """
    if not runs.shared.experiment:
        raise InputError(f"decide: the key experiment is missing; name one, as in {EXAMPLE_COMMAND}")
    experiment, budget = runs.experiments.get_requested("decide", REFERENCE), runs.shared.decide
    if experiment in budget.against:
        raise InputError(
            f"decide: {experiment} would be compared with itself; name another experiment, as in {EXAMPLE_COMMAND}"
        )
    runs.experiments.require(experiment)
    for opponent in budget.against:
        _check_opponent(runs, experiment, opponent)
    configured_seeds = runs.experiments.configs[experiment].seeds
    if budget.seeds < len(configured_seeds):
        raise InputError(
            f"decide.seeds: {budget.seeds} is less than the {len(configured_seeds)} seeds of the configuration; raise "
            f"it to at least {len(configured_seeds)}"
        )
    for opponent in budget.against:
        _check_hours(runs, experiment, opponent)
    for name in (*budget.against, experiment):
        check_headline(runs, name)
    return experiment


def _check_opponent(runs: Runs, experiment: str, opponent: str) -> None:
    """Refuse an opponent that is neither a valid experiment nor a control of the experiment."""
    experiments = runs.experiments
    controls = experiments.variant_names.get(experiment, [])
    if opponent in controls:
        return
    if opponent == f"{experiment}-random":
        problem = f"{experiment} selects no rows, so {opponent} would be {REFERENCE} itself; name {REFERENCE}"
        if experiments.selects_rows(experiment):
            remedy = f"write `controls: [random]` into {locate_experiment_file(experiment)}"
            problem = f"{experiment} has no control {opponent}; {remedy}"
        raise InputError(f"decide.against: {problem}")
    if opponent not in experiments.files:
        opponents = [*experiments.files, *controls]
        raise InputError(f"decide.against: there is no experiment {opponent!r}; {suggest_name(opponent, opponents)}")
    experiments.require(opponent)


def _check_hours(runs: Runs, experiment: str, opponent: str) -> None:
    """Refuse fewer hours than the first look takes, if a seed of both sides was measured."""
    hours, folder = runs.shared.decide.hours, f"{locate_decision_folder(runs, experiment)}{name_subfolder(opponent)}"
    if hours is None or any(Path("results", folder).glob("seeds-*/look.yaml")):
        return
    first_runs = [runs.get(name, choose_seeds(runs, experiment, 1)[0]) for name in (opponent, experiment)]
    stage_folders = [{stage: runs.find_stage_folder(run, stage) for stage in run.settings} for run in first_runs]
    finished = all(Path(stages["evaluate_vqa"], "metrics.json").is_file() for stages in stage_folders)
    seconds = sum_measured_seconds(stage_folders) if finished else None
    if seconds and MIN_SEEDS * seconds > 3600 * hours:
        raise InputError(
            f"decide.hours: {hours:g} is too little for {MIN_SEEDS} seeds; the first one of both sides took "
            f"{format_hours(seconds / 3600)} hours, so raise it to at least "
            f"{format_hours(MIN_SEEDS * seconds / 3600)}"
        )
