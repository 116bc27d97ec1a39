"""Building MGM from pretrained parts. Safetensors only; remote code never."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionModel,
    ConvNextModel,
)

from errors import InputError
from mgm.configuration_mgm import MGMConfig
from mgm.modeling_mgm import MGMForConditionalGeneration
from mgm.processing_mgm import MGMProcessor

SAFE = {"trust_remote_code": False, "use_safetensors": True}


def assemble(
    language_model: str, vision_tower: str, vision_tower_aux: str, image_size_aux: int, image_token: str, dtype: str
) -> tuple[MGMForConditionalGeneration, MGMProcessor]:
    """MGM and its processor from three local folders or hub ids.

    Args:
        image_size_aux: side in pixels of the image that the high-resolution tower sees.
        image_token: a token of the language model's tokenizer that no text uses.
        dtype: of the assembled weights, e.g. "bfloat16".
    """
    dtype = getattr(torch, dtype)
    tokenizer = AutoTokenizer.from_pretrained(language_model, trust_remote_code=False)
    image_token_id = tokenizer.convert_tokens_to_ids(image_token)
    if image_token_id in (None, tokenizer.unk_token_id):
        raise InputError(f"image_token {image_token!r} is not in the tokenizer of {language_model}; name one that is")
    language = AutoModelForCausalLM.from_pretrained(language_model, dtype=dtype, **SAFE)
    clip = CLIPVisionModel.from_pretrained(vision_tower, dtype=dtype, **SAFE)
    convnext = ConvNextModel.from_pretrained(vision_tower_aux, dtype=dtype, **SAFE)
    config = MGMConfig(
        text_config=AutoConfig.from_pretrained(language_model, trust_remote_code=False),
        vision_config=clip.config,
        vision_aux_config=convnext.config,
        image_size_aux=image_size_aux,
        image_token_id=image_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.device("meta"):  # no time spent on random weights that are replaced at once
        model = MGMForConditionalGeneration(config).to(dtype)
    model.model.language_model, model.lm_head = language.model, language.lm_head
    model.model.vision_tower, model.model.vision_tower_aux = clip, convnext
    for module in (model.model.projector, model.model.patch_info_mining):
        module.to_empty(device="cpu")
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    model.tie_weights()

    pixels = CLIPImageProcessorPil.from_pretrained(vision_tower)
    pixels.size = {"shortest_edge": image_size_aux}
    pixels.crop_size = {"height": image_size_aux, "width": image_size_aux}
    return model, MGMProcessor(pixels, tokenizer, image_token, config.num_image_tokens)
