"""Tiny random vision-language models of transformers' classes, with the hub's processors, without downloads."""

import inspect
import json
from pathlib import Path

import torch
import transformers as T
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from dj2mgm.models.vlm.vlm_family import remove_video_processor
from dj2mgm.settings.training_stages import LoraSettings

LORA = LoraSettings(r=4, alpha=8, dropout=0.0, targets=["q_proj", "v_proj"])

CORPUS = [
    "a red circle left of the blue square",
    "What is shown in the picture? user assistant system model",
    "USER: ASSISTANT: User: Assistant: You are a helpful assistant. Yes. No. two green triangles and one dog",
    "How many shapes are there? Which color is it? The first image shows a yellow star; the second one none.\n",
    "Assistant: 3 ASSISTANT: 3 3 3 5 5 5 35 35 35",  # numbers that would become one token each if digits were not split
] * 4
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2}
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {"image_size": 28, "patch_size": 7}

DIGITS = pre_tokenizers.Digits(individual_digits=True)  # the tokenizers of all these families split digits

# Short chat templates with the same output as the hub's templates. LLaVA's writes no end token after an answer.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for c in message['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGES = "{% for c in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>%s' }}{% endfor %}"
TEXTS = "{% for c in message['content'] | selectattr('type', 'equalto', 'text') %}{{ %s }}{% endfor %}"
TEMPLATES = {
    "llava": "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    + IMAGES.replace("%s", "\n")
    + TEXTS.replace("%s", "c['text'] + ' '")
    + "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "llava_onevision": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    + IMAGES.replace("%s", "")
    + TEXTS.replace("%s", "'\n' + c['text']")
    + "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "qwen2_5_vl": SYSTEM + CHATML.replace("IMAGE", QWEN_IMAGE),
    "qwen3_vl": CHATML.replace("IMAGE", QWEN_IMAGE),
    "smolvlm": "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for c in message['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    "internvl": CHATML.replace("IMAGE", "<IMG_CONTEXT>\n"),
    "gemma3": "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{% for c in message['content'] %}{% if c['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% else %}{{ c['text'] | trim }}{% endif %}{% endfor %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
}


def save_tiny_family(family: str, folder: Path) -> None:
    config, image_processor, tokenizer, processor_settings = BUILDERS[family]()
    torch.manual_seed(0)
    model = T.AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():  # otherwise Gemma 3 would ignore images
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    processor_class = getattr(T, T.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES[family])
    no_video = (
        {"video_processor": None} if "video_processor" in inspect.signature(processor_class.__init__).parameters else {}
    )
    processor = remove_video_processor(processor_class)(
        image_processor=image_processor,
        tokenizer=tokenizer,
        chat_template=TEMPLATES.get(family),
        **no_video,
        **processor_settings,
    )
    processor.save_pretrained(folder)


def save_tiny_families(root: Path) -> dict[str, Path]:
    """Save a folder of each family."""
    for family in BUILDERS:
        save_tiny_family(family, root / family)
    return {family: root / family for family in BUILDERS}


def llava():
    first = ["<unk>", "<s>", "</s>"]
    vocab, merges = sentencepiece_like(first, pre_tokenizers.Metaspace())
    image = {"extra_special_tokens": {"image_token": "<image>"}, "pad_token": "<pad>"}
    tokenizer = T.LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True, model_max_length=4096, **image)
    pixels = T.LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    config = T.LlavaConfig(
        vision_config=T.CLIPVisionConfig(**VIT, **SMALL, projection_dim=32),
        text_config=T.LlamaConfig(**TEXT, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    processor_settings = {
        "patch_size": 7,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return config, pixels, tokenizer, processor_settings


def llava_onevision():
    tokenizer = qwen2_tokenizer(["<image>", "<video>"])
    pins = [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]
    pixels = T.LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=pins)
    config = T.LlavaOnevisionConfig(
        vision_config=T.SiglipVisionConfig(**VIT, **SMALL, vision_use_head=False),
        text_config=T.Qwen2Config(**TEXT, vocab_size=len(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pins,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        tie_word_embeddings=True,
    )
    processor_settings = {
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
    }
    return config, pixels, tokenizer, processor_settings


def qwen2_5_vl():
    tokenizer, ids = qwen_vl_tokenizer()
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}
    pixels = T.Qwen2VLImageProcessorPil(size=size, patch_size=14, temporal_patch_size=2, merge_size=2)
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = T.Qwen2_5_VLConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope([2, 3, 3])},
        vision_config=vision | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        **ids,
        tie_word_embeddings=False,
    )
    return config, pixels, tokenizer, {}


def qwen3_vl():
    tokenizer, ids = qwen_vl_tokenizer()
    size = {"shortest_edge": 4 * 32 * 32, "longest_edge": 16 * 32 * 32}
    pixels = T.Qwen2VLImageProcessorPil(size=size, patch_size=16, temporal_patch_size=2, merge_size=2)
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    text = {"head_dim": 16, "vocab_size": len(tokenizer), "rope_parameters": rope([4, 2, 2], mrope_interleaved=True)}
    config = T.Qwen3VLConfig(
        text_config=TEXT | text,
        vision_config=vision | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        **ids,
        tie_word_embeddings=True,
    )
    return config, pixels, tokenizer, {}


def smolvlm():
    vocab, merges = byte_level()
    special = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    special |= {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    ends = {"eos_token": "<end_of_utterance>", "bos_token": "<|im_start|>", "pad_token": "<|im_end|>"}
    tokenizer = T.GPT2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token="<|endoftext|>",
        extra_special_tokens=special,
        model_max_length=4096,
        **ends,
    )
    add_special(tokenizer, [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)])
    byte_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([DIGITS, byte_pieces])
    pixels = T.SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    config = T.SmolVLMConfig(
        vision_config={**VIT, "image_size": 32, "patch_size": 8},
        text_config=T.LlamaConfig(**TEXT, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )
    return config, pixels, tokenizer, {"image_seq_len": 4}


def internvl():
    special = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = qwen2_tokenizer(["<video>"], special | {"video_token": "<video>"})
    pixels = T.GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    config = T.InternVLConfig(
        vision_config=T.InternVLVisionConfig(**VIT, image_size=[28, 28], patch_size=[7, 7]),
        text_config=T.Qwen3Config(**TEXT, head_dim=16, vocab_size=len(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    return config, pixels, tokenizer, {"image_seq_length": 4}


def gemma3():
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = pre_tokenizers.Split("▁", "merged_with_next")
    vocab, merges = sentencepiece_like(first, pieces, normalizers.Replace(" ", "▁"))
    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = T.GemmaTokenizer(
        vocab=vocab, merges=merges, extra_special_tokens=special, add_bos_token=True, model_max_length=4096
    )
    add_special(tokenizer, ["<start_of_turn>", "<end_of_turn>"])
    tokenizer.add_tokens([T.AddedToken("\n" * count, normalized=False) for count in (2, 3)])  # as in the released one
    pixels = T.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    text = {"head_dim": 16, "query_pre_attn_scalar": 16, "vocab_size": len(tokenizer)}
    ids = {
        f"{name.removesuffix('_token')}_token_index": tokenizer.convert_tokens_to_ids(special[name]) for name in special
    }
    config = T.Gemma3Config(
        text_config=T.Gemma3TextConfig(**TEXT, **layers, **text),
        vision_config=T.SiglipVisionConfig(**VIT, **SMALL, vision_use_head=False),
        mm_tokens_per_image=4,
        **ids,
    )
    return config, pixels, tokenizer, {"image_seq_length": 4}


def paligemma():
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = pre_tokenizers.Split("▁", "merged_with_next")
    vocab, merges = sentencepiece_like(first, pieces, normalizers.Replace(" ", "▁"))
    tokenizer = T.GemmaTokenizer(vocab=vocab, merges=merges, add_bos_token=True, model_max_length=4096)
    add_special(tokenizer, ["<image>"])
    pixels = T.SiglipImageProcessorPil(size={"height": 28, "width": 28})
    pixels.image_seq_length = 16
    text = {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0, "sliding_window": 16}
    config = T.PaliGemmaConfig(
        text_config=T.Gemma2Config(**TEXT, **text, vocab_size=len(tokenizer) + 1160),
        vision_config=T.SiglipVisionConfig(**VIT, **SMALL, vision_use_head=False, projection_dim=64),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
    )
    return config, pixels, tokenizer, {}


BUILDERS = {
    builder.__name__: builder
    for builder in (llava, llava_onevision, qwen2_5_vl, qwen3_vl, smolvlm, internvl, gemma3, paligemma)
}


def rope(sections: list[int], **more) -> dict:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections} | more


def qwen_vl_tokenizer():
    tokens = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    tokens |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    tokenizer = qwen2_tokenizer(list(tokens.values()))
    return tokenizer, {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}


def qwen2_tokenizer(special: list[str], extra: dict | None = None):
    vocab, merges = byte_level()
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = T.Qwen2Tokenizer(
        vocab=vocab, merges=merges, extra_special_tokens=extra or {}, model_max_length=4096, **ends
    )
    add_special(tokenizer, ["<|im_start|>", *special])
    return tokenizer


def add_special(tokenizer, tokens: list[str]) -> None:
    vocab = tokenizer.get_vocab()
    new_tokens = [T.AddedToken(token, special=True) for token in tokens if token not in vocab]
    tokenizer.add_tokens(new_tokens, special_tokens=True)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([DIGITS, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return vocabulary(tokenizer)


def sentencepiece_like(first: list[str], pieces, normalizer=None):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, DIGITS])
    if normalizer:
        tokenizer.normalizer = normalizer
    special = [*first, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=special)
    )
    return vocabulary(tokenizer)


def vocabulary(tokenizer: Tokenizer):
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]
