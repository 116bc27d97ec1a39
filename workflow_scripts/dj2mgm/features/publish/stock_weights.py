"""Trained weights in the formats of stock libraries: a complete model of transformers, or an adapter of PEFT.

MGM has no class in transformers. Its complete folder needs this project; the adapter of its language model does not.
"""

import re
import sys
from pathlib import Path

import torch
from peft import PeftConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import ModuleList
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from dj2mgm.errors import InputError
from dj2mgm.features.publish.publish_settings import ADAPTER_FOLDER, STAGE
from dj2mgm.models.trained_weights import ADAPTER_FILES, PROJECTOR_FILE, check_stage, find_projector_parameters
from dj2mgm.models.vision_language import ModelFamily
from dj2mgm.models.vlm.vlm_generator import build_stopping_criteria, list_stop_tokens
from dj2mgm.storage.files import copy_plain, read_json, readable, write_json

LANGUAGE_MODEL_PREFIX = (
    "model.language_model."  # prefix of MGM's language model, which is `model.` in a separate language model
)
CODE_KEYS = ("auto_map", "custom_pipelines")  # keys that name code, which transformers loads for users who trust it
PEFT_PREFIX = "base_model.model."  # PEFT's prefix of names


def write_merged(family: ModelFamily, stage: Path, max_new_tokens: int, folder: Path) -> None:
    """Write a complete model, with the weights of fine-tuning, whose answers have at most `max_new_tokens`."""
    model = family.load_trained_model(stage, dtype="auto")
    family.save_processor(folder)
    if family.has_stock_class:
        model.generation_config = build_generation_settings(family, model, max_new_tokens)
    elif (stage / "adapter").is_dir():
        write_language_model_adapter(stage / "adapter", None, folder / ADAPTER_FOLDER)
    model.save_pretrained(folder)


def write_adapter(family: ModelFamily, stage: Path, base_model: str, max_new_tokens: int, folder: Path) -> None:
    """Write an adapter in PEFT's format for a base model (a hub id); for MGM, an adapter of its language model."""
    check_stage(stage)
    if not family.has_stock_class:
        write_language_model_adapter(stage / "adapter", base_model, folder)
        (folder / STAGE / "adapter").mkdir(parents=True)
        for name in (*(f"adapter/{name}" for name in ADAPTER_FILES), PROJECTOR_FILE):
            copy_plain(stage / name, stage, folder / STAGE / name)
        return
    weights, config = _load_adapter(stage / "adapter")
    with torch.device("meta"):
        shapes = AutoModelForImageTextToText.from_config(family.config, trust_remote_code=False)
    if (stage / PROJECTOR_FILE).is_file():
        modules, connector = find_connector_modules(shapes, load_file(stage / PROJECTOR_FILE))
        config.modules_to_save = modules
        weights |= {f"{PEFT_PREFIX}{name}": tensor for name, tensor in connector.items()}
    _save_adapter(weights, config, base_model, folder)
    family.save_processor(folder)
    if (family.folder / "generation_config.json").is_file():
        shapes.generation_config = GenerationConfig.from_pretrained(family.folder)
    build_generation_settings(family, shapes, max_new_tokens).save_pretrained(folder)


def drop_code(folder: Path) -> None:
    """Remove the names of code from the configurations of a published model.

    An untrusted model folder may name code in a repository of the hub.
    """
    for path in sorted(folder.rglob("*config.json")):
        values = read_json(path)
        if not values.keys().isdisjoint(CODE_KEYS):
            write_json(path, {key: value for key, value in values.items() if key not in CODE_KEYS})


def find_connector_modules(model: PreTrainedModel, projector: dict[str, torch.Tensor]) -> tuple[list[str], dict]:
    """Return the modules that connect towers and language model, and their trained weights by full names.

    `projector` has weights by names inside their parent module (trained_weights.py).
    """
    short_names = {id(parameter): name for name, parameter in find_projector_parameters(model).items()}
    connector, modules = {}, {}
    modules_by_name = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if short := short_names.get(id(parameter)):
            first, *within = short.split(".")
            module = name.removesuffix(short) + first
            if isinstance(modules_by_name.get(module), ModuleList):  # PEFT replaces the modules of a list, not the list
                module += f".{within[0]}"
            if module not in modules_by_name:
                raise InputError(
                    f"publish.weights: {module} is trained, but an adapter of PEFT cannot hold it; choose merged"
                )
            modules[module] = None
            connector[name] = projector[short]
    return list(modules), connector


def write_language_model_adapter(adapter: Path, base_model: str | None, folder: Path) -> None:
    """Write MGM's LoRA under the names of the separate language model."""
    weights, config = _load_adapter(adapter)
    weights = {name.replace(LANGUAGE_MODEL_PREFIX, "model.", 1): tensor for name, tensor in weights.items()}
    projections = re.search(r"\(([^()]*)\)$", config.target_modules)[1]
    config.target_modules = [name.replace("\\", "") for name in projections.split("|")]
    _save_adapter(weights, config, base_model, folder)


def build_generation_settings(family: ModelFamily, model: PreTrainedModel, max_new_tokens: int) -> GenerationConfig:
    """Return the generation settings of the workflow's own answers."""
    encoder = family.make_encoder("", max_length=sys.maxsize)
    return GenerationConfig(
        do_sample=False, **build_stopping_criteria(encoder, list_stop_tokens(model, encoder), max_new_tokens)
    )


def _load_adapter(folder: Path) -> tuple[dict[str, torch.Tensor], PeftConfig]:
    with readable(folder, SafetensorError, OSError):
        return load_file(folder / ADAPTER_FILES[1]), PeftConfig.from_pretrained(folder)


def _save_adapter(weights: dict, config: PeftConfig, base_model: str | None, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config.base_model_name_or_path = base_model
    config.save_pretrained(folder)
    save_file(weights, folder / ADAPTER_FILES[1], metadata={"format": "pt"})
