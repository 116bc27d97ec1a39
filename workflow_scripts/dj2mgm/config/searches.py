"""Adaptive studies: settings of a search, checks of its space, and the trials that it has asked for so far."""

import json
from hashlib import sha256
from itertools import combinations, count
from pathlib import Path

from dj2mgm.config.recipes import read_recipes
from dj2mgm.config.settings.configuration import Experiment, OwnKeys, StageKeys
from dj2mgm.config.settings.search_records import BatchRecord, SearchSettings, TrialRecord
from dj2mgm.config.settings.study_files import StudyFile
from dj2mgm.config.settings.validation import load_settings
from dj2mgm.config.studies import RECIPE, declared_keys, make_variant, read_axis, study_file
from dj2mgm.config.variants import Variant
from dj2mgm.errors import InputError

# keys that change no score
NOT_SCORED = {"description", "controls", "trackers", "gpus", "nodes", "cpu_threads"}
WHOLE = ("model", "dataset", "seeds", "finetune.lora")  # keys that decide which rule trains, or what is compared
MEASURES = ("evaluate", "score_while_training")  # how scores are measured, so those of trials could not be compared


def search_settings(name: str, study: StudyFile, parent: Experiment, place: str) -> SearchSettings:
    """Return the settings of a study's search.

    Args:
        name: of the study.
        study: its file.
        parent: the merged configuration of `study.experiment`.
        place: folder of runs and pages below results/, with its slash.
    """
    design, file = study.design, study_file(name)
    axes = {key: read_axis(file, key, axis, parent) for key, axis in (design.space or declared_keys(parent)).items()}
    if fixed := next((key for key in axes if key in WHOLE or key.split(".")[0] in MEASURES), None):
        raise InputError(f"{file}: design.space.{fixed}: a search cannot vary it; use the design `list`")
    keys = {*OwnKeys.model_fields, *StageKeys.model_fields} - NOT_SCORED
    scored = [parent.model_dump(include=keys), parent.report.headline, study.proportional, design.sampler, design.seed]
    described = {key: axis if isinstance(axis, list) else axis.model_dump() for key, axis in axes.items()}
    key = sha256(json.dumps([described, scored], sort_keys=True, default=str).encode()).hexdigest()[:8]
    folder = f"results/{place}{name}/search/{key}"
    return SearchSettings(
        name=f"{name}-{key}",
        experiment=study.experiment,
        folder=folder,
        axes=axes,
        storage=design.storage or f"sqlite:///{folder}/search.db",
        **design.model_dump(include={"sampler", "seed"}),
    )


def edge_variants(name: str, study: StudyFile, search: SearchSettings, parent: Experiment) -> list[Variant]:
    """Return variants at the edges of the space, which must be valid: each end of an axis, and pairs of an operator."""
    ends = {key: axis if isinstance(axis, list) else [axis.low, axis.high] for key, axis in search.axes.items()}
    points = [{key: end} for key, values in ends.items() for end in values]
    for one, other in combinations(ends, 2):
        if one.startswith(RECIPE) and one.rpartition(".")[0] == other.rpartition(".")[0]:
            points += [{one: first, other: second} for first in ends[one] for second in ends[other]]
    return [make_variant(name, study, parent, "edge", point) for point in points]


def check_edge(study: str, variant: Variant, merged: Experiment) -> None:
    """Raise InputError unless the recipes of a variant at an edge of the space are valid."""
    try:
        read_recipes(merged)
    except InputError as error:
        point = ", ".join(f"{key} {value}" for key, value in variant.settings.items())
        raise InputError(f"{study_file(study)}: design.space: {point}: {error}") from None


def batch_folder(search: SearchSettings, number: int) -> str:
    """Return the folder of a batch."""
    return f"{search.folder}/batch-{number}"


def is_exhausted(search: SearchSettings, number: int, trainings: int) -> bool:
    """Return whether there was nothing left to ask for in a batch, with at least this budget."""
    record = load_settings(BatchRecord, f"{batch_folder(search, number)}/trials.yaml") if number else None
    return record is not None and not record.trials and record.trainings >= trainings


def read_batch(search: SearchSettings, number: int) -> list[TrialRecord]:
    """Return the trials of a batch; none for batch 0, which is the experiment itself."""
    return load_settings(BatchRecord, f"{batch_folder(search, number)}/trials.yaml").trials if number else []


def known_trials(search: SearchSettings) -> list[TrialRecord]:
    """Return the trials that were asked for so far, in the order of their batches."""
    trials: dict[str, TrialRecord] = {}
    for number in count(1):
        if not Path(batch_folder(search, number), "trials.yaml").is_file():
            return list(trials.values())
        trials |= {trial.name: trial for trial in read_batch(search, number)}
    return []
