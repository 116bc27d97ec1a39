"""Variants of an experiment: its controls and that of `finetune_minimal`; study_designs.py has those of studies."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.targets import Control, FinetuneMinimalSection


@dataclass(frozen=True)
class Variant:
    """An experiment with changes.

    Attributes:
        name: name of the variant.
        parent: the experiment.
        source: the setting that the variant comes from, for messages.
        changes: layer after the command line.
        control: kind of control; None for other variants.
        compared: experiment and reference whose verdict the page shows in the place of a control; None if the control
            has no verdict.
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
class Side:
    """A side of a comparison: an experiment with its merged configuration."""

    name: str
    settings: Experiment


def finetune_minimal(settings: FinetuneMinimalSection) -> list[Variant]:
    """Return the variant with a few steps of both stages."""
    steps = settings.model_dump(include={"max_steps", "save_steps"})
    changes = {"pretrain": steps, "finetune": steps}
    return [Variant("finetune_minimal", settings.experiment, "finetune_minimal", changes)]


def controls(own_side: Side, reference: Side, source: str, kinds: list[Control]) -> list[Variant]:
    """Return the controls of an experiment.

    Args:
        own_side: the experiment.
        reference: the experiment that all others are compared with.
        source: the setting that requests the controls.
        kinds: kinds of controls.
    """
    return [variant for kind in kinds for variant in CONTROLS[kind](own_side, reference, source)]


def _random_rows(own_side: Side, reference: Side, source: str) -> list[Variant]:
    """Return the variant with as many rows as the experiment keeps, drawn at random from those of the reference."""
    name, variant, settings = own_side.name, f"{own_side.name}-random", reference.settings
    changes = {
        "recipe": settings.recipe,
        "without": settings.without,
        "arguments": dict.fromkeys(own_side.settings.arguments) | settings.arguments,
        "synthesize": {"recipe": settings.synthesize.recipe},
        "jsonl": {"same_size_as": name},
        "controls": [],
        "description": f"As many rows as {name} keeps, drawn at random.",
    }
    return [Variant(variant, name, source, changes, "random", (name, variant))]


def _half_learning_rate(own_side: Side, reference: Side, source: str) -> list[Variant]:
    """Return both sides at half of their learning rates, because rankings of data may change with it.

    Source: arXiv 2512.24503.
    """
    names = [f"{side.name}-half-learning-rate" for side in (reference, own_side)]
    pair = names[1], names[0]
    return [
        Variant(name, side.name, source, _halve_learning_rates(side), "half_learning_rate", compared)
        for name, side, compared in zip(names, (reference, own_side), (None, pair), strict=True)
    ]


def _halve_learning_rates(side: Side) -> dict:
    pretrain, finetune = side.settings.pretrain, side.settings.finetune
    changes = {"learning_rate": finetune.learning_rate / 2}
    if finetune.projector_learning_rate:
        changes["projector_learning_rate"] = finetune.projector_learning_rate / 2
    return {
        "pretrain": {"learning_rate": pretrain.learning_rate / 2},
        "finetune": changes,
        "controls": [],
        "description": f"{side.name} at half of its learning rates.",
    }


# by kind: a function that returns its variants
CONTROLS = {"random": _random_rows, "half_learning_rate": _half_learning_rate}


def selects_rows(experiment: Experiment, reference: Experiment) -> bool:
    """Return whether an experiment's recipes may keep other rows than the reference's; mappers drop no rows."""
    own_steps, reference_steps = (list(_selecting_steps(side)) for side in (experiment, reference))
    return own_steps != reference_steps


def _selecting_steps(experiment: Experiment) -> Iterator[tuple[str, dict]]:
    for recipe in read_recipes(experiment).values():
        for step in recipe["process"] if recipe else ():
            yield from (item for item in step.items() if not item[0].endswith("_mapper"))
