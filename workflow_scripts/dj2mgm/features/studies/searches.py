"""Adaptive studies: settings of a search, checks of its space, and the trials that it has requested so far."""

import json
import random
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import combinations, count
from pathlib import Path
from typing import Any

from dj2mgm.errors import InputError
from dj2mgm.features.studies.axes import Interval, compute_axis_value, list_searchable_axes, read_axis
from dj2mgm.features.studies.changes import RECIPE_PREFIX, with_row_fraction
from dj2mgm.features.studies.designs import SearchDesign
from dj2mgm.features.studies.halving import compute_smallest_budget
from dj2mgm.features.studies.mixtures import MixtureSpace, build_share_axes, compute_shares, list_quantile_keys
from dj2mgm.features.studies.studies_config import StudyFile
from dj2mgm.features.studies.study_records import BatchRecord, SearchSettings, format_run_name
from dj2mgm.settings.configuration import Experiment, ExperimentOnlyKeys, ModelOverridableKeys
from dj2mgm.settings.validation import RENAMED_KEYS, load_settings

# keys that change no score
NOT_SCORED = {"description", "controls", "trackers", "gpus", "nodes", "cpu_threads"}
# keys that decide which rule trains, what is compared, or how long
FIXED_KEYS = ("model", "dataset", "seeds", "finetune.lora", "jsonl.fraction")
BUDGET_KEYS = {"trainings", "gpu_hours", "batch"}  # may change during a search
NOT_IN_KEY = BUDGET_KEYS | {"space", "mixture"}  # the key has the axes instead
CHECKED_POINTS = 25  # random points to check; if 1 in 10 is invalid, they include one with a probability of 93 %
MEASURING_SECTIONS = (
    "evaluate",
    "score_while_training",
)  # decide how scores are measured, so they are the same for all trials


def build_search_settings(file: str, study: StudyFile, parent: Experiment, folder: str) -> SearchSettings:
    """Return the settings of a study's search.

    Args:
        file: path of the study's file, for messages.
        study: its content.
        parent: the merged configuration of `study.experiment`.
        folder: folder of the study's searches.
    """
    design = study.design
    space = design.space or ({} if design.mixture else list_searchable_axes(parent))
    axes = {key: read_axis(file, key, axis, parent) for key, axis in space.items()} | build_share_axes(design.mixture)
    if fixed_key := next((key for key in axes if key in FIXED_KEYS or key.split(".")[0] in MEASURING_SECTIONS), None):
        raise InputError(f"{file}: design.space.{fixed_key}: a search cannot vary it; use the design `list`")
    keys = {*ExperimentOnlyKeys.model_fields, *ModelOverridableKeys.model_fields} - NOT_SCORED
    if (minimum := compute_smallest_budget(design)) > design.trainings + 1e-9:
        raise InputError(
            f"{file}: design.trainings: {design.trainings} is less than the {minimum:g} that one variant costs in "
            "all rungs; raise it"
        )
    scored_settings = [_add_first_names(parent.model_dump(include=keys)), parent.report.headline, study.proportional]
    scored_settings.append(design.model_dump(exclude=NOT_IN_KEY | (set() if design.goals.weights else {"goals"})))
    short_score = parent.report.locate_headline(share_of_rows=min(design.rungs)).key
    if short_score != parent.report.headline and not design.goals.weights:
        scored_settings.append(short_score)  # earlier versions ranked trainings on a share of the rows by the headline
    axis_values = {key: axis if isinstance(axis, list) else axis.model_dump() for key, axis in axes.items()}
    axis_values |= {"mixture": design.mixture.sources} if design.mixture else {}
    key = sha256(json.dumps([axis_values, scored_settings], sort_keys=True, default=str).encode()).hexdigest()[:8]
    return SearchSettings(
        experiment=study.experiment,
        seeds=parent.seeds,
        folder=f"{folder}/{key}",
        axes=axes,
        mixture=design.mixture,
        **design.model_dump(include={"sampler", "seed"}),
    )


def _add_first_names(config: dict) -> dict:
    """Return a configuration with the first names of renamed keys, so that searches of earlier versions continue."""
    first_names = {new: old for old, new in RENAMED_KEYS.items()}
    return config | {"model": {first_names.get(key, key): value for key, value in config["model"].items()}}


def list_checked_changes(search: SearchSettings, design: SearchDesign, parent: Experiment) -> list[dict[str, Any]]:
    """Return changes that must be valid before a search begins.

    They are random points, and the first of them with each end of an axis and with each pair of ends of one operator's
    axes. With rungs, the last one is also checked with a share of the rows.
    """
    shares = build_share_axes(search.mixture)
    axes = {key: axis for key, axis in search.axes.items() if key not in shares}
    points = list(_draw_points(axes, search.mixture))
    points += [points[0] | edge for edge in _list_edges(axes)]
    if (share := min(design.rungs)) < 1:
        points += [with_row_fraction(parent, point, share) for point in points[-1:]]
    return points


def _list_edges(axes: Mapping[str, list | Interval]) -> list[dict[str, Any]]:
    ends = {key: axis if isinstance(axis, list) else [axis.low, axis.high] for key, axis in axes.items()}
    points = [{key: end} for key, values in ends.items() for end in values]
    for key, other_key in combinations(ends, 2):
        if key.startswith(RECIPE_PREFIX) and key.rpartition(".")[0] == other_key.rpartition(".")[0]:
            points += [{key: value, other_key: other_value} for value in ends[key] for other_value in ends[other_key]]
    return points


def _draw_points(axes: Mapping[str, list | Interval], mixture: MixtureSpace | None) -> Iterator[dict[str, Any]]:
    """Yield random points of the space, the same ones at each start."""
    rng = random.Random(0)
    for _ in range(CHECKED_POINTS):
        shares = compute_shares(mixture, {key: rng.random() for key in list_quantile_keys(mixture)})
        yield {key: compute_axis_value(axis, rng.random()) for key, axis in axes.items()} | shares


def locate_batch_folder(search: SearchSettings, number: int) -> str:
    return f"{search.folder}/batch-{number}"


def read_search_batch(search: SearchSettings, number: int) -> BatchRecord:
    """Return the trials of a batch after batch 0, which is the experiment itself."""
    return load_settings(BatchRecord, f"{locate_batch_folder(search, number)}/trials.yaml")


def read_planned_batches(search: SearchSettings) -> Iterator[BatchRecord]:
    """Yield the batches that were planned so far."""
    for number in count(1):
        if not Path(locate_batch_folder(search, number), "trials.yaml").is_file():
            return
        yield read_search_batch(search, number)


def list_full_trials(search: SearchSettings) -> list[str]:
    """Return the trials that are trained on all rows, with the seeds of the experiment."""
    batches = [record for record in read_planned_batches(search) if record.fraction == 1]
    return [trial.name for record in batches for trial in record.trials]


def list_trial_changes(search: SearchSettings, parent: Experiment) -> dict[str, dict[str, Any]]:
    """Return the changes of the trials planned so far, on their shares of the rows, by the name of their experiment."""
    changes = {}
    for record in read_planned_batches(search):
        for trial in record.trials:
            shared = (
                trial.changes if record.fraction == 1 else with_row_fraction(parent, trial.changes, record.fraction)
            )
            changes.setdefault(format_run_name(trial.name, record.fraction), shared)
    return changes
