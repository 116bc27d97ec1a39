"""Assembly of MGM from pretrained parts, from safetensors only and without remote code."""

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    ConvNextConfig,
    ConvNextModel,
)

from dj2mgm.errors import InputError
from dj2mgm.model_files.missing_models import CONVERT_COMMAND, check_local_model
from dj2mgm.model_files.model_folders import is_folder_path
from dj2mgm.models.mgm.configuration_mgm import MGMConfig
from dj2mgm.models.mgm.modeling_mgm import MGMForConditionalGeneration
from dj2mgm.models.mgm.processing_mgm import MGMProcessor
from dj2mgm.servers.hub import check_library_downloads

SAFE = {"trust_remote_code": False, "use_safetensors": True}


def read_config_and_processor(
    language_model: str, vision_tower: str, vision_tower_aux: str, image_size_aux: int, image_token: str
) -> tuple[MGMConfig, MGMProcessor]:
    """Return MGM's configuration and processor from three local folders or hub ids, without reading weights.

    Args:
        language_model: folder or hub id of a causal language model.
        vision_tower: folder or hub id of a CLIP.
        vision_tower_aux: folder or hub id of a ConvNeXt.
        image_size_aux: side in pixels of the image for the high-resolution tower.
        image_token: a token of the language model's tokenizer that no text uses.
    """
    tokenizer = _load("language_model", language_model, AutoTokenizer)
    image_token_id = tokenizer.convert_tokens_to_ids(image_token)
    if image_token_id in (None, tokenizer.unk_token_id):
        raise InputError(
            f"image_token {image_token!r} is missing in the tokenizer of {language_model}; name a token that it has"
        )
    config = MGMConfig(
        text_config=_load("language_model", language_model, AutoConfig),
        vision_config=_load("vision_tower", vision_tower, CLIPVisionConfig),
        vision_aux_config=_load("vision_tower_aux", vision_tower_aux, ConvNextConfig),
        image_size_aux=image_size_aux,
        image_token_id=image_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    pixels = _load("vision_tower", vision_tower, CLIPImageProcessorPil)
    pixels.size = {"shortest_edge": image_size_aux}
    pixels.crop_size = {"height": image_size_aux, "width": image_size_aux}
    return config, MGMProcessor(pixels, tokenizer, image_token, config.num_image_tokens)


def assemble(
    language_model: str, vision_tower: str, vision_tower_aux: str, image_size_aux: int, image_token: str, dtype: str
) -> tuple[MGMForConditionalGeneration, MGMProcessor]:
    """Build MGM and its processor from three local folders or hub ids, with weights of a type such as "bfloat16".

    The other arguments and errors are the same as in `read_config_and_processor`.
    """
    for key, part in (
        ("language_model", language_model),
        ("vision_tower", vision_tower),
        ("vision_tower_aux", vision_tower_aux),
    ):
        _check_safetensors(key, Path(part))
    dtype = getattr(torch, dtype)
    config, processor = read_config_and_processor(
        language_model, vision_tower, vision_tower_aux, image_size_aux, image_token
    )
    language = _load("language_model", language_model, AutoModelForCausalLM, dtype=dtype, **SAFE)
    with torch.device("meta"):  # saves the time for random weights, which are replaced anyway
        model = MGMForConditionalGeneration(config).to(dtype)
    model.model.language_model, model.lm_head.weight = language.model, language.lm_head.weight
    model.model.vision_tower = _load("vision_tower", vision_tower, CLIPVisionModel, dtype=dtype, **SAFE)
    model.model.vision_tower_aux = _load("vision_tower_aux", vision_tower_aux, ConvNextModel, dtype=dtype, **SAFE)
    for module in (model.model.projector, model.model.patch_info_mining):
        module.to_empty(device="cpu")
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    model.tie_weights()
    return model, processor


def _load(key: str, part: str, loader, **options):
    """Return `loader.from_pretrained(part)`; raise its errors as an `InputError`."""
    if is_folder_path(part) and not Path(part).is_dir():
        raise InputError(f"{key}: the folder {part} is missing; docs/models.md says where to get it")
    check_local_model(part)
    check_library_downloads()
    try:
        return loader.from_pretrained(part, **{"trust_remote_code": False} | options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{key}: {part!r} can be loaded neither as a folder nor from the hub ({reason}); docs/models.md says what "
            "to name here"
        ) from None


def _check_safetensors(key: str, folder: Path) -> None:
    """Raise an InputError with the conversion command if a local folder has weights in another format."""
    if not folder.is_dir() or any(folder.glob("*.safetensors")) and not any(folder.glob("open_clip_*")):
        return
    kind = "convnext" if any(folder.glob("open_clip_*")) else "safetensors"
    raise InputError(
        f"{key}: {folder} contains no transformers model in safetensors; convert its weights: "
        f"{CONVERT_COMMAND} {kind} {folder} <new folder>"
    )
