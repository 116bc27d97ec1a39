"""The studies in config/studies as sources of variants."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dj2mgm.dataset_resolution.experiment_dataset import Dataset, check_shares
from dj2mgm.errors import InputError
from dj2mgm.features.studies.changes import nest_changes, scale_proportional
from dj2mgm.features.studies.designs import SearchDesign
from dj2mgm.features.studies.searches import (
    build_search_settings,
    list_checked_changes,
    list_trial_changes,
    read_planned_batches,
)
from dj2mgm.features.studies.studies_config import STUDIES_FOLDER, StudyFile, list_study_names, read_study_file
from dj2mgm.features.studies.study_records import SearchSettings
from dj2mgm.runs.experiments import REFERENCE, Experiments, VariantSource
from dj2mgm.runs.variants import Variant
from dj2mgm.settings.config_files import locate_config_file, suggest_name
from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.reserved_names import RESERVED_NAMES
from dj2mgm.settings.string_formats import check_format


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
