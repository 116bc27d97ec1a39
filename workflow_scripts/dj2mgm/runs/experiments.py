"""Experiments: the merged configuration of each file in config/experiments, and of variants that a target compares."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from dj2mgm.dataset_resolution.experiment_dataset import name_dataset, require_folder
from dj2mgm.errors import InputError, UnsuitableDatasetError
from dj2mgm.records.search_records import SearchSettings
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.runs.layers import (
    build_command_line_layer,
    list_experiment_names,
    locate_experiment_file,
    merge_experiment,
    merge_shared_settings,
)
from dj2mgm.runs.model_reader import read_model
from dj2mgm.runs.studies.searches import (
    build_search_settings,
    list_check_variants,
    list_trial_variants,
    read_planned_batches,
)
from dj2mgm.runs.studies.study_designs import list_study_names, list_study_variants, locate_study_file, read_study
from dj2mgm.runs.studies.variants import NamedConfig, Variant, can_select_rows, list_controls, make_minimal_variant
from dj2mgm.settings.config_files import suggest_name
from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.reserved_names import RESERVED_NAMES
from dj2mgm.settings.string_formats import check_format
from dj2mgm.settings.study_files import SearchDesign, StudyFile
from dj2mgm.settings.validation import Layer

REFERENCE = "baseline"  # the experiment that all others are compared with
MINIMAL_TARGET = "finetune_minimal"  # target and variant with a few steps


class Experiments:
    """Merged configurations by experiment.

    Attributes:
        shared: the configuration for the keys of several experiments.
        command_line: typed values of --config.
        files: names of the files in config/experiments, the reference first.
        studies: the valid files in config/studies, by name.
        searches: settings of the searches among them, by name.
        configs: merged configurations by experiment or variant.
        variants: the variants, by name.
        variant_names: names of the variants by study or target, and of the controls by experiment.
        errors: reasons why experiments or targets cannot run, by their names.
    """

    def __init__(self, command_line: dict):
        """Read the keys of several experiments.

        Raises:
            InputError: config.yaml or the command line is not valid.
        """
        self._raw_command_line = command_line
        self._read_model = cache(read_model)
        self.shared = merge_shared_settings(command_line)
        self.command_line = build_command_line_layer(command_line).values
        self.files = sorted(list_experiment_names(), key=lambda name: name != REFERENCE)
        self.configs: dict[str, Experiment] = {}
        self.variants: dict[str, Variant] = {}
        self.variant_names: dict[str, list[str]] = {}
        self.studies: dict[str, StudyFile] = {}
        self.searches: dict[str, SearchSettings] = {}
        self.errors: dict[str, InputError] = {}
        self.check_experiments([REFERENCE], "config/experiments")
        self.check_experiments(self.shared.report.experiments, "report.experiments")
        self.check_experiments(self.shared.experiment, "experiment")
        for folder in self.shared.decontaminate.folders:
            require_folder("decontaminate.folders", folder)

    @property
    def names(self) -> list[str]:
        """Names of the valid files in config/experiments."""
        return sorted(name for name in self.files if name not in self.errors)

    @property
    def results_prefix(self) -> str:
        """Folder of pages and studies, below results/, with its slash: dataset and model of the reference."""
        reference = self.configs[REFERENCE]
        return f"{name_dataset(reference.dataset)}/{reference.model.folder_name}/"

    def list_requested(self, default: str) -> list[str]:
        """Return the experiments in the key `experiment`, or a target's default.

        Raises:
            InputError: the default does not exist.
        """
        if not self.shared.experiment:
            self.check_experiments([default], "experiment")
        return self.shared.experiment or [default]

    def get_requested(self, target: str, default: str) -> str:
        """Return the experiment of a target that is about one; raises as `list_requested`, and for several names."""
        names = self.list_requested(default)
        if len(names) > 1:
            raise InputError(f"experiment: `{target}` is about one experiment, found {', '.join(names)}; name one")
        return names[0]

    def require(self, *targets: str) -> None:
        """Raise the InputError of an experiment or target that cannot run."""
        for target in targets:
            if target in self.errors:
                raise self.errors[target]

    def attempt(self, target: str, step: Callable[..., None], *arguments: Any) -> bool:
        """Run a step of reading experiments, and return whether it succeeded.

        An InputError is stored in `errors`, and raised if its target is requested. An error of the reference is raised
        at once, since all experiments depend on it.
        """
        try:
            step(*arguments)
        except InputError as error:
            if target == REFERENCE:
                raise
            self.errors.setdefault(target, error)
            self.configs.pop(target, None)
            return False
        return True

    def add_experiment(self, name: str) -> None:
        """Add the experiment of a file, with its merged configuration."""
        path = locate_experiment_file(name)
        check_format(f"{path}: an experiment's file", "name", name)
        if study := next((study for study in list_study_names() if study.lower() == name.lower()), None):
            raise InputError(f"{locate_study_file(study)}: {name} is an experiment ({path}); rename the study")
        if name.lower() in RESERVED_NAMES:
            raise InputError(f"{path}: {name} is a rule or a folder of results of the workflow; rename the experiment")
        if twin := next((other_name for other_name in self.configs if other_name.lower() == name.lower()), None):
            raise InputError(f"{path}: some file systems cannot tell {name} and {twin} apart; rename one")
        self.configs[name] = self._merge(name)

    def add_study(self, name: str) -> None:
        """Read a study, and check its name and its experiment."""
        file = locate_study_file(name)
        check_format(f"{file}: a study's file", "name", name)
        if name.lower() in RESERVED_NAMES | {REFERENCE}:
            raise InputError(f"{file}: {name} is a rule or a folder of results of the workflow; rename the study")
        study = read_study(name)
        self.check_experiments([study.experiment], f"{file}: experiment")
        self.studies[name] = study

    def list_warnings(self) -> list[str]:
        """Return errors of experiments, and of studies with the name of a rule, which no target would show."""
        names = [*self.files, *(name for name in list_study_names() if name.lower() in RESERVED_NAMES)]
        # otherwise experiments that come with the workflow would warn in every run on photos with captions
        errors = [self.errors[name] for name in names if name in self.errors]
        return list(dict.fromkeys(str(error) for error in errors if not isinstance(error, UnsuitableDatasetError)))

    def list_variants(self, target: str) -> list[Variant]:
        """Return the variants that a target compares, or the controls of an experiment, with names of their own."""
        if study := self.studies.get(target):
            variants = self._list_study_variants(target, study)
        elif target == MINIMAL_TARGET:
            parent = self.list_requested(REFERENCE)[0]
            self.require(parent)
            variants = [make_minimal_variant(parent, self.shared.finetune_minimal)]
        else:
            variants = self._list_controls(target)
        for variant in variants:
            if variant.name in self.files:
                file = locate_experiment_file(variant.name)
                raise InputError(f"{file}: {variant.source} uses this name; rename the experiment")
            if variant.name in self.studies:
                raise InputError(
                    f"{locate_study_file(variant.name)}: {variant.source} uses this name; rename the study"
                )
        names = {variant.name.lower(): variant.name for variant in variants}
        if twin := next((variant.name for variant in variants if names[variant.name.lower()] != variant.name), None):
            source, other_name = variants[0].source, names[twin.lower()]
            raise InputError(f"{source}: some file systems cannot tell {twin} and {other_name} apart; rename one")
        return variants

    def _list_study_variants(self, name: str, study: StudyFile) -> list[Variant]:
        """Return the variants of a study. A variant that changes nothing is left out."""
        self.require(study.experiment)
        parent = self.configs[study.experiment]
        if isinstance(study.design, SearchDesign):
            variants = self._list_trials(name, study, parent)
        else:
            variants = list_study_variants(name, study, parent)
        kinds = study.controls if self.selects_rows(study.experiment) else []
        labels = [variant.name.removeprefix(f"{study.experiment}-") for variant in variants]
        if study.page.reference not in (None, *labels):
            reference = study.page.reference
            raise InputError(
                f"{locate_study_file(name)}: page.reference: no variant is {reference!r}; "
                f"{suggest_name(reference, labels)}"
            )
        if name not in self.searches:
            variants = [variant for variant in variants if self._merge_variant(variant) != parent]
        return variants + list_controls(
            self._get_named_config(study.experiment), self._get_named_config(REFERENCE), locate_study_file(name), kinds
        )

    def _list_trials(self, name: str, study: StudyFile, parent: Experiment) -> list[Variant]:
        """Return the trials that a search has planned so far; before the first ones, check its space."""
        if name not in self.searches:
            self.searches[name] = build_search_settings(name, study, parent, self.results_prefix)
        return list_trial_variants(name, study, list(read_planned_batches(self.searches[name])), parent)

    def list_space_checks(self, name: str) -> Iterator[tuple[Variant, Experiment]]:
        """Yield variants of a search's space with their configurations, before its first batch is planned."""
        search = self.searches.get(name)
        if search is None or next(read_planned_batches(search), None):
            return
        study = self.studies[name]
        for variant in list_check_variants(name, study, search, self.configs[study.experiment]):
            yield variant, self._merge_variant(variant)

    def _merge_variant(self, variant: Variant) -> Experiment:
        return self._merge(variant.parent, Layer(variant.source, variant.changes))

    def _merge(self, name: str, *extra_layers: Layer) -> Experiment:
        return merge_experiment(name, self._raw_command_line, *extra_layers, model_reader=self._read_model)

    def _list_controls(self, name: str) -> list[Variant]:
        """Return the controls of an experiment. The reference has none, even if its file requests them."""
        kinds = self.configs[name].controls
        if name == REFERENCE or not kinds:
            return []
        if "random" in kinds and not self.selects_rows(name):
            compared = self.shared.report.experiments
            is_for_all = "controls" in self._raw_command_line and name in compared
            if not is_for_all or not any(map(self.selects_rows, compared)):
                raise InputError(
                    f"{locate_experiment_file(name)}: controls: random: the recipes drop no other rows than those of "
                    f"{REFERENCE}, so a random subset of the same size is {REFERENCE} itself; remove random"
                )
            kinds = [kind for kind in kinds if kind != "random"]
        return list_controls(self._get_named_config(name), self._get_named_config(REFERENCE), "controls", kinds)

    def selects_rows(self, name: str) -> bool:
        """Return whether an experiment's recipes may keep other rows than the reference's."""
        recipes = (read_recipes(self.configs[experiment]) for experiment in (name, REFERENCE))
        return name in self.configs and can_select_rows(*recipes)

    def _get_named_config(self, name: str) -> NamedConfig:
        return NamedConfig(name, self.configs[name])

    def add_variant(self, target: str, variant: Variant) -> None:
        """Add a variant that a target compares, with its merged configuration."""
        merged = self._merge_variant(variant)
        if self.configs.get(variant.name, merged) != merged:
            other_target = next(name for name, names in self.variant_names.items() if variant.name in names)
            if other_target == target:
                raise InputError(f"{variant.source}: two of its variants are named {variant.name}; change their values")
            other_source = locate_study_file(other_target) if other_target in self.studies else other_target
            raise InputError(
                f"{variant.source}: {other_source} has a variant {variant.name} with other settings; use the design "
                "`list` in one of them, in which you name the variants"
            )
        self.variant_names[target].append(variant.name)
        self.variants[variant.name] = variant
        self.configs[variant.name] = merged

    def check_experiments(self, names: list[str], key: str) -> None:
        """Raise InputError unless all names are experiments; the message begins with `key`."""
        for name in names:
            if name not in self.files:
                raise InputError(f"{key}: there is no experiment {name!r}; {suggest_name(name, self.files)}")


def list_reserved_names() -> frozenset[str]:
    """Return the names of rules, of studies and of folders in results/, in lower case."""
    return RESERVED_NAMES | {name.lower() for name in list_study_names()}
