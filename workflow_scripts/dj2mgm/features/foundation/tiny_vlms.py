"""Tiny models of transformers' vision-language classes, made from the embedded default's parts.

Their language model is the trained one (tiny_parts.py), converted to the architecture of the class with the same
results. LLaVA has the trained CLIP tower, the others have random towers of their own kind. All have a new connector
between tower and language model. They show that the workflow runs and what a connector can learn from data, but not the
quality of the real models.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as T
from transformers import AutoTokenizer, CLIPModel, GemmaForCausalLM, PreTrainedModel, ProcessorMixin

from dj2mgm.features.foundation.tiny_parts import END_OF_TURN, GEMMA_IMAGE_TOKEN
from dj2mgm.models.vlm.vlm_family import remove_video_processor

IMAGE_SIDE = 64  # px, image size of every tower, for 4 × 4 visual tokens, the size of the language model's boards
HIDDEN, LAYERS, HEADS = 96, 3, 3  # sizes of the random towers
# config/chat_templates/gemma.yaml with an image before the text
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE\n' }}{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{{ '<end_of_turn>\n' }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MEAN = STD = [0.5, 0.5, 0.5]


def make_tiny_vlm(kind: str, language_model: Path, vision_tower: Path) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Return a tiny model of a kind in `BUILDERS` and its processor, from the folders of the tiny Gemma and CLIP."""
    gemma = GemmaForCausalLM.from_pretrained(language_model, dtype=torch.float32)
    special = {"image_token": GEMMA_IMAGE_TOKEN}
    # SmolVLM's tokens, which the language model's training does not contain
    special |= {"fake_image_token": "<mask>", "global_image_token": "<unk>", "end_of_utterance_token": END_OF_TURN}
    tokenizer = AutoTokenizer.from_pretrained(language_model, extra_special_tokens=special)
    model, processor = BUILDERS[kind](build_text_config(gemma), tokenizer, vision_tower)
    missing, unexpected = model.get_decoder().load_state_dict(convert_language_weights(gemma), strict=False)
    if unexpected or any(not name.endswith("_proj.bias") for name in missing):
        raise ValueError(f"{kind}: {[*missing, *unexpected]} do not fit the language model")
    for name, parameter in model.get_decoder().named_parameters():
        if name in missing:
            torch.nn.init.zeros_(parameter)
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, processor


def build_text_config(gemma: GemmaForCausalLM) -> dict:
    """Return the configuration of a LLaMA or Qwen that, with `convert_language_weights`, computes what Gemma does."""
    config = gemma.config
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    same += ("num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    values = {key: getattr(config, key) for key in same}
    values |= {"hidden_act": config.hidden_act, "rope_parameters": dict(config.rope_parameters)}
    return values | {"rms_norm_eps": config.rms_norm_eps / config.hidden_size, "tie_word_embeddings": True}


def convert_language_weights(gemma: GemmaForCausalLM) -> dict[str, torch.Tensor]:
    """Return Gemma's weights for LLaMA's architecture.

    Gemma multiplies embeddings by √H, and scales norms by 1 + w. Layers read normalized inputs, so without the factor
    √H the model computes the same if the layers' outputs are divided by it.
    """
    factor = 1 / math.sqrt(gemma.config.hidden_size)
    weights = {}
    for name, tensor in gemma.model.state_dict().items():
        if name.endswith("norm.weight"):
            tensor = tensor + 1
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor = tensor * factor
        weights[name] = tensor.clone()
    return weights


def build_llava(text: dict, tokenizer, vision_tower: Path) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Return an untrained LLaVA with the weights of a trained CLIP tower, and its processor."""
    clip = CLIPModel.from_pretrained(vision_tower, dtype=torch.float32).vision_model
    pixels = T.CLIPImageProcessorPil.from_pretrained(vision_tower)
    config = T.LlavaConfig(
        vision_config=clip.config,
        text_config=T.LlamaConfig(**text),
        image_token_index=tokenizer.convert_tokens_to_ids(GEMMA_IMAGE_TOKEN),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=(clip.config.image_size // clip.config.patch_size) ** 2,
        tie_word_embeddings=True,
    )
    model = T.LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(clip.state_dict())
    processor = T.LlavaProcessor(
        image_processor=T.LlavaImageProcessorPil(
            size=pixels.size, crop_size=pixels.crop_size, image_mean=pixels.image_mean, image_std=pixels.image_std
        ),
        tokenizer=tokenizer,
        chat_template=TEMPLATE.replace("IMAGE", GEMMA_IMAGE_TOKEN),
        patch_size=clip.config.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=GEMMA_IMAGE_TOKEN,
    )
    return model, processor


def build_qwen2_5_vl(text: dict, tokenizer, vision_tower: Path) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Return an untrained Qwen2.5-VL, whose processor needs no torchvision; `vision_tower` is not used."""
    half = text["head_dim"] // 2
    rope = text["rope_parameters"] | {"mrope_section": [half // 2, half // 4, half - half // 2 - half // 4]}
    image = tokenizer.convert_tokens_to_ids(GEMMA_IMAGE_TOKEN)
    vision = {"depth": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_heads": HEADS}
    vision |= {"patch_size": 8, "window_size": 32, "fullatt_block_indexes": [LAYERS - 1]}
    config = T.Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision | {"out_hidden_size": text["hidden_size"]},
        image_token_id=image,
        video_token_id=tokenizer.unk_token_id,
        vision_start_token_id=tokenizer.bos_token_id,
        vision_end_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    size = {"shortest_edge": IMAGE_SIDE**2, "longest_edge": IMAGE_SIDE**2}
    pixels = T.Qwen2VLImageProcessorPil(size=size, patch_size=8, merge_size=2, image_mean=MEAN, image_std=STD)
    processor = remove_video_processor(T.Qwen2_5_VLProcessor)(
        image_processor=pixels, tokenizer=tokenizer, chat_template=TEMPLATE.replace("IMAGE", GEMMA_IMAGE_TOKEN)
    )
    return T.Qwen2_5_VLForConditionalGeneration(config), processor


def build_smolvlm(text: dict, tokenizer, vision_tower: Path) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Return an untrained SmolVLM, whose processor needs no num2words; `vision_tower` is not used."""
    vision = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS}
    config = T.SmolVLMConfig(
        vision_config=vision | {"num_attention_heads": HEADS, "image_size": IMAGE_SIDE, "patch_size": 8},
        text_config=T.LlamaConfig(**text),
        image_token_id=tokenizer.convert_tokens_to_ids(GEMMA_IMAGE_TOKEN),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    edges = {"longest_edge": IMAGE_SIDE}
    pixels = T.SmolVLMImageProcessorPil(
        size=edges, max_image_size=edges, do_image_splitting=False, image_mean=MEAN, image_std=STD
    )
    processor = remove_video_processor(T.SmolVLMProcessor)(
        image_processor=pixels,
        tokenizer=tokenizer,
        video_processor=None,
        image_seq_len=(IMAGE_SIDE // 8 // 2) ** 2,
        chat_template=TEMPLATE.replace("IMAGE", GEMMA_IMAGE_TOKEN),
    )
    return T.SmolVLMForConditionalGeneration(config), processor


BUILDERS: dict[str, Callable[..., tuple[PreTrainedModel, ProcessorMixin]]] = {
    "llava": build_llava,
    "qwen2.5-vl": build_qwen2_5_vl,
    "smolvlm": build_smolvlm,
}
