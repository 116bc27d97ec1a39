"""Experiments: the merged configuration of each file in config/experiments, and of variants that a target compares."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dj2mgm.dataset_resolution.experiment_dataset import Dataset, name_dataset, require_folder
from dj2mgm.errors import InputError, UnsuitableDatasetError
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.runs.layers import (
    build_command_line_layer,
    list_experiment_names,
    locate_experiment_file,
    merge_experiment,
    merge_shared_settings,
    read_model,
)
from dj2mgm.script_modules import import_feature_modules
from dj2mgm.settings.config_files import suggest_name
from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.string_formats import check_format
from dj2mgm.settings.targets import RESERVED_NAMES, Control, FinetuneMinimalSection
from dj2mgm.settings.validation import Layer, refuse_keys

Recipes = Mapping[str, dict | None]  # by stage


@dataclass(frozen=True)
class Variant:
    """An experiment with changes.

    Attributes:
        name: name of the variant.
        parent: the experiment.
        source: the setting that the variant comes from, for messages.
        changes: layer after the command line.
        control: kind of control; None for other variants.
        compared: experiment and reference whose verdict the page shows instead of a control; None if the control has no
            verdict.
        settings: changes of a study's variant by dotted key, for its page.
    """

    name: str
    parent: str
    source: str
    changes: dict
    control: Control | None = None
    compared: tuple[str, str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NamedConfig:
    """Name and merged configuration of an experiment."""

    name: str
    config: Experiment


def make_minimal_variant(parent: str, settings: FinetuneMinimalSection) -> Variant:
    """Return the variant of an experiment with a few steps of both stages."""
    steps = settings.model_dump(include={"max_steps", "save_steps"})
    changes = {"pretrain": steps, "finetune": steps}
    return Variant("finetune_minimal", parent, "finetune_minimal", changes)


def list_controls(experiment: NamedConfig, reference: NamedConfig, source: str, kinds: list[Control]) -> list[Variant]:
    """Return the controls of an experiment.

    Args:
        experiment: the experiment that the controls change.
        reference: the experiment that all others are compared with.
        source: the setting that requests the controls.
        kinds: kinds of controls.
    """
    return [variant for kind in kinds for variant in CONTROLS[kind](experiment, reference, source)]


def _make_random_rows(experiment: NamedConfig, reference: NamedConfig, source: str) -> list[Variant]:
    """Return the variant with as many rows as the experiment keeps, drawn at random from the reference's rows."""
    name, variant, config = experiment.name, f"{experiment.name}-random", reference.config
    changes = {
        "recipe": config.recipe,
        "without": config.without,
        "arguments": dict.fromkeys(experiment.config.arguments) | config.arguments,
        "synthesize": {"recipe": config.synthesize.recipe},
        "jsonl": {"same_size_as": name},
        "controls": [],
        "description": f"As many rows as {name} keeps, drawn at random.",
    }
    return [Variant(variant, name, source, changes, "random", (name, variant))]


def _make_half_learning_rate(experiment: NamedConfig, reference: NamedConfig, source: str) -> list[Variant]:
    """Return both experiments at half of their learning rates, because rankings of data may change with it.

    Source: arXiv 2512.24503.
    """
    names = [f"{named_config.name}-half-learning-rate" for named_config in (reference, experiment)]
    pair = names[1], names[0]
    return [
        Variant(name, named_config.name, source, _halve_learning_rates(named_config), "half_learning_rate", compared)
        for name, named_config, compared in zip(names, (reference, experiment), (None, pair), strict=True)
    ]


def _halve_learning_rates(named_config: NamedConfig) -> dict:
    pretrain, finetune = named_config.config.pretrain, named_config.config.finetune
    changes = {"learning_rate": finetune.learning_rate / 2}
    if finetune.projector_learning_rate:
        changes["projector_learning_rate"] = finetune.projector_learning_rate / 2
    return {
        "pretrain": {"learning_rate": pretrain.learning_rate / 2},
        "finetune": changes,
        "controls": [],
        "description": f"{named_config.name} at half of its learning rates.",
    }


# by kind: a function that returns its variants
CONTROLS = {"random": _make_random_rows, "half_learning_rate": _make_half_learning_rate}


def can_select_rows(recipes: Recipes, reference_recipes: Recipes) -> bool:
    """Return whether an experiment's recipes may keep other rows than the reference's; mappers drop no rows."""
    return list(_list_selecting_steps(recipes)) != list(_list_selecting_steps(reference_recipes))


def _list_selecting_steps(recipes: Recipes) -> Iterator[tuple[str, dict]]:
    for recipe in recipes.values():
        for step in recipe["process"] if recipe else ():
            yield from (item for item in step.items() if not item[0].endswith("_mapper"))


REFERENCE = "baseline"  # the experiment that all others are compared with
MINIMAL_TARGET = "finetune_minimal"  # target and variant with a few steps


class VariantSource:
    """A target that compares variants of an experiment, such as a study; features have subclasses.

    Attributes:
        name: name of the target.
        file: its file, for messages.
        experiment: the experiment that the variants change; known after `read`.
    """

    experiment: str

    def __init__(self, name: str, file: str):
        self.name, self.file = name, file

    def read(self, experiments: "Experiments") -> None:
        """Read the file; raise InputError if it is not valid."""
        raise NotImplementedError

    def list_variants(self, experiments: "Experiments") -> list[Variant]:
        """Return the variants that are planned so far."""
        raise NotImplementedError

    @property
    def late_names(self) -> str:
        """Regular expression of the names of variants that are planned while the target runs; empty: there are none."""
        return ""

    def list_late_checks(self, experiments: "Experiments") -> Iterable[tuple[Variant, Experiment]]:
        """Return further variants, and their configurations, that must be valid before the target's first job."""
        return ()

    def check_dataset(self, dataset: Dataset, config: Experiment) -> None:
        """Raise InputError if the variants do not suit the dataset or the configuration of the experiment."""


def find_variant_sources() -> list[VariantSource]:
    """Return the sources of variants that features add by a function `list_sources` (`import_feature_modules`)."""
    return [source for module in import_feature_modules("variants") for source in module.list_sources()]


class Experiments:
    """Merged configurations by experiment.

    Attributes:
        shared: the configuration for the keys of several experiments.
        command_line: typed values of --config.
        files: names of the files in config/experiments, the reference first.
        sources: sources of variants, by name.
        configs: merged configurations by experiment or variant.
        variants: the variants, by name.
        variant_names: names of the variants by study or target, and of the controls by experiment.
        errors: reasons why experiments or targets cannot run, by their names.
    """

    def __init__(self, command_line: dict, sources: Iterable[VariantSource] = ()):
        """Read the keys of several experiments.

        Raises:
            InputError: config.yaml or the command line is not valid.
        """
        self._raw_command_line = command_line
        self._read_model = cache(read_model)
        self.sources = {source.name: source for source in sources}
        layer = build_command_line_layer(command_line)
        for source in self.sources.values():
            refuse_keys(layer, [source.name], f"is a target; change its file, {source.file}, or copy it")
        self.command_line = layer.values
        self.shared = merge_shared_settings(command_line)
        self.files = sorted(list_experiment_names(), key=lambda name: name != REFERENCE)
        self.configs: dict[str, Experiment] = {}
        self.variants: dict[str, Variant] = {}
        self.variant_names: dict[str, list[str]] = {}
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
        if name.lower() in RESERVED_NAMES:
            raise InputError(f"{path}: {name} is a rule or a folder of results of the workflow; rename the experiment")
        if source := next((source for key, source in self.sources.items() if key.lower() == name.lower()), None):
            raise InputError(f"{source.file}: {name} is an experiment ({path}); rename this file")
        if twin := next((other_name for other_name in self.configs if other_name.lower() == name.lower()), None):
            raise InputError(f"{path}: some file systems cannot tell {name} and {twin} apart; rename one")
        self.configs[name] = self._merge(name)

    def list_warnings(self, requested: Collection[str] = ()) -> list[str]:
        """Return errors of experiments, and of sources with the name of a rule, which no requested target shows."""
        names = [*self.files, *(name for name in self.sources if name.lower() in RESERVED_NAMES)]
        names = [name for name in names if name not in requested]
        # otherwise experiments that come with the workflow would warn in every run on photos with captions
        errors = [self.errors[name] for name in names if name in self.errors]
        return list(dict.fromkeys(str(error) for error in errors if not isinstance(error, UnsuitableDatasetError)))

    def list_variants(self, target: str) -> list[Variant]:
        """Return the variants that a target compares, or the controls of an experiment, with names of their own."""
        if source := self.sources.get(target):
            variants = source.list_variants(self)
        elif target == MINIMAL_TARGET:
            parent = self.list_requested(REFERENCE)[0]
            self.require(parent)
            variants = [make_minimal_variant(parent, self.shared.finetune_minimal)]
        else:
            variants = self._list_own_controls(target)
        for variant in variants:
            if variant.name in self.files:
                file = locate_experiment_file(variant.name)
                raise InputError(f"{file}: {variant.source} uses this name; rename the experiment")
            if variant.name in self.sources:
                file = self.sources[variant.name].file
                raise InputError(f"{file}: {variant.source} uses this name; rename this file")
        names = {variant.name.lower(): variant.name for variant in variants}
        if twin := next((variant.name for variant in variants if names[variant.name.lower()] != variant.name), None):
            source, other_name = variants[0].source, names[twin.lower()]
            raise InputError(f"{source}: some file systems cannot tell {twin} and {other_name} apart; rename one")
        return variants

    def merge_variant(self, variant: Variant) -> Experiment:
        """Return the configuration of a variant."""
        return self._merge(variant.parent, Layer(variant.source, variant.changes))

    def _merge(self, name: str, *extra_layers: Layer) -> Experiment:
        return merge_experiment(name, self._raw_command_line, *extra_layers, model_reader=self._read_model)

    def _list_own_controls(self, name: str) -> list[Variant]:
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
        return self.list_controls(name, "controls", kinds)

    def list_controls(self, name: str, source: str, kinds: list[Control]) -> list[Variant]:
        """Return the controls of an experiment of these kinds; `source` is the setting that requests them."""
        sides = (NamedConfig(side, self.configs[side]) for side in (name, REFERENCE))
        return list_controls(*sides, source, kinds)

    def selects_rows(self, name: str) -> bool:
        """Return whether an experiment's recipes may keep other rows than the reference's."""
        recipes = (read_recipes(self.configs[experiment]) for experiment in (name, REFERENCE))
        return name in self.configs and can_select_rows(*recipes)

    def add_variant(self, target: str, variant: Variant) -> None:
        """Add a variant that a target compares, with its merged configuration."""
        merged = self.merge_variant(variant)
        if self.configs.get(variant.name, merged) != merged:
            other_target = next(name for name, names in self.variant_names.items() if variant.name in names)
            if other_target == target:
                raise InputError(f"{variant.source}: two of its variants are named {variant.name}; change their values")
            other_source = self.sources[other_target].file if other_target in self.sources else other_target
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
