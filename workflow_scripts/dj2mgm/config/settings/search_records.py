"""Content of the files of an adaptive study: its search, and the trials and results of each batch."""

from typing import Any, Literal

from dj2mgm.config.settings.base import Number, Section, Seed, setting
from dj2mgm.config.settings.look_records import LookRecord
from dj2mgm.config.settings.string_formats import Name
from dj2mgm.config.settings.study_files import Interval, MixtureSpace, Sampler

RANDOM = "-random"  # ends the name of the winner's control, a random subset of the same size


class SearchSettings(Section):
    """Space and storage of a search: search.yaml. The budget is in the study's file, since a change repeats nothing."""

    name: str = setting(..., "name of the study in the storage")
    experiment: str = setting(..., "experiment that the trials change")
    seeds: list[Seed] = setting(..., "of the experiment")
    folder: str = setting(..., "of its files")
    axes: dict[str, list | Interval] = setting(..., "values of each key")
    mixture: MixtureSpace | None = setting(None, "its shares are axes, too")
    sampler: Sampler = setting()
    seed: Seed = setting()
    storage: str = setting(..., "SQLAlchemy's address of the database")

    @property
    def key(self) -> str:
        """Name of its folder, a hash of the settings that decide the trials."""
        return self.folder.rpartition("/")[2]


class TrialRecord(Section):
    """A variant that a search tries. Its runs are ordinary runs."""

    name: Name = setting(..., "name of the experiment; a folder of results")
    changes: dict[str, Any] = setting(..., "values by dotted key, as in a study's file")


class BatchRecord(Section):
    """The trainings of a batch: trials.yaml."""

    step: Literal["explore", "promote", "finals", "confirm"] = setting(
        ..., "new trials; longer runs of the best ones; more seeds of the finalists; or a look at the winner"
    )
    fraction: Number = setting(..., "share of the experiment's rows and samples")
    seeds: list[Seed] = setting(..., "seeds that are trained")
    scored_seeds: list[Seed] = setting(..., "seeds whose scores count, with those of earlier batches")
    trials: list[TrialRecord] = setting(..., "in the step confirm, the winner is the first")
    against: list[Name] = setting([], "in the step confirm: experiments that the winner is compared with")
    trainings: int = setting(..., "the budget when the batch was planned")
    price: float | None = setting(None, "expected GPU seconds of a training with one seed; null: not known")

    @property
    def names(self) -> list[str]:
        """The experiments that are trained."""
        runs = [run_name(trial.name, self.fraction) for trial in self.trials]
        return list(dict.fromkeys([*runs, *self.against]))

    @property
    def runs(self) -> set[tuple[str, int]]:
        """The trainings with one seed: experiment and seed."""
        return {(name, seed) for name in self.names for seed in self.seeds}


class BatchResult(Section):
    """The results of a batch: scores.yaml. Batch 0 is the experiment that the trials change."""

    scores: dict[str, float | None] = setting(..., "headline by trial; null: its training diverged")
    runs: int = setting(..., "trainings with one seed that no earlier batch has")
    seconds: float | None = setting(..., "GPU seconds of the stages that only these have; null: not measured")
    fixed_seconds: float = setting(0.0, "the part of `seconds` that does not grow with the rows: all but training")
    fewer_rows: list[str] = setting([], "trials that train on fewer different rows than the baseline")
    looks: dict[str, LookRecord] = setting({}, "verdict on the winner, by the experiment that it is compared with")


def run_name(trial: str, fraction: Number) -> str:
    """Return the name of the experiment in which a trial is trained on a share of the rows."""
    return trial if fraction == 1 else f"{trial}-{fraction:g}"
