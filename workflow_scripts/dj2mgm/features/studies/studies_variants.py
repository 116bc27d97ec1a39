"""Studies in config/studies as sources of variants.

A search is an adaptive study: its settings, the checks of its space, and the trials that it has requested so far.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import combinations, count
from pathlib import Path
from typing import Any

from dj2mgm.dataset_resolution.experiment_dataset import Dataset, check_shares
from dj2mgm.errors import InputError
from dj2mgm.features.studies.axes import (
    RECIPE_PREFIX,
    Interval,
    MixtureSpace,
    build_share_axes,
    compute_axis_value,
    compute_shares,
    list_quantile_keys,
    list_searchable_axes,
    nest_changes,
    read_axis,
    scale_proportional,
    with_row_fraction,
)
from dj2mgm.features.studies.designs import SearchDesign
from dj2mgm.features.studies.halving import compute_smallest_budget
from dj2mgm.features.studies.study_records import (
    STUDIES_FOLDER,
    BatchRecord,
    SearchSettings,
    StudyFile,
    format_run_name,
    list_study_names,
    read_study_file,
)
from dj2mgm.runs.experiments import REFERENCE, Experiments, Variant, VariantSource
from dj2mgm.settings.config_files import locate_config_file, suggest_name
from dj2mgm.settings.configuration import Experiment, ExperimentOnlyKeys, ModelOverridableKeys
from dj2mgm.settings.string_formats import check_format
from dj2mgm.settings.targets import RESERVED_NAMES
from dj2mgm.settings.validation import RENAMED_KEYS, load_settings

# JSON schemas of files in config/, by name
SCHEMAS = {"study": [StudyFile]}
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


class Study(VariantSource):
    """A file in config/studies.

    Attributes:
        content: the valid file; known after `read`.
        search: settings of its search; None for another design, and before its variants are listed.
    """

    content: StudyFile
    search: SearchSettings | None = None

    def read(self, experiments: Experiments) -> None:
        """Read the study, and check its name and its experiment."""
        check_format(f"{self.file}: a study's file", "name", self.name)
        if self.name.lower() in RESERVED_NAMES | {REFERENCE}:
            raise InputError(
                f"{self.file}: {self.name} is a rule or a folder of results of the workflow; rename the study"
            )
        content = read_study_file(Path(self.file))
        experiments.check_experiments([content.experiment], f"{self.file}: experiment")
        self.content, self.experiment = content, content.experiment

    def list_variants(self, experiments: Experiments) -> list[Variant]:
        """Return the variants of the design, or the trials planned so far. A variant that changes nothing is left out.

        Before the first trials, the space of the search is checked.
        """
        experiments.require(self.experiment)
        parent, study = experiments.configs[self.experiment], self.content
        if isinstance(study.design, SearchDesign):
            if self.search is None:
                folder = f"results/{experiments.results_prefix}{self.name}/search"
                self.search = build_search_settings(self.file, study, parent, folder)
            trials = list_trial_changes(self.search, parent)
            variants = [self.make_variant(parent, name, changes) for name, changes in trials.items()]
        else:
            labeled = study.design.list_changes(self.file, parent)
            variants = [self.make_variant(parent, self.name_variant(label), changes) for label, changes in labeled]
        labels = [variant.name.removeprefix(self.name_variant("")) for variant in variants]
        reference = study.page.reference
        if reference not in (None, *labels):
            raise InputError(
                f"{self.file}: page.reference: no variant is {reference!r}; {suggest_name(reference, labels)}"
            )
        if self.search is None:
            variants = [variant for variant in variants if experiments.merge_variant(variant) != parent]
        kinds = study.controls if experiments.selects_rows(self.experiment) else []
        return variants + experiments.list_controls(self.experiment, self.file, kinds)

    def name_variant(self, label: str) -> str:
        """Return the name of the variant with a label."""
        return f"{self.experiment}-{label}"

    def make_variant(self, parent: Experiment, name: str, changes: dict[str, Any]) -> Variant:
        """Return a variant with these changes, by dotted key, and with the keys that are proportional to them."""
        changes = changes | scale_proportional(self.content.proportional, changes, parent, self.file)
        layer = nest_changes(self.file, changes, parent)
        return Variant(name, self.experiment, self.file, layer, settings=changes)

    @property
    def late_names(self) -> str:
        """Regular expression of the names of trials."""
        return f"{re.escape(self.experiment)}-[0-9a-f]{{10}}(-0\\.[0-9]+)?" if self.search else ""

    def list_late_checks(self, experiments: Experiments) -> Iterator[tuple[Variant, Experiment]]:
        """Yield variants of a search's space, before its first batch is planned."""
        if self.search is None or next(read_planned_batches(self.search), None):
            return
        parent = experiments.configs[self.experiment]
        name, points = self.name_variant("check"), list_checked_changes(self.search, self.content.design, parent)
        for variant in [self.make_variant(parent, name, changes) for changes in points]:
            yield variant, experiments.merge_variant(variant)

    def check_dataset(self, dataset: Dataset, config: Experiment) -> None:
        """Check the sources whose shares vary, together with the shares and amounts of the experiment.

        Raises:
            InputError: the dataset has no such source, the sources are of several splits, one has an amount, or the
                shares exceed 1.
        """
        mixture = getattr(self.content.design, "mixture", None)
        if not mixture:
            return
        fixed = {name: share for name, share in config.shares.items() if name not in mixture.sources}
        varied = dict.fromkeys(mixture.sources, mixture.total / len(mixture.sources))
        try:
            check_shares(dataset, fixed | varied, config.sources)
        except InputError as error:
            raise InputError(f"{self.file}: design.mixture: {error}") from None
        splits = {name: dataset.settings.sources[name].split for name in mixture.sources}
        if len({*splits.values()}) > 1:
            source_splits = ", ".join(f"{name}: {split}" for name, split in splits.items())
            raise InputError(
                f"{self.file}: design.mixture.sources: expected sources of one split, found {source_splits}"
            )


def list_sources() -> list[Study]:
    """Return the studies; each is a target of `snakemake`."""
    return [Study(name, str(locate_config_file(STUDIES_FOLDER, f"{name}.yaml"))) for name in list_study_names()]
