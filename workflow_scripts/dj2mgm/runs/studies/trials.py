"""Trials of a search in Optuna's storage, which several searches on several machines may share.

A trial is identified by a hash of its changes, which is a part of its run's name. After a kill, the trials of an
unfinished batch are found again by their owner and batch, so that none is lost or counted twice.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from zlib import crc32

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import DBAPIError

from dj2mgm.records.search_records import BatchRecord, SearchSettings, TrialRecord
from dj2mgm.runs.studies.halving import SearchHistory, plan_next
from dj2mgm.runs.studies.mixtures import build_share_axes, compute_shares, list_quantile_keys
from dj2mgm.runs.studies.study_designs import hash_changes, round_number
from dj2mgm.settings.study_files import Interval

# Scores from which a sampler chooses points. Optuna's default of 10 leaves little of a budget of a few trainings.
STARTUP_TRIALS = 4
SAMPLERS: dict[str, Callable[..., optuna.samplers.BaseSampler]] = {
    "tpe": partial(optuna.samplers.TPESampler, n_startup_trials=STARTUP_TRIALS),
    "gp": partial(optuna.samplers.GPSampler, n_startup_trials=STARTUP_TRIALS),
    "random": optuna.samplers.RandomSampler,
}
RUN_ATTRIBUTE = "run"  # attribute of a trial: name of its run, owner and batch
MAX_OPENINGS = 4  # attempts to open a database
MAX_RETRIES = 50  # attempts to get a trial whose run is new
ABANDONED_AFTER = timedelta(seconds=15)  # a trial without a run after this time was interrupted
optuna.logging.set_verbosity(optuna.logging.WARNING)


class Trials:
    """The trials of one search."""

    def __init__(self, search: SearchSettings, owner: str, max_trials: int):
        """Open the storage.

        Args:
            search: settings of the search.
            owner: identifier of the folder of results that trains the trials.
            max_trials: largest number of trials in the storage, over all searches with this name.
        """
        self.search, self.owner, self.max_trials = search, owner, max_trials
        self.study = optuna.create_study(
            storage=_open_storage(search.storage),
            study_name=search.name,
            direction="maximize",
            load_if_exists=True,
        )
        shares = build_share_axes(search.mixture)
        self.axes = {key: axis for key, axis in search.axes.items() if key not in shares}
        self.distributions = {key: _build_distribution(axis) for key, axis in self.axes.items()}
        self.distributions |= dict.fromkeys(list_quantile_keys(search.mixture), FloatDistribution(0, 1))

    def ask(self, batch: int, number: int) -> list[TrialRecord]:
        """Return at most `number` new trials, or the trials of this batch that were requested before a kill.

        There are fewer if all searches together have `max_trials` trials, or if the space has no more points.
        """
        completed = f"asked {self.owner} {batch}"  # attribute of the study, once the batch is complete
        self._discard_abandoned()
        while completed not in self.study.user_attrs and len(self._list_batch(batch)) < number:
            if not self._ask_new(batch):
                break
        self.study.set_user_attr(completed, True)
        return [
            TrialRecord(name=self._read_run(trial)["name"], changes=self._read_changes(trial))
            for trial in self._list_batch(batch)
        ]

    def tell(self, scores: Mapping[str, float | None]) -> None:
        """Tell Optuna the scores of this owner's trials, by the names of their runs; None if a training diverged."""
        for trial in self._list_own():
            name = self._read_run(trial)["name"]
            if trial.state == TrialState.RUNNING and name in scores:
                self._finish(trial.number, scores[name])

    def _ask_new(self, batch: int) -> bool:
        """Ask for a trial whose run is new, and return whether there is one within the limit."""
        seed = crc32(f"{self.search.seed} {batch} {len(self._list_batch(batch))}".encode())
        self.study.sampler = SAMPLERS[self.search.sampler](seed=seed)
        for _ in range(MAX_RETRIES):
            trial = self.study.ask(self.distributions)
            name = f"{self.search.experiment}-{hash_changes(self._read_changes(trial))}"
            if not self._is_within_limit(trial.number):
                self._finish(trial.number, None)
                return False
            if not (twins := self._find_others(name, trial.number)):
                trial.set_user_attr(RUN_ATTRIBUTE, {"name": name, "owner": self.owner, "batch": batch})
                if not self._find_others(name, trial.number):
                    return True
                trial.set_user_attr(RUN_ATTRIBUTE, {})  # another search requested the same run at the same time
            score = next((twin.value for twin in twins if twin.state == TrialState.COMPLETE), None)
            self._finish(trial.number, score)
        return False

    def _is_within_limit(self, number: int) -> bool:
        """Return whether a trial is one of the first `max_trials`; wait for earlier trials that are being requested."""
        while True:
            earlier = [trial for trial in self._list_all() if trial.number < number]
            with_run, pending = (
                sum(bool(self._read_run(trial)) for trial in earlier),
                sum(map(self._is_being_asked, earlier)),
            )
            if with_run >= self.max_trials:
                return False
            if with_run + pending < self.max_trials:
                return True
            time.sleep(0.2)

    def _is_being_asked(self, trial: FrozenTrial) -> bool:
        is_open = trial.state == TrialState.RUNNING and not self._read_run(trial)
        return is_open and _compute_age(trial) < ABANDONED_AFTER

    def _find_others(self, name: str, number: int) -> list[FrozenTrial]:
        return [
            trial for trial in self._list_all() if trial.number != number and self._read_run(trial).get("name") == name
        ]

    def _discard_abandoned(self) -> None:
        for trial in self._list_all():
            if trial.state == TrialState.RUNNING and not self._read_run(trial) and not self._is_being_asked(trial):
                self._finish(trial.number, None)

    def _finish(self, number: int, score: float | None) -> None:
        state = TrialState.FAIL if score is None else TrialState.COMPLETE
        self.study.tell(number, score, state, skip_if_finished=True)

    def _list_all(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _list_own(self) -> Iterator[FrozenTrial]:
        return (trial for trial in self._list_all() if self._read_run(trial).get("owner") == self.owner)

    def _list_batch(self, batch: int) -> list[FrozenTrial]:
        return [trial for trial in self._list_own() if self._read_run(trial)["batch"] == batch]

    def _read_run(self, trial: FrozenTrial) -> dict:
        return trial.user_attrs.get(RUN_ATTRIBUTE, {})

    def _read_changes(self, trial: FrozenTrial | optuna.Trial) -> dict[str, Any]:
        values = {key: _decode_value(axis, trial.params[key]) for key, axis in self.axes.items()}
        return values | compute_shares(self.search.mixture, trial.params)


def ask_for_batch(history: SearchHistory, owner: str) -> BatchRecord:
    """Return the next batch of a search that is not finished, with its new trials."""
    batch, design = plan_next(history), history.design
    if batch is None or batch.step != "explore":
        return batch
    trials = Trials(history.search, owner, int(design.trainings / design.rungs[0]))
    for _, result in history.iterate_batches("explore"):
        trials.tell(result.scores)
    return batch.model_copy(update={"trials": trials.ask(len(history.finished_batches) + 1, len(batch.trials))})


def find_importances(
    axes: Mapping[str, list | Interval], scores: list[tuple[dict[str, Any], float]]
) -> dict[str, float]:
    """Return how far each key separates good trials from the others, as a share (PED-ANOVA, arXiv 2304.10255).

    Args:
        axes: values of each key.
        scores: changes and score of each trial.
    """
    study, distributions = (
        optuna.create_study(direction="maximize"),
        {key: _build_distribution(axes[key]) for key in axes},
    )
    for changes, score in scores:
        values = {key: _encode_value(axis, changes[key]) for key, axis in axes.items()}
        study.add_trial(optuna.trial.create_trial(params=values, distributions=distributions, value=score))
    return optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())


def _encode_value(axis: list | Interval, value: Any) -> Any:
    """Return a value as Optuna stores it; rounding may have moved it out of its interval."""
    return json.dumps(value) if isinstance(axis, list) else min(max(value, axis.low), axis.high)


def _open_storage(address: str) -> optuna.storages.RDBStorage:
    """Open a database; one that another search creates at this moment is opened when it is complete."""
    for _ in range(MAX_OPENINGS):
        try:
            return optuna.storages.RDBStorage(address, engine_kwargs=_build_engine_arguments(address))
        except DBAPIError:  # its tables exist in part
            time.sleep(0.5)
    return optuna.storages.RDBStorage(address, engine_kwargs=_build_engine_arguments(address))


def _build_engine_arguments(storage: str) -> dict:
    """Let SQLite wait for other searches instead of failing."""
    return {"connect_args": {"timeout": 60}} if storage.startswith("sqlite") else {}


def _compute_age(trial: FrozenTrial) -> timedelta:
    return datetime.now() - (trial.datetime_start or datetime.now())


def _build_distribution(axis: list | Interval) -> BaseDistribution:
    if isinstance(axis, list):
        return CategoricalDistribution([json.dumps(value) for value in axis])
    return (IntDistribution if axis.has_integers else FloatDistribution)(axis.low, axis.high, log=axis.log)


def _decode_value(axis: list | Interval, value: Any) -> Any:
    return json.loads(value) if isinstance(axis, list) else round_number(value)
