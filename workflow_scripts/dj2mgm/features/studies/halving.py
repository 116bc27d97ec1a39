"""The next batch of a search, computed from the records of the earlier batches alone.

Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943): all trials are trained on a small share of the rows,
and the best of them on larger shares. New trials are requested only while the budget covers all later rungs, so the
number of trials follows from the budget.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dj2mgm.features.studies.designs import SearchDesign
from dj2mgm.features.studies.study_records import BatchRecord, BatchResult, SearchSettings, TrialRecord
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

    @property
    def explore_batches(self) -> list[tuple[BatchRecord, BatchResult]]:
        """The batches of new trials."""
        return [(record, result) for record, result in self.finished_batches if record.step == "explore"]

    def collect_scores(self, rung: int) -> dict[str, float | None]:
        """Return the scores of the trials in a rung, by name."""
        share = self.design.rungs[rung]
        rung_scores = [result.scores for record, result in self.finished_batches if record.fraction == share]
        return {name: score for scores in rung_scores for name, score in scores.items()}

    @property
    def diverged_trials(self) -> set[str]:
        """Trials that diverged in any run."""
        return {name for _, result in self.finished_batches for name, score in result.scores.items() if score is None}

    def rank_trials(self, rung: int) -> list[str]:
        """Return the trials of a rung, best first, without trials that diverged in any run."""
        scores, diverged_trials = self.collect_scores(rung), self.diverged_trials
        return sorted((name for name in scores if name not in diverged_trials), key=lambda name: -scores[name])

    @property
    def trials_by_name(self) -> dict[str, TrialRecord]:
        return {trial.name: trial for record, _ in self.explore_batches for trial in record.trials}

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
    """Return the next batch; None if the search has ended.

    In the step explore, its trials are placeholders, which the sampler replaces.
    """
    return _explore(history) or _promote(history)


def compute_rung_sizes(design: SearchDesign, candidates: int) -> list[int]:
    """Return the number of trials in each rung."""
    sizes = [candidates]
    for _ in design.rungs[1:]:
        sizes.append(math.ceil(round(design.keep * sizes[-1], 9)))
    return sizes


def compute_later_costs(design: SearchDesign, seeds: int, candidates: int) -> list[Cost]:
    """Return the costs of each rung after the first one, for an experiment with `seeds` seeds."""
    sizes = compute_rung_sizes(design, candidates)
    return [(fraction, size * seeds) for fraction, size in zip(design.rungs[1:], sizes[1:], strict=True)]


def compute_smallest_budget(design: SearchDesign) -> float:
    """Return the trainings of a search with one trial, which is trained in each rung."""
    return sum(design.rungs)


def _explore(history: SearchHistory) -> BatchRecord | None:
    """Return the next batch of new trials; None if the space or the budget for them is used up."""
    design, seeds = history.design, len(history.search.seeds)
    explore_batches = history.explore_batches
    if any(not record.trials and record.trainings >= design.trainings for record, _ in explore_batches):
        return None  # the space has no more points
    tried = sum(len(record.trials) for record, _ in explore_batches)
    spent_runs = [len(history.collect_scores(rung)) * seeds for rung in range(1, len(design.rungs))]

    def can_afford(number: int) -> bool:
        later = compute_later_costs(design, seeds, tried + number)
        rest = [(fraction, max(0, runs - spent)) for (fraction, runs), spent in zip(later, spent_runs, strict=True)]
        return history.can_afford([(design.rungs[0], number * seeds), *rest])

    number = _find_largest(design.batch, can_afford)
    return _build_batch(history, "explore", design.rungs[0], [NEW_TRIAL] * number) if number else None


def _promote(history: SearchHistory) -> BatchRecord | None:
    design, seeds = history.design, len(history.search.seeds)
    for rung in range(1, len(design.rungs)):
        size = compute_rung_sizes(design, len(history.collect_scores(0)))[rung]
        scores, fraction = history.collect_scores(rung), design.rungs[rung]
        missing = [name for name in history.rank_trials(rung - 1)[:size] if name not in scores]
        number = _find_largest(
            len(missing), lambda number, share=fraction: history.can_afford([(share, number * seeds)])
        )
        if number:
            return _build_batch(history, "promote", fraction, history.get_trials(missing[:number]))
    return None


def _build_batch(history: SearchHistory, step: str, fraction: float, trials: list[TrialRecord]) -> BatchRecord:
    """Return a record with the search's budget and the expected GPU seconds of a training on this share of the rows."""
    return BatchRecord(
        step=step,
        fraction=fraction,
        seeds=history.search.seeds,
        trials=trials,
        trainings=history.design.trainings,
        price=history.estimate_seconds(fraction),
    )


def _find_largest(maximum: int, can_afford: Callable[[int], bool]) -> int:
    """Return the largest number up to `maximum` that is affordable."""
    return max((number for number in range(1, maximum + 1) if can_afford(number)), default=0)
