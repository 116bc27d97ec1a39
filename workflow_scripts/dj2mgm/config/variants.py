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
    """

    name: str
    parent: str
    source: str
    changes: dict
    control: Control | None = None


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
    """Return the variant with full fine-tuning."""
    changes = {"lora": None, "deepspeed": settings.deepspeed}
    if parent.finetune.precision in FROZEN:
        changes["precision"] = "bf16"
    if settings.learning_rate:
        changes["learning_rate"] = settings.learning_rate
    return [Variant(f"{settings.experiment}-full", settings.experiment, "lora_vs_full", {"finetune": changes})]


def finetune_minimal(settings: FinetuneMinimalSection, parent: Experiment) -> list[Variant]:
    """Return the variant with a few steps of both stages."""
    steps = settings.model_dump(include={"max_steps", "save_steps"})
    changes = {"pretrain": steps, "finetune": steps}
    return [Variant("finetune_minimal", settings.experiment, "finetune_minimal", changes)]


def controls(name: str, reference: Experiment, source: str, kinds: list[Control]) -> list[Variant]:
    """Return the controls of an experiment.

    Args:
        name: the experiment.
        reference: the merged configuration of the experiment that all others are compared with.
        source: the setting that requests the controls.
        kinds: of controls.
    """
    changes = {"random": _random_rows}
    return [Variant(f"{name}-{kind}", name, source, changes[kind](name, reference), kind) for kind in kinds]


def _random_rows(name: str, reference: Experiment) -> dict:
    """Return the changes for as many rows as an experiment keeps, drawn at random from those of the reference."""
    recipes = {"recipe": reference.recipe, "without": reference.without}
    return recipes | {
        "synthesize": {"recipe": reference.synthesize.recipe},
        "jsonl": {"same_size_as": name},
        "controls": [],
        "description": f"As many rows as {name} keeps, drawn at random.",
    }


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
