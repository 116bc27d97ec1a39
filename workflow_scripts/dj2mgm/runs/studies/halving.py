"""The next batch of a search, computed from the records of the earlier batches alone.

Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943): all trials are trained on a small share of the rows,
the best of them on larger shares, and the finalists of the last rung with several seeds. The winner is then compared
with the experiment, the runner-up and a random subset of the same size, on seeds that had no part in the choice.
New trials are requested only while the budget covers all later steps, so the number of trials follows from the budget.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dj2mgm.records.look_records import MIN_SEEDS, LookRecord, needs_another_seed
from dj2mgm.records.search_records import RANDOM_SUFFIX, BatchRecord, BatchResult, SearchSettings, TrialRecord
from dj2mgm.runs.studies.unused_seeds import choose_unused_seeds
from dj2mgm.settings.study_files import SearchDesign
from dj2mgm.settings.targets import DecideSection
from dj2mgm.settings.validation import load_settings

NEW_TRIAL = TrialRecord(name="new", changes={})  # placeholder for a trial that the sampler chooses
Cost = tuple[float, float]  # share of the rows, and number of trainings with one seed


@dataclass(frozen=True)
class SearchHistory:
    """Records of a search so far.

    Attributes:
        design: design of the search with the current budget.
        search: its other settings.
        batch_0: result of batch 0, the experiment that the trials change.
        finished_batches: the later batches with their results.
    """

    design: SearchDesign
    search: SearchSettings
    batch_0: BatchResult
    finished_batches: Sequence[tuple[BatchRecord, BatchResult]]

    def with_batch(self, record: BatchRecord, result: BatchResult) -> "SearchHistory":
        """Return the history with one more batch."""
        return replace(self, finished_batches=[*self.finished_batches, (record, result)])

    def iterate_batches(self, *steps: str) -> Iterator[tuple[BatchRecord, BatchResult]]:
        """Yield the batches of these steps."""
        return ((record, result) for record, result in self.finished_batches if record.step in steps)

    def collect_scores(self, rung: int) -> dict[str, float | None]:
        """Return the scores of the trials in a rung, by name."""
        batches = self.iterate_batches("explore", "promote")
        rung_scores = [result.scores for record, result in batches if record.fraction == self.design.rungs[rung]]
        return {name: score for scores in rung_scores for name, score in scores.items()}

    @property
    def diverged_trials(self) -> set[str]:
        """Trials that diverged in any run."""
        return {name for _, result in self.finished_batches for name, score in result.scores.items() if score is None}

    @property
    def final_scores(self) -> dict[str, float | None]:
        """Means of the finalists over their seeds, by name."""
        return {name: score for _, result in self.iterate_batches("finals") for name, score in result.scores.items()}

    def rank_trials(self, rung: int) -> list[str]:
        """Return the trials of a rung, best first, without trials that diverged in any run."""
        scores, diverged_trials = self.collect_scores(rung), self.diverged_trials
        return sorted((name for name in scores if name not in diverged_trials), key=lambda name: -scores[name])

    @property
    def finalists(self) -> list[str]:
        """Finalists, best first.

        They are ordered by their mean over seeds once all seeds are trained, until then by the last rung's score.
        """
        names, finals = self.rank_trials(-1)[: self.design.finalists], self.final_scores
        return sorted(names, key=lambda name: -finals[name]) if finals.keys() >= {*names} else names

    def collect_looks(self, winner: str, experiment: str) -> list[LookRecord]:
        """Return the looks at the difference between a winner and another experiment."""
        winner_looks = (
            result.looks for record, result in self.iterate_batches("confirm") if record.trials[0].name == winner
        )
        return [looks[experiment] for looks in winner_looks if experiment in looks]

    @property
    def trials_by_name(self) -> dict[str, TrialRecord]:
        return {trial.name: trial for record, _ in self.iterate_batches("explore") for trial in record.trials}

    def get_trials(self, names: list[str]) -> list[TrialRecord]:
        trials_by_name = self.trials_by_name
        return [trials_by_name[name] for name in names]

    def estimate_seconds(self, fraction: float) -> float | None:
        """Return the expected GPU seconds of a training with one seed; None: not measured.

        It is the mean over trainings on the same share of the rows. If there are none, it follows from whole runs: the
        time of their training stages is scaled by the share, the time of all other stages is not.
        """
        results = [result for record, result in self.finished_batches if record.fraction == fraction]
        scale = 1.0
        if not sum(result.seconds or 0 for result in results):
            whole_results = [
                result for record, result in self.finished_batches if record.fraction == 1 and result.seconds
            ]
            results, scale = whole_results or [self.batch_0], fraction
        measured_results = [result for result in results if result.seconds and result.runs]
        if not measured_results:
            return None
        fixed, seconds = (
            sum(getattr(result, key) for result in measured_results) for key in ("fixed_seconds", "seconds")
        )
        return (fixed + scale * (seconds - fixed)) / sum(result.runs for result in measured_results)

    @property
    def trainings(self) -> float:
        """Number of trainings so far; a run on a share of the rows, or with some of the seeds, counts as that share."""
        return sum(record.fraction * result.runs for record, result in self.finished_batches) / len(self.search.seeds)

    @property
    def seconds(self) -> float:
        """GPU seconds so far."""
        return sum(result.seconds or 0 for _, result in self.finished_batches)

    def can_afford(self, costs: Sequence[Cost]) -> bool:
        """Return whether the budget covers further trainings."""
        trainings = self.trainings + sum(fraction * runs for fraction, runs in costs) / len(self.search.seeds)
        training_seconds = [self.estimate_seconds(fraction) for fraction, _ in costs]
        hours = self.design.gpu_hours
        if hours is not None and None not in training_seconds:
            seconds = self.seconds + sum(
                seconds_per_training * runs
                for seconds_per_training, (_, runs) in zip(training_seconds, costs, strict=True)
            )
            if seconds > 3600 * hours + 1e-6:
                return False
        return trainings <= self.design.trainings + 1e-9


def read_history(budget: SearchDesign, search: SearchSettings, files: Sequence[str | Path]) -> SearchHistory:
    """Read the records of a search from its files of scores, which begin with batch 0."""
    first_result, *results = (load_settings(BatchResult, file) for file in files)
    records = [load_settings(BatchRecord, Path(file).with_name("trials.yaml")) for file in files[1:]]
    return SearchHistory(budget, search, first_result, list(zip(records, results, strict=True)))


def plan_next(history: SearchHistory) -> BatchRecord | None:
    """Return the next batch; None if the search is decided or its budget is spent.

    In the step explore, its trials are placeholders, which the sampler replaces.
    """
    return _explore(history) or _promote(history) or _repeat_finals(history) or _confirm(history)


def compute_rung_sizes(design: SearchDesign, candidates: int) -> list[int]:
    """Return the number of trials in each rung."""
    sizes = [candidates]
    for _ in design.rungs[1:]:
        promoted = math.ceil(round(design.keep * sizes[-1], 9))
        sizes.append(min(sizes[-1], max(promoted, design.finalists, 1)))
    return sizes


def compute_later_costs(design: SearchDesign, seeds: int, candidates: int) -> list[Cost]:
    """Return upper bounds of the costs of each step after the first rung, for an experiment with `seeds` seeds."""
    sizes = compute_rung_sizes(design, candidates)
    costs = [(fraction, size * seeds) for fraction, size in zip(design.rungs[1:], sizes[1:], strict=True)]
    if not design.finalists:
        return costs
    finalists = min(sizes[-1], design.finalists)
    sides = 4 if design.finalists > 1 else 3  # winner, experiment, random subset and runner-up
    costs.append((1.0, finalists * max(0, design.finalist_seeds - seeds)))
    return [*costs, (1.0, sides * design.confirm_seeds)]


def compute_smallest_budget(design: SearchDesign, seeds: int) -> float:
    """Return the trainings of a search with one batch of one trial."""
    return design.rungs[0] + sum(fraction * runs for fraction, runs in compute_later_costs(design, seeds, 1)) / seeds


def list_choosing_seeds(design: SearchDesign, seeds: list[int]) -> list[int]:
    """Return the seeds that choose the winner: the experiment's seeds, then the smallest unused numbers."""
    more = max(0, design.finalist_seeds - len(seeds)) if design.finalists else 0
    return [*seeds, *choose_unused_seeds(seeds, more)]


def list_confirming_seeds(design: SearchDesign, seeds: list[int], number: int) -> list[int]:
    """Return the seeds of a look at the winner, which differ from those that chose it."""
    return choose_unused_seeds(list_choosing_seeds(design, seeds), number)


def _explore(history: SearchHistory) -> BatchRecord | None:
    """Return the next batch of new trials; None if the space or the budget for them is used up."""
    design, seeds = history.design, len(history.search.seeds)
    explore_batches = list(history.iterate_batches("explore"))
    if any(not record.trials and record.trainings >= design.trainings for record, _ in explore_batches):
        return None  # the space has no more points
    tried = sum(len(record.trials) for record, _ in explore_batches)
    spent_runs = _count_later_runs(history)

    def can_afford(number: int) -> bool:
        later = compute_later_costs(design, seeds, tried + number)
        rest = [(fraction, max(0, runs - spent)) for (fraction, runs), spent in zip(later, spent_runs, strict=True)]
        return history.can_afford([(design.rungs[0], number * seeds), *rest])

    number = _find_largest(design.batch, can_afford)
    return (
        _build_batch(history, "explore", design.rungs[0], history.search.seeds, [NEW_TRIAL] * number)
        if number
        else None
    )


def _count_later_runs(history: SearchHistory) -> list[int]:
    """Return the number of trainings so far, each with one seed, in each step of `compute_later_costs`."""
    design = history.design
    finished_runs = [
        len(history.collect_scores(rung)) * len(history.search.seeds) for rung in range(1, len(design.rungs))
    ]
    steps = ("finals", "confirm") if design.finalists else ()
    return finished_runs + [sum(result.runs for _, result in history.iterate_batches(step)) for step in steps]


def _promote(history: SearchHistory) -> BatchRecord | None:
    design, seeds = history.design, history.search.seeds
    for rung in range(1, len(design.rungs)):
        size = compute_rung_sizes(design, len(history.collect_scores(0)))[rung]
        scores, fraction = history.collect_scores(rung), design.rungs[rung]
        missing = [name for name in history.rank_trials(rung - 1)[:size] if name not in scores]
        number = _find_largest(
            len(missing), lambda number, share=fraction: history.can_afford([(share, number * len(seeds))])
        )
        if number:
            return _build_batch(history, "promote", fraction, seeds, history.get_trials(missing[:number]))
    return None


def _repeat_finals(history: SearchHistory) -> BatchRecord | None:
    design, seeds = history.design, history.search.seeds
    more = list_choosing_seeds(design, seeds)[len(seeds) :]
    final_scores = history.final_scores
    missing = [name for name in history.finalists if name not in final_scores]
    if not more or not missing or not history.can_afford([(1.0, len(more) * len(missing))]):
        return None
    return _build_batch(history, "finals", 1.0, more, history.get_trials(missing), [*seeds, *more])


def _confirm(history: SearchHistory) -> BatchRecord | None:
    """Return the batch that the next look at the winner needs; None if no look is due or the budget is spent."""
    design, seeds = history.design, history.search.seeds
    if not (best := history.finalists[:2]):
        return None
    winner, experiments = best[0], [history.search.experiment, *best[1:]]
    if any(winner in result.fewer_rows for _, result in history.finished_batches):
        experiments.append(f"{winner}{RANDOM_SUFFIX}")
    due_looks = {
        experiment: number for experiment in experiments if (number := _plan_next_look(history, winner, experiment))
    }
    if not due_looks:
        return None
    number = min(due_looks.values())
    against = [experiment for experiment in experiments if due_looks.get(experiment) == number]
    confirm_seeds = list_confirming_seeds(design, seeds, number)
    trials = history.get_trials([winner, *(experiment for experiment in against if experiment in best)])
    batch = _build_batch(
        history, "confirm", 1.0, confirm_seeds[0 if number == MIN_SEEDS else -1 :], trials, confirm_seeds, against
    )
    new = batch.runs.difference(*(record.runs for record, _ in history.finished_batches))
    return batch if history.can_afford([(1.0, len(new))]) else None


def _plan_next_look(history: SearchHistory, winner: str, experiment: str) -> int | None:
    """Return the number of seeds of the next look at a difference; None if it is decided, or cannot be taken."""
    confirmations = [
        batch
        for batch in history.iterate_batches("confirm")
        if batch[0].trials[0].name == winner and experiment in batch[0].against
    ]
    if any(experiment not in result.looks for _, result in confirmations):
        return None  # a training diverged
    if not (looks := history.collect_looks(winner, experiment)):
        return MIN_SEEDS
    budget = DecideSection(seeds=history.design.confirm_seeds)
    return len(looks[-1].seeds) + 1 if needs_another_seed(looks[-1], budget) else None


def _build_batch(
    history: SearchHistory,
    step: str,
    fraction: float,
    seeds: list[int],
    trials: list[TrialRecord],
    scored_seeds: list[int] | None = None,
    against: Sequence[str] = (),
) -> BatchRecord:
    """Return a record with the search's budget and the expected GPU seconds of a training on this share of the rows."""
    return BatchRecord(
        step=step,
        fraction=fraction,
        seeds=seeds,
        scored_seeds=scored_seeds or seeds,
        trials=trials,
        against=list(against),
        trainings=history.design.trainings,
        price=history.estimate_seconds(fraction),
    )


def _find_largest(maximum: int, can_afford: Callable[[int], bool]) -> int:
    """Return the largest number up to `maximum` that is affordable."""
    return max((number for number in range(1, maximum + 1) if can_afford(number)), default=0)
