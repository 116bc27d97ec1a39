"""Content of the files of an adaptive study: its search, and the trials and scores of each batch."""

from typing import Any, Literal

from dj2mgm.config.settings.base import Section, Seed, setting
from dj2mgm.config.settings.strings import Name
from dj2mgm.config.settings.study_files import Interval, SearchDesign


class SearchSettings(Section):
    """Space and storage of a search: search.yaml. The budget is in the study's file, since a change repeats nothing."""

    name: str = setting(..., "of the study in the storage")
    experiment: str = setting(..., "experiment that the trials change")
    folder: str = setting(..., "of its files")
    axes: dict[str, list | Interval] = setting(..., "values of each key")
    sampler: Literal["tpe", "random"] = setting()
    seed: Seed = setting()
    storage: str = setting(..., "SQLAlchemy's address of the database")

    @property
    def key(self) -> str:
        """Name of its folder, a hash of what decides the trials."""
        return self.folder.rpartition("/")[2]


class TrialRecord(Section):
    """A trial, which is an ordinary run."""

    name: Name = setting(..., "of the experiment; a folder of results")
    changes: dict[str, Any] = setting(..., "by dotted key, as in a study's file")


class BatchRecord(Section):
    """The trials of a batch: trials.yaml."""

    trials: list[TrialRecord] = setting()
    trainings: int = setting(..., "the budget when they were asked for")


class BatchScores(Section):
    """The results of a batch: scores.yaml. Batch 0 is the experiment that the trials change."""

    scores: dict[str, float | None] = setting(..., "headline by trial; null: its training diverged")
    seconds: float | None = setting(..., "GPU seconds of the stages that only this batch has; null: not measured")


def count_next(design: SearchDesign, batches: list[BatchScores]) -> int:
    """Return the number of trainings that the budget allows in the next batch; 0: the search ends.

    Args:
        design: the current budget.
        batches: results of the earlier batches, from batch 0.
    """
    _, *done = batches
    trained = sum(len(one.scores) for one in done)
    allowed = min(design.batch, design.trainings - trained)
    price = price_of_training(batches)
    if design.gpu_hours is not None and price:
        left = 3600 * design.gpu_hours - sum(one.seconds or 0 for one in done)
        allowed = min(allowed, int(left // price))
    return max(0, allowed)


def price_of_training(batches: list[BatchScores]) -> float | None:
    """Return the GPU seconds of a trial: the mean of finished ones, or those of the experiment; None: not measured."""
    first, *done = batches
    trained = sum(len(one.scores) for one in done)
    return sum(one.seconds or 0 for one in done) / trained if trained else first.seconds
