"""Trained parts of a model as safetensors files: the projector and the language model.

The projector includes all modules that connect the towers to the language model, such as MGM's patch info mining.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from dj2mgm.errors import InputError
from dj2mgm.storage.files import MAKE_AGAIN, check_plain, read_json, readable

CONNECTOR_PREFIXES = ("projector.", "patch_info_mining.")
# names in transformers' models
CONNECTOR_PREFIXES += ("multi_modal_projector.", "image_newline", "connector.", "merger.", "deepstack_merger_list.")


def find_projector_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the projector's parameters by their names without the prefixes of wrappers and enclosing modules."""
    parameters = {}
    for name, parameter in model.named_parameters():
        for part in CONNECTOR_PREFIXES:
            if (position := f".{name}".find(f".{part}")) >= 0:
                parameters[name[position:]] = parameter
    return parameters


def read_full_shapes(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Size]:
    """Return the parameters' shapes before ZeRO-3 partitions them (`ds_shape`)."""
    return {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}


def load_projector(
    model: nn.Module,
    path: str | Path,
    gathered: Callable[[list[nn.Parameter]], AbstractContextManager] = nullcontext,
) -> None:
    """Load a `projector.safetensors` of stage 1; see `load_parameters`."""
    load_parameters(find_projector_parameters(model), path, gathered)


def load_parameters(
    parameters: dict[str, nn.Parameter],
    path: str | Path,
    gathered: Callable[[list[nn.Parameter]], AbstractContextManager] = nullcontext,
) -> None:
    """Load a safetensors file that a training stage wrote; all tensors must exist and fit.

    `gathered` is the context in which ZeRO-3's partitioned parameters are gathered and may be written.
    """
    with readable(path, SafetensorError):
        weights = load_file(path)
    shapes = read_full_shapes(parameters)
    if set(weights) != set(shapes) or any(weights[name].shape != shapes[name] for name in shapes):
        raise InputError(f"{path} does not fit this model; it was trained with another one, so run its stage again")
    for name, parameter in parameters.items():
        with gathered([parameter]), torch.no_grad():
            parameter.copy_(weights[name])


# Full fine-tuning writes the language model's weights to a second safetensors file.

LANGUAGE_MODEL_FILE = "language_model.safetensors"
PROJECTOR_FILE = "projector.safetensors"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
LANGUAGE_MODEL_PARTS = ("model.language_model.", "model.text_model.", "lm_head.")


def find_language_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the language model's parameters by their names in a model without wrappers; tied parameters occur once."""
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(LANGUAGE_MODEL_PARTS)}


def check_stage(stage: Path) -> None:
    """Check the files of a training stage, which may be untrusted, before a library reads them."""
    adapter = stage / "adapter"
    names = [f"adapter/{name}" for name in ADAPTER_FILES] if adapter.is_dir() else []
    for name in (PROJECTOR_FILE, LANGUAGE_MODEL_FILE, *names):
        if (stage / name).is_symlink() or (stage / name).exists():
            check_plain(stage / name, stage, None)
        elif name in names:
            raise InputError(f"{adapter} is damaged (it has no {Path(name).name}): {MAKE_AGAIN}")
    if names:
        kind = read_json(adapter / ADAPTER_FILES[0]).get("peft_type")
        if kind != "LORA":  # PEFT loads more files, or code, for others
            raise InputError(f"{adapter / ADAPTER_FILES[0]}: peft_type must be LORA, found {kind!r}; {MAKE_AGAIN}")


def load_stage_weights(model: PreTrainedModel, stage: Path) -> PreTrainedModel:
    """Add the weights that a training stage wrote: projector, and merged LoRA adapter or language model."""
    projector, adapter, language_model = (stage / name for name in (PROJECTOR_FILE, "adapter", LANGUAGE_MODEL_FILE))
    check_stage(stage)
    if not projector.is_file() and not adapter.is_dir():
        raise InputError(
            f"{stage} contains no {projector.name}, so it is not the folder of a training stage; name another one"
        )
    if projector.is_file():
        load_projector(model, projector)
    if adapter.is_dir():
        with readable(adapter, SafetensorError, OSError, KeyError):
            return PeftModel.from_pretrained(model, adapter).merge_and_unload()
    if language_model.is_file():
        load_parameters(find_language_parameters(model), language_model)
    return model
