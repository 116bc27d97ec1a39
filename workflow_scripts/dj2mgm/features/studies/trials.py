"""Trials of a search: the sampler proposes points of the space, and learns from the scores of earlier trials.

A search has no state but its records: for each batch, Optuna's study is rebuilt from the trials and scores of the
earlier batches. So a killed search proposes the same trials again. A trial is identified by a hash of its changes,
which is a part of its run's name.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from dj2mgm.features.studies.axes import (
    Interval,
    build_share_axes,
    compute_quantiles,
    compute_shares,
    hash_changes,
    list_quantile_keys,
    round_number,
)
from dj2mgm.features.studies.halving import SearchHistory, plan_next
from dj2mgm.features.studies.study_records import BatchRecord, SearchSettings, TrialRecord

# Scores from which a sampler chooses points. Optuna's default of 10 leaves little of a budget of a few trainings.
STARTUP_TRIALS = 4
SAMPLERS: dict[str, Callable[..., optuna.samplers.BaseSampler]] = {
    "tpe": partial(optuna.samplers.TPESampler, n_startup_trials=STARTUP_TRIALS),
    "gp": partial(optuna.samplers.GPSampler, n_startup_trials=STARTUP_TRIALS),
    "random": optuna.samplers.RandomSampler,
}
MAX_RETRIES = 50  # attempts to get a trial whose run is new
ScoredTrial = tuple[TrialRecord, float | None]  # None: the training diverged
optuna.logging.set_verbosity(optuna.logging.WARNING)


def ask_for_batch(history: SearchHistory) -> BatchRecord:
    """Return the next batch of a search that is not finished, with its new trials."""
    batch = plan_next(history)
    if batch is None or batch.step != "explore":
        return batch
    tried = [
        (trial, result.scores.get(trial.name)) for record, result in history.explore_batches for trial in record.trials
    ]
    return batch.model_copy(
        update={"trials": propose_trials(history.search, tried, len(history.finished_batches) + 1, len(batch.trials))}
    )


def propose_trials(search: SearchSettings, tried: Sequence[ScoredTrial], batch: int, number: int) -> list[TrialRecord]:
    """Return at most `number` new trials for a batch, fewer if the space has no more points.

    The same arguments give the same trials.
    """
    shares = build_share_axes(search.mixture)
    axes = {key: axis for key, axis in search.axes.items() if key not in shares}
    distributions = _build_distributions(axes)
    distributions |= dict.fromkeys(list_quantile_keys(search.mixture), FloatDistribution(0, 1))
    study = optuna.create_study(direction="maximize")
    for trial, score in tried:
        parameters = _format_parameters(axes, trial.changes) | compute_quantiles(search.mixture, trial.changes)
        _add_trial(study, parameters, distributions, score)
    scores: dict[str, float | None] = {trial.name: score for trial, score in tried}
    proposed: list[TrialRecord] = []
    while len(proposed) < number:
        seed = crc32(f"{search.seed} {batch} {len(proposed)}".encode())
        study.sampler = SAMPLERS[search.sampler](seed=seed)
        for _ in range(MAX_RETRIES):
            new_trial = study.ask(distributions)
            changes = {key: _decode_value(axis, new_trial.params[key]) for key, axis in axes.items()}
            changes |= compute_shares(search.mixture, new_trial.params)
            name = f"{search.experiment}-{hash_changes(changes)}"
            if name not in scores:
                break
            score = scores[name]  # a known point tells the sampler its score again, so that it proposes another one
            study.tell(new_trial, score, TrialState.FAIL if score is None else TrialState.COMPLETE)
        else:
            return proposed
        scores[name] = None
        proposed.append(TrialRecord(name=name, changes=changes))
    return proposed


def find_importances(
    axes: Mapping[str, list | Interval], scores: list[tuple[dict[str, Any], float]]
) -> dict[str, float]:
    """Return how far each key separates good trials from the others, as a share (PED-ANOVA, arXiv 2304.10255).

    Args:
        axes: values of each key.
        scores: changes and score of each trial.
    """
    study, distributions = optuna.create_study(direction="maximize"), _build_distributions(axes)
    for changes, score in scores:
        _add_trial(study, _format_parameters(axes, changes), distributions, score)
    return optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())


def _add_trial(study: optuna.Study, parameters: dict, distributions: dict, score: float | None) -> None:
    state = TrialState.FAIL if score is None else TrialState.COMPLETE
    study.add_trial(optuna.trial.create_trial(params=parameters, distributions=distributions, value=score, state=state))


def _format_parameters(axes: Mapping[str, list | Interval], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as Optuna stores them; rounding may have moved one out of its interval."""
    return {
        key: json.dumps(changes[key]) if isinstance(axis, list) else min(max(changes[key], axis.low), axis.high)
        for key, axis in axes.items()
    }


def _decode_value(axis: list | Interval, value: Any) -> Any:
    return json.loads(value) if isinstance(axis, list) else round_number(value)


def _build_distributions(axes: Mapping[str, list | Interval]) -> dict[str, BaseDistribution]:
    return {key: _build_distribution(axis) for key, axis in axes.items()}


def _build_distribution(axis: list | Interval) -> BaseDistribution:
    if isinstance(axis, list):
        return CategoricalDistribution([json.dumps(value) for value in axis])
    return (IntDistribution if axis.has_integers else FloatDistribution)(axis.low, axis.high, log=axis.log)
