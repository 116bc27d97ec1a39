"""Experiments: the merged configuration of each file in config/experiments, and of variants that a target compares."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from dj2mgm.code import SCRIPTS
from dj2mgm.config.datasets import check_folder
from dj2mgm.config.layers import (
    command_line_layer,
    experiment_file,
    experiment_names,
    merge_experiment,
    merge_shared_settings,
)
from dj2mgm.config.reading import suggestion
from dj2mgm.config.settings.configuration import Experiment
from dj2mgm.config.settings.strings import check_format
from dj2mgm.config.settings.validation import Layer
from dj2mgm.config.variants import VARIANTS_OF, Side, Variant, controls, selects_rows
from dj2mgm.errors import InputError

REFERENCE = "baseline"  # the experiment that all others are compared with


class Experiments:
    """Merged configurations by experiment.

    Attributes:
        shared: the configuration for the keys of several experiments.
        command_line: what --config states, typed.
        files: names of the files in config/experiments, the reference first.
        configs: merged configurations by experiment or variant.
        parents: the experiment of each variant.
        variants: names of the variants by target (config/variants.py), and of the controls by experiment.
        controls: the controls among the variants.
        errors: by experiment or target, the reason why it cannot run.
    """

    def __init__(self, command_line: dict):
        """Read the keys of several experiments.

        Raises:
            InputError: config.yaml or the command line is not valid.
        """
        self._given = command_line
        self.shared = merge_shared_settings(command_line)
        self.command_line = command_line_layer(command_line).values
        self.files = sorted(experiment_names(), key=lambda name: name != REFERENCE)
        self.configs: dict[str, Experiment] = {}
        self.parents: dict[str, str] = {}
        self.variants: dict[str, list[str]] = {}
        self.controls: dict[str, Variant] = {}
        self.errors: dict[str, InputError] = {}
        self.check_known([REFERENCE], "config/experiments")
        self.check_known(self.shared.report.experiments, "report.experiments")
        for key in ("export", "publish", "provenance", *VARIANTS_OF):
            self.check_known([getattr(self.shared, key).experiment], f"{key}.experiment")
        if self.shared.experiment is not None:
            self.check_known([self.shared.experiment], "experiment")
        self._check_place(self.shared.results)
        for folder in self.shared.decontaminate.folders:
            check_folder("decontaminate.folders", folder)

    @property
    def names(self) -> list[str]:
        """Names of the valid files in config/experiments."""
        return sorted(name for name in self.files if name not in self.errors)

    def require(self, *targets: str) -> None:
        """Raise the InputError of an experiment or target that cannot run."""
        for target in targets:
            if target in self.errors:
                raise self.errors[target]

    def attempt(self, target: str, step: Callable[..., None], *arguments: Any) -> bool:
        """Run a step of reading experiments, and return whether it succeeded.

        An InputError is kept in `errors`, and raised if its target is requested. An error of the reference is raised at
        once, since all experiments depend on it.
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

    def read(self, name: str) -> None:
        """Merge the configuration of a file."""
        path = experiment_file(name)
        check_format(f"{path}: an experiment's file", "name", name)
        if name.lower() in reserved_names():
            raise InputError(
                f"{path}: {name} is a rule, or a folder of results, of the workflow; rename the experiment"
            )
        if twin := next((other for other in self.configs if other.lower() == name.lower()), None):
            raise InputError(f"{path}: some file systems cannot tell {name} and {twin} apart; rename one")
        self.configs[name] = merge_experiment(name, self._given)

    def list_variants(self, target: str) -> list[Variant]:
        """Return the variants that a target compares, or the controls of an experiment, with names of their own."""
        if target in VARIANTS_OF:
            settings = getattr(self.shared, target)
            self.require(settings.experiment)
            parent = self.configs[settings.experiment]
            variants = VARIANTS_OF[target](settings, parent)
            kinds = getattr(settings, "controls", []) if selects_rows(parent, self.configs[REFERENCE]) else []
            variants += controls(self._side(settings.experiment), self._side(REFERENCE), f"{target}.controls", kinds)
        else:
            variants = self._list_controls(target)
        for variant in variants:
            if variant.name in self.files:
                file = experiment_file(variant.name)
                raise InputError(f"{file}: {variant.source} uses this name; rename the experiment")
        return variants

    def _list_controls(self, name: str) -> list[Variant]:
        """Return the controls of an experiment. The reference has none, so that the command line may request them."""
        experiment, reference = self.configs[name], self.configs[REFERENCE]
        if name == REFERENCE or not experiment.controls:
            return []
        if "random" in experiment.controls and not selects_rows(experiment, reference):
            raise InputError(
                f"{experiment_file(name)}: controls: random: the recipes drop no other rows than those of {REFERENCE}, "
                f"so a random subset of the same size is {REFERENCE} itself; remove random"
            )
        return controls(self._side(name), self._side(REFERENCE), "controls", experiment.controls)

    def _side(self, name: str) -> Side:
        return Side(name, self.configs[name])

    def read_variant(self, target: str, variant: Variant) -> None:
        """Merge the configuration of a variant."""
        self.variants[target].append(variant.name)
        self.parents[variant.name] = variant.parent
        if variant.control:
            self.controls[variant.name] = variant
        changes = Layer(variant.source, variant.changes)
        self.configs[variant.name] = merge_experiment(variant.parent, self._given, changes)

    def check_known(self, names: list[str], key: str) -> None:
        """Raise InputError unless all names are experiments; the message begins with `key`."""
        for name in names:
            if name not in self.files:
                raise InputError(f"{key}: there is no experiment {name!r}; {suggestion(name, self.files)}")

    def _check_place(self, name: str | None) -> None:
        """Refuse a folder for results that holds other results."""
        if name and name.lower() in {*reserved_names(), *(file.lower() for file in self.files)}:
            raise InputError(f"results: results/{name} is in use by the workflow or an experiment; choose another name")


@cache
def reserved_names() -> frozenset[str]:
    """Return the names of rules and of folders in results/, in lower case."""
    project = SCRIPTS.parent
    texts = [path.read_text(encoding="utf-8") for path in (project / "Snakefile", *(project / "rules").rglob("*.smk"))]
    rules = r'^(?:(?:use )?rule|checkpoint) (?:\w+ as )?(\w+)|^    "(\w+)": \(|results/(\w+)'
    found = [name for text in texts for names in re.findall(rules, text, re.M) for name in names if name]
    return frozenset({"captions", "report", *VARIANTS_OF, *map(str.lower, found)})
