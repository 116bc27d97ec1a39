"""The studies in config/studies as sources of variants."""

import re
from collections.abc import Iterator

from dj2mgm.dataset_resolution.experiment_dataset import Dataset, check_mixture
from dj2mgm.errors import InputError
from dj2mgm.records.search_records import SearchSettings
from dj2mgm.runs.experiments import REFERENCE, Experiments, VariantSource
from dj2mgm.runs.studies.searches import (
    build_search_settings,
    list_check_variants,
    list_trial_variants,
    read_planned_batches,
)
from dj2mgm.runs.studies.study_designs import list_study_names, list_study_variants, locate_study_file, read_study
from dj2mgm.runs.variants import Variant
from dj2mgm.settings.config_files import suggest_name
from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.reserved_names import RESERVED_NAMES
from dj2mgm.settings.string_formats import check_format
from dj2mgm.settings.study_files import SearchDesign, StudyFile


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
        content = read_study(self.name)
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
                self.search = build_search_settings(self.name, study, parent, experiments.results_prefix)
            variants = list_trial_variants(self.name, study, list(read_planned_batches(self.search)), parent)
        else:
            variants = list_study_variants(self.name, study, parent)
        labels, reference = [self.get_label(variant.name) for variant in variants], study.page.reference
        if reference not in (None, *labels):
            raise InputError(
                f"{self.file}: page.reference: no variant is {reference!r}; {suggest_name(reference, labels)}"
            )
        if self.search is None:
            variants = [variant for variant in variants if experiments.merge_variant(variant) != parent]
        kinds = study.controls if experiments.selects_rows(self.experiment) else []
        return variants + experiments.list_controls(self.experiment, self.file, kinds)

    def get_label(self, variant: str) -> str:
        """Return the name of a variant without its experiment's."""
        return variant.removeprefix(f"{self.experiment}-")

    @property
    def late_names(self) -> str:
        """Regular expression of the names of trials."""
        return f"{re.escape(self.experiment)}-[0-9a-f]{{10}}(-0\\.[0-9]+)?" if self.search else ""

    def list_late_checks(self, experiments: Experiments) -> Iterator[tuple[Variant, Experiment]]:
        """Yield variants of a search's space, before its first batch is planned."""
        if self.search is None or next(read_planned_batches(self.search), None):
            return
        parent = experiments.configs[self.experiment]
        for variant in list_check_variants(self.name, self.content, self.search, parent):
            yield variant, experiments.merge_variant(variant)

    def check_dataset(self, dataset: Dataset, config: Experiment) -> None:
        if mixture := getattr(self.content.design, "mixture", None):
            check_mixture(self.file, dataset, mixture, config)


def list_sources() -> list[Study]:
    """Return the studies; each is a target of `snakemake`."""
    return [Study(name, locate_study_file(name)) for name in list_study_names()]
