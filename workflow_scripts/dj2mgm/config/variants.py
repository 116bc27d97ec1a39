"""Variants of an experiment, which a target compares or tries out in a few steps."""

from collections.abc import Iterator
from dataclasses import dataclass

from dj2mgm.config.recipes import read_recipes
from dj2mgm.config.settings.configuration import Experiment
from dj2mgm.config.settings.shared import (
    AblationSection,
    Control,
    FinetuneMinimalSection,
    LoraSweepSection,
    LoraVsFullSection,
)
from dj2mgm.config.training import FROZEN
from dj2mgm.errors import InputError


@dataclass(frozen=True)
class Variant:
    """An experiment with changes.

    Attributes:
        name: of the variant.
        parent: the experiment.
        source: the setting that the variant comes from, for messages.
        changes: layer after the command line.
        control: kind of control; None for other variants.
        compared: of a control, the experiment and its reference whose verdict the page shows at the control's place;
            None for no verdict of its own.
    """

    name: str
    parent: str
    source: str
    changes: dict
    control: Control | None = None
    compared: tuple[str, str] | None = None


@dataclass(frozen=True)
class Side:
    """A side of a comparison: an experiment with its merged configuration."""

    name: str
    settings: Experiment


def ablation(settings: AblationSection, parent: Experiment) -> list[Variant]:
    """Return variants whose recipes lack one operator each.

    Args:
        settings: the target's section of the configuration, as in the functions below.
        parent: the merged configuration of `settings.experiment`.
    """
    name = settings.experiment
    return [
        Variant(
            f"{name}-without-{operator}",
            name,
            "ablation.operators",
            {"without": list(dict.fromkeys([*parent.without, operator]))},
        )
        for operator in settings.operators
    ]


def lora_sweep(settings: LoraSweepSection, parent: Experiment) -> list[Variant]:
    """Return variants with one LoRA rank each.

    alpha / r, the scale of the update (Hu et al. 2021, section 4.1), stays that of the parent.
    """
    name, lora = settings.experiment, parent.finetune.lora
    if lora is None:
        raise InputError(f"lora_sweep.experiment: {name} does not train LoRA (finetune.lora is null); choose another")
    return [
        Variant(
            f"{name}-lora-r{rank}",
            name,
            "lora_sweep.ranks",
            {"finetune": {"lora": {"r": rank, "alpha": max(1, round(lora.alpha * rank / lora.r))}}},
        )
        for rank in settings.ranks
    ]


def lora_vs_full(settings: LoraVsFullSection, parent: Experiment) -> list[Variant]:
    """Return the variants with full fine-tuning, and with LoRA on all linear layers unless the parent has it."""
    changes = {"lora": None, "deepspeed": settings.deepspeed}
    if parent.finetune.precision in FROZEN:
        changes["precision"] = "bf16"
    if settings.learning_rate:
        changes["learning_rate"] = settings.learning_rate
    finetunes = {"full": changes}
    if parent.finetune.lora and parent.finetune.lora.targets != "all":
        finetunes["lora-all"] = {"lora": {"targets": "all"}}
    return [
        Variant(f"{settings.experiment}-{name}", settings.experiment, "lora_vs_full", {"finetune": finetune})
        for name, finetune in finetunes.items()
    ]


def finetune_minimal(settings: FinetuneMinimalSection, parent: Experiment) -> list[Variant]:
    """Return the variant with a few steps of both stages."""
    steps = settings.model_dump(include={"max_steps", "save_steps"})
    changes = {"pretrain": steps, "finetune": steps}
    return [Variant("finetune_minimal", settings.experiment, "finetune_minimal", changes)]


def controls(own: Side, reference: Side, source: str, kinds: list[Control]) -> list[Variant]:
    """Return the controls of an experiment.

    Args:
        own: the experiment.
        reference: the experiment that all others are compared with.
        source: the setting that requests the controls.
        kinds: of controls.
    """
    return [variant for kind in kinds for variant in CONTROLS[kind](own, reference, source)]


def _random_rows(own: Side, reference: Side, source: str) -> list[Variant]:
    """Return the variant with as many rows as the experiment keeps, drawn at random from those of the reference."""
    name, variant, settings = own.name, f"{own.name}-random", reference.settings
    changes = {
        "recipe": settings.recipe,
        "without": settings.without,
        "synthesize": {"recipe": settings.synthesize.recipe},
        "jsonl": {"same_size_as": name},
        "controls": [],
        "description": f"As many rows as {name} keeps, drawn at random.",
    }
    return [Variant(variant, name, source, changes, "random", (name, variant))]


def _half_learning_rate(own: Side, reference: Side, source: str) -> list[Variant]:
    """Return both sides at half of their learning rates, because rankings of data may change with it.

    Source: arXiv 2512.24503.
    """
    names = [f"{side.name}-half-learning-rate" for side in (reference, own)]
    pair = names[1], names[0]
    return [
        Variant(name, side.name, source, _halve_learning_rates(side), "half_learning_rate", compared)
        for name, side, compared in zip(names, (reference, own), (None, pair), strict=True)
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
    own, others = (list(_selecting_steps(one)) for one in (experiment, reference))
    return own != others


def _selecting_steps(experiment: Experiment) -> Iterator[tuple[str, dict]]:
    for recipe in read_recipes(experiment).values():
        for step in recipe["process"] if recipe else ():
            yield from (item for item in step.items() if not item[0].endswith("_mapper"))


# by target, which is also the name of its section
VARIANTS_OF = {
    "ablation": ablation,
    "lora_sweep": lora_sweep,
    "lora_vs_full": lora_vs_full,
    "finetune_minimal": finetune_minimal,
}
