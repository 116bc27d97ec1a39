"""Looks (interim analyses) of `snakemake decide`: their records, seeds and files, and the checks of its settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from dj2mgm.errors import InputError
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.layers import locate_experiment_file
from dj2mgm.runs.pages import (
    build_page_settings,
    check_headline,
    choose_unused_seeds,
    format_hours,
    list_page_files,
    sum_measured_seconds,
)
from dj2mgm.settings.base import Section, Seed, setting
from dj2mgm.settings.config_files import suggest_name
from dj2mgm.settings.targets import MIN_SEEDS, DecisionBudget
from dj2mgm.settings.validation import load_settings
from dj2mgm.verdict_kinds import VerdictKind


class LookRecord(Section):
    """A look, the interim analysis of both sides after some seeds: look.yaml."""

    experiment: str = setting()
    against: str = setting("baseline", "experiment that it is compared with")
    seeds: list[Seed] = setting()
    kind: Literal["better", "worse", "equivalent", "undecided", "withheld"] = setting()
    mean: float = setting(..., "difference of the headline from `against`")
    half: float = setting(..., "half the length of the interval")
    level: float = setting(..., "1 − the confidence of the interval")
    spent: float = setting(..., "probability of an error at this look or an earlier one")
    reported: bool = setting(False, "a report with several of the seeds was made before the first look")
    budget: DecisionBudget = setting(..., "the budget when the look was taken")
    most_seeds: int = setting(..., "seeds that this budget allowed")
    seconds: float | None = setting(..., "measured time of all seeds of both sides")
    seconds_per_seed: float | None = setting()
    title: str = setting(..., "name of the headline")
    difference: str = setting(..., "`mean` with its unit")
    interval: str = setting(..., "ends of the interval; empty if it contains all possible differences")
    statement: str = setting(..., "the verdict as the end of a sentence")
    next_step: str = setting(..., "the price of a decision or, without a verdict, the remedy; empty if it is decided")
    command: str = setting(..., "the command that continues; empty if there is none")

    @property
    def verdict(self) -> VerdictKind:
        return VerdictKind(self.kind)


def count_affordable_seeds(
    budget: DecisionBudget, finished_seeds: int, seconds: float | None, seconds_per_seed: float | None
) -> int:
    """Return the number of seeds of each side that a budget allows, at least `finished_seeds`.

    Args:
        finished_seeds: finished seeds.
        seconds: their time.
        seconds_per_seed: the time of one more; None if it is not known, so that `budget.hours` does not limit yet.
    """
    allowed_seeds = budget.seeds
    if budget.hours is not None and seconds is not None and seconds_per_seed:
        allowed_seeds = min(
            allowed_seeds, finished_seeds + int(max(0.0, 3600 * budget.hours - seconds) // seconds_per_seed)
        )
    return max(finished_seeds, allowed_seeds)


def count_planned_seeds(
    budget: DecisionBudget,
    last: LookRecord | None,
    finished_seeds: int,
    seconds: float | None,
    seconds_per_seed: float | None,
) -> int:
    """Return the number of seeds that looks under a budget are planned for.

    It is fixed at the first of these looks, even if seeds take less time later, because all intervals depend on it.
    """
    if last and last.budget == budget:
        return last.most_seeds
    return count_affordable_seeds(budget, finished_seeds, seconds, seconds_per_seed)


def needs_another_seed(look: LookRecord, budget: DecisionBudget) -> bool:
    """Return whether another seed follows a look."""
    finished_seeds = len(look.seeds)
    spent = finished_seeds, look.seconds, look.seconds_per_seed
    allowed_seeds = min(count_planned_seeds(budget, look, *spent), count_affordable_seeds(budget, *spent))
    was_last = min(look.most_seeds, count_affordable_seeds(look.budget, *spent)) <= finished_seeds
    # at the end of a budget, a verdict may be withheld because more seeds are needed to show that images are used
    is_open = look.verdict == VerdictKind.UNDECIDED or (look.verdict == VerdictKind.WITHHELD and was_last)
    return is_open and allowed_seeds > finished_seeds


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
