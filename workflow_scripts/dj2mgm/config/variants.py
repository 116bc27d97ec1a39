"""Experiments that no file describes: variants of one experiment that a target compares, or tries in a few steps."""

from dataclasses import dataclass

from dj2mgm.config.training import FROZEN
from dj2mgm.errors import InputError


@dataclass(frozen=True)
class Variant:
    """`parent` with `changes`, which come after the command line; `source` is the key that asks for it."""

    name: str
    parent: str
    source: str
    changes: dict


def ablation(settings: dict, parent: dict) -> list[Variant]:
    """The parent's recipes without one operator at a time.

    Args:
        settings: the target's own key of the configuration, as in the functions below.
        parent: the merged configuration of `settings["experiment"]`.
    """
    name = settings["experiment"]
    return [
        Variant(
            f"{name}-without-{operator}",
            name,
            "ablation.operators",
            {"without": list(dict.fromkeys([*parent["without"], operator]))},
        )
        for operator in settings["operators"]
    ]


def lora_sweep(settings: dict, parent: dict) -> list[Variant]:
    """One LoRA rank each. alpha / r, the scale of the update (Hu et al. 2021, section 4.1), stays the parent's."""
    name, lora = settings["experiment"], parent["finetune"]["lora"]
    if lora is None:
        raise InputError(f"lora_sweep.experiment: {name} does not train LoRA (finetune.lora is null); choose another")
    return [
        Variant(
            f"{name}-lora-r{rank}",
            name,
            "lora_sweep.ranks",
            {"finetune": {"lora": {"r": rank, "alpha": max(1, round(lora["alpha"] * rank / lora["r"]))}}},
        )
        for rank in settings["ranks"]
    ]


def lora_vs_full(settings: dict, parent: dict) -> list[Variant]:
    """The whole language model trained."""
    changes = {"lora": None, "deepspeed": settings["deepspeed"]}
    if parent["finetune"]["precision"] in FROZEN:
        changes["precision"] = "bf16"
    if settings["learning_rate"]:
        changes["learning_rate"] = settings["learning_rate"]
    return [Variant(f"{settings['experiment']}-full", settings["experiment"], "lora_vs_full", {"finetune": changes})]


def finetune_minimal(settings: dict, parent: dict) -> list[Variant]:
    """A few steps of both stages."""
    steps = {key: settings[key] for key in ("max_steps", "save_steps")}
    changes = {"pretrain": steps, "finetune": steps}
    return [Variant("finetune_minimal", settings["experiment"], "finetune_minimal", changes)]


# by target, which is also its key in config/config.yaml
VARIANTS_OF = {
    "ablation": ablation,
    "lora_sweep": lora_sweep,
    "lora_vs_full": lora_vs_full,
    "finetune_minimal": finetune_minimal,
}
