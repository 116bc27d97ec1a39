"""Variants of experiments: controls, and the one of `finetune_minimal`. Features have more (`VariantSource`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.targets import Control, FinetuneMinimalSection

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
