"""Which projections LoRA can adapt, known before a model is loaded or even there."""

from pathlib import Path

from errors import InputError
from settings.layers import CONFIG
from settings.reading import read_json_config

GATED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# by model type, as transformers names it; of another type the stage looks at the model itself (training/lora.py)
PROJECTIONS = dict.fromkeys(("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"), GATED)
TRAINED_HERE = "gemma"  # what foundation/language_model.py makes


def check_lora_targets(config: dict) -> None:
    """
    Raises:
        InputError: the language model has no projection of such a name.
    """
    lora, known = config["finetune"]["lora"], PROJECTIONS.get(_language_model_type(config["model"]))
    if lora and known:
        refuse_unknown_targets(lora["targets"], known)


def refuse_unknown_targets(targets: list[str], known: tuple[str, ...]) -> None:
    for target in targets:
        if target not in known:
            raise InputError(
                f"finetune.lora.targets: the language model has no projection {target!r}; known are {', '.join(known)}"
            )


def _language_model_type(model: dict) -> str | None:
    """None where no file says it."""
    if "foundation" in model:
        return TRAINED_HERE
    folder = Path(model.get("assembled") or model["language_model"])
    for file in (folder / "config.json", CONFIG / "architectures" / f"{folder.name.lower()}.json"):
        try:
            values = read_json_config(file)
        except InputError:  # what is wrong with a model's own file, the stages say
            continue
        described = values.get("text_config") if "assembled" in model else values
        return described.get("model_type") if isinstance(described, dict) else None
    return None
