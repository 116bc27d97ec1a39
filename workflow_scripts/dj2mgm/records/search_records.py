"""Contents of the files of a search: its settings, and the trainings and results of each batch."""

from typing import Any, Literal

from dj2mgm.settings.base import Number, Section, Seed, setting
from dj2mgm.settings.string_formats import Name
from dj2mgm.settings.study_files import Interval, MixtureSpace, Sampler


class SearchSettings(Section):
    """Space of a search (search.yaml), without the budget, so that a larger budget continues the search."""

    experiment: str = setting(..., "experiment that the trials change")
    seeds: list[Seed] = setting(..., "seeds of the experiment")
    folder: str = setting(..., "folder of the search's files")
    axes: dict[str, list | Interval] = setting(..., "values of each key")
    mixture: MixtureSpace | None = setting(None, "mixture of sources; its shares are among the axes")
    sampler: Sampler = setting()
    seed: Seed = setting()

    @property
    def key(self) -> str:
        """Last part of `folder`: a hash of the settings that decide the trials."""
        return self.folder.rpartition("/")[2]


class TrialRecord(Section):
    """A variant that a search tries. Its runs are stored like those of any experiment."""

    name: Name = setting(..., "name of the experiment and of its folder of results")
    changes: dict[str, Any] = setting(..., "values by dotted key, as in a study's file")


class BatchRecord(Section):
    """The trainings of a batch (trials.yaml)."""

    step: Literal["explore", "promote"] = setting(..., "explore: new trials; promote: more rows for the best")
    fraction: Number = setting(..., "share of the experiment's rows and samples")
    seeds: list[Seed] = setting(..., "seeds that are trained")
    trials: list[TrialRecord] = setting()
    trainings: int = setting(..., "budget of trainings when the batch was planned")
    price: float | None = setting(None, "expected GPU seconds of a training with one seed; null: not known")

    @property
    def names(self) -> list[str]:
        """Names of the experiments that are trained."""
        return [format_run_name(trial.name, self.fraction) for trial in self.trials]


class BatchResult(Section):
    """The results of a batch (scores.yaml). Batch 0 has those of the experiment that the trials change."""

    scores: dict[str, float | None] = setting(..., "score by trial (`find_trial_score`); null: its training diverged")
    runs: int = setting(..., "number of its trainings, one for each seed")
    seconds: float | None = setting(..., "GPU seconds of stages that ran for these trainings only; null: not measured")
    fixed_seconds: float = setting(0.0, "part of `seconds` outside training stages, which does not grow with the rows")
    fewer_rows: list[str] = setting([], "trials that train on fewer different rows than the baseline")


def format_run_name(trial: str, fraction: Number) -> str:
    """Return the name of the experiment in which a trial is trained on a share of the rows."""
    return trial if fraction == 1 else f"{trial}-{fraction:g}"
