"""What training keys mean before a model is there: batch sizes, DeepSpeed files, LoRA targets."""

import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from dj2mgm.config.reading import config_file, names_in, read_json_config, suggestion
from dj2mgm.errors import InputError

# The arithmetic of batch sizes: global = micro × accumulation × GPUs, exactly.

FACTORS = ("micro_batch_size", "gradient_accumulation_steps", "gpus")
AUTO = "auto"  # for the memory plan to decide


def solve_batch(where: str, settings: Mapping) -> dict[str, int | str]:
    """`global_batch_size` and its three factors, the one that is left open (None) filled in; in samples a step.

    Where the micro batch is "auto" and the accumulation is open, too, both are "auto": the memory plan chooses.

    Raises:
        InputError: more than one is open, or the sizes do not multiply; with the nearest ones that do.
    """
    sizes = {key: settings[key] for key in ("global_batch_size", *FACTORS)}
    for_the_plan = {"micro_batch_size": AUTO, "gradient_accumulation_steps": AUTO}
    if sizes["micro_batch_size"] == AUTO and sizes["gradient_accumulation_steps"] in (AUTO, None):
        if sizes["global_batch_size"] is None:
            raise InputError(f"{where}: global_batch_size is null while micro_batch_size is auto; set one of them")
        return solve_batch(where, sizes | {"micro_batch_size": 1, "gradient_accumulation_steps": None}) | for_the_plan
    sizes = {key: None if size == AUTO else size for key, size in sizes.items()}
    open_keys = [key for key, size in sizes.items() if size is None]
    if len(open_keys) > 1:
        raise InputError(f"{where}: {' and '.join(open_keys)} are null; set all but one")
    if open_keys == ["global_batch_size"]:
        return sizes | {"global_batch_size": _product(sizes, FACTORS)}
    [key] = open_keys or ["gradient_accumulation_steps"]
    others = [factor for factor in FACTORS if factor != key]
    unit, wanted = _product(sizes, others), sizes["global_batch_size"]
    solved = sizes | {key: wanted // unit}
    if wanted % unit == 0 and (open_keys or solved == sizes):
        return solved
    if wanted % unit == 0:
        remedy = f"set {key}: {solved[key]}"
    else:
        nearest = sorted({max(1, wanted // unit) * unit, (wanted // unit + 1) * unit})
        factors = " × ".join(f"{factor} {sizes[factor]}" for factor in others)
        remedy = f"with {factors}, choose a global_batch_size of {' or '.join(map(str, nearest))}"
    stated = " × ".join(f"{factor} {'?' if sizes[factor] is None else sizes[factor]}" for factor in FACTORS)
    product = "" if open_keys else f" = {_product(sizes, FACTORS)}"
    raise InputError(f"{where}: global_batch_size {wanted} is not {stated}{product}; {remedy}")


def _product(sizes: Mapping[str, int], keys: Iterable[str]) -> int:
    return math.prod(sizes[key] for key in keys)


# The DeepSpeed configurations in config/deepspeed, by name.


def deepspeed_names() -> list[str]:
    return names_in("deepspeed", ".json")


def read_deepspeed(name: str, key: str) -> dict:
    """The content of config/deepspeed/<name>.json.

    Args:
        key: where the name was stated, for the error message.
    """
    path = config_file("deepspeed", f"{name}.json")
    if name not in (known := deepspeed_names()):
        raise InputError(f"{key}: there is no {path}; {suggestion(name, known)}")
    return read_json_config(path)


FLASH_ATTENTION = "flash_attention_2"


def check_flash_attention(config: Mapping) -> None:
    """Raise InputError if a stage needs FlashAttention and its package is not installed here."""
    for stage in ("pretrain", "finetune"):
        settings = config[stage]
        asks = isinstance(settings, Mapping) and settings.get("attn_implementation") == FLASH_ATTENTION
        if asks and find_spec("flash_attn") is None:
            raise InputError(
                f"{stage}.attn_implementation: {FLASH_ATTENTION} needs the package flash-attn, which is not installed; "
                "install it, or set auto, which takes it where it is"
            )


FROZEN = ("fp8", "nf4")  # values of `precision` that are of frozen layers only
FP8_CAPABILITY = (8, 9)  # of a GPU, as CUDA counts: Ada
NF4_BYTES = 0.5 + 1 / 64  # of a weight: its code, and its share of a scale
NF4_SCALES = 64 * 256  # weights of 64 have a scale, and 256 of these have one


def takes_nf4(elements: int) -> bool:
    return elements % NF4_SCALES == 0


def choices_of_whole_weights(stage: str, settings: Mapping, choices: dict[str, dict]) -> dict[str, dict]:
    """Those of the DeepSpeed configurations that leave frozen weights whole; in fewer bits they cannot be divided.

    Raises:
        InputError: none of them does, or the stage freezes no layer of the language model.
    """
    precision = settings["precision"]
    if settings.get("lora", True) is None:
        raise InputError(
            f"{stage}.precision: {precision} is for frozen layers, and lora: null trains them all; "
            f"set {stage}.precision: bf16"
        )
    whole = {name: config for name, config in choices.items() if config["zero_optimization"]["stage"] < 3}
    if not whole:
        raise InputError(
            f"{stage}.precision: {precision} needs whole weights, which {', '.join(choices)} divides; "
            f"set {stage}.deepspeed: zero2"
        )
    return whole


# Which projections LoRA can adapt, known before a model is loaded or even there.

GATED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# by model type, as transformers names it; of another type the stage looks at the model itself (mgm/lora.py)
PROJECTIONS = dict.fromkeys(("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"), GATED)
TRAINED_HERE, TINY = "gemma", "llama"  # what foundation/language_model.py makes, and foundation/tiny_vlms.py of it


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
    if "tiny" in model:
        return TINY
    if "foundation" in model:
        return TRAINED_HERE
    whole = model.get("assembled") or model.get("transformers")
    folder = Path(whole or model["language_model"])
    for file in (folder / "config.json", config_file("architectures", f"{folder.name.lower()}.json")):
        try:
            values = read_json_config(file)
        except InputError:  # what is wrong with a model's own file, the stages say
            continue
        described = values.get("text_config") if whole else values
        return described.get("model_type") if isinstance(described, dict) else None
    return None
