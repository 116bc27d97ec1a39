"""Conversion of whole MGM checkpoints from the published layout and back.

The published layout is that of https://github.com/dvlab-research/MGM: the language model's names directly under
`model.`, CLIP under `model.vision_tower.vision_tower`, OpenCLIP's ConvNeXt under `model.vision_tower_aux`.
"""

from itertools import chain
from pathlib import Path

import torch

from dj2mgm.errors import InputError
from dj2mgm.files import read_json, replace_folder, write_json
from dj2mgm.mgm.assemble import read_config_and_processor
from dj2mgm.mgm.configuration_mgm import MGMConfig
from dj2mgm.mgm.conversion.checkpoint_shards import Shard, open_shards, rename_shards, write_shards
from dj2mgm.mgm.conversion.weight_names import (
    CONVNEXT,
    DERIVED,
    MGM,
    UNUSED_NORM,
    check_shapes,
    make_last_norm,
    match_names,
    reverse,
)
from dj2mgm.mgm.modeling_mgm import MGMForConditionalGeneration
from dj2mgm.mgm.processing_mgm import MGMProcessor
from dj2mgm.model_folders import check_model_folder

COMPARED = (
    "mm_projector_type",
    "mm_vision_select_layer",
    "mm_vision_select_feature",
    "image_size_aux",
    "image_grid",
    "image_global",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
)


def from_mgm(source: Path, output: Path, parts: dict) -> int:
    """Convert a published MGM folder to a folder for `from_pretrained`, and return the number of tensors.

    Args:
        source: The published folder.
        output: The new folder.
        parts: Arguments of `read_config_and_processor` (mgm/assemble.py).

    Raises:
        InputError: A tensor is unknown, missing or has another shape, or a setting differs.
    """
    check_model_folder(source)
    config, processor = read_config_and_processor(**parts)
    published = read_json(source / "config.json", remedy="download the folder again")
    _check_settings(source, published, published_config(config))
    shards = open_shards(source)
    names = match_names(source, shards, MGM, left_out=DERIVED)
    if config.tie_word_embeddings and "lm_head.weight" in names:
        _check_tied(source, shards)
        del names["lm_head.weight"]
    shapes = {names[name]: shape for shard in shards for name, shape in shard.shapes.items() if name in names}
    check_shapes(source, shapes, _published_shapes(config))
    config.architectures = [MGMForConditionalGeneration.__name__]
    config.dtype = _read(shards, "model.mm_projector.0.bias").dtype
    with replace_folder(output) as folder:
        norm = make_last_norm(config.vision_aux_config.hidden_sizes[-1], config.dtype, CONVNEXT)
        tensors = chain(rename_shards(shards, names), [norm])
        write_shards(folder, tensors, len(shards) + 1)
        config.save_pretrained(folder)
        processor.save_pretrained(folder)
    return len(names)


def to_mgm(source: Path, output: Path) -> int:
    """Convert a folder of this project (assembled, converted or merged) to the published layout.

    Returns:
        The number of tensors.

    Raises:
        InputError: The published code does not support the language model, or a tensor is unknown.
    """
    check_model_folder(source)
    config = MGMConfig.from_pretrained(source)
    if config.text_config.model_type != "gemma":
        raise InputError(
            f"{source}: the published code has no MGM with the language model {config.text_config.model_type}; only "
            "gemma can be converted"
        )
    shards = open_shards(source)
    names = match_names(source, shards, reverse(MGM), left_out=UNUSED_NORM)
    shapes = {name: shape for shard in shards for name, shape in shard.shapes.items() if name in names}
    check_shapes(source, shapes, _published_shapes(config))
    with replace_folder(output) as folder:
        write_shards(folder, rename_shards(shards, names), len(shards))
        write_json(folder / "config.json", published_config(config))
        MGMProcessor.from_pretrained(source).tokenizer.save_pretrained(folder)
    return len(names)


def published_config(config: MGMConfig) -> dict:
    """Return the config.json of the published code for an MGM with Gemma."""
    text = config.text_config
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps")
    kept += ("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "attention_bias")
    return {
        "architectures": ["MGMGemmaForCausalLM"],
        "model_type": "mgm_gemma",
        **{key: getattr(text, key, None) for key in kept},
        "rope_theta": text.rope_parameters["rope_theta"],
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": str(config.dtype).removeprefix("torch."),
        "use_cache": True,
        "use_mm_proj": True,
        "mm_projector_type": "mlp2x_gelu",
        # from these folders the published code reads the towers' configurations
        "mm_vision_tower": "model_zoo/OpenAI/clip-vit-large-patch14-336",
        "mm_vision_tower_aux": "model_zoo/OpenAI/openclip-convnext-large-d-320-laion2B-s29B-b131K-ft-soup",
        "mm_hidden_size": config.vision_config.hidden_size,
        "mm_hidden_size_aux": config.aux_channels,
        "mm_vision_select_layer": config.vision_feature_layer,
        "mm_vision_select_feature": "patch",
        "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False,
        "image_aspect_ratio": "pad",
        "image_size_aux": config.image_size_aux,
        "image_grid": 1,
        "image_global": False,
        "optimize_vision_tower": False,
        "optimize_vision_tower_aux": False,
        "tokenizer_model_max_length": 2048,
        "tokenizer_padding_side": "right",
    }


def _published_shapes(config: MGMConfig) -> dict[str, torch.Size]:
    """Return the shapes of all tensors of a checkpoint by their names in this project."""
    with torch.device("meta"):
        model = MGMForConditionalGeneration(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {name: shape for name, shape in shapes.items() if not UNUSED_NORM.fullmatch(name)}


def _check_settings(where: Path, theirs: dict, ours: dict) -> None:
    for key in COMPARED:
        if theirs.get(key, ours[key]) != ours[key]:
            raise InputError(
                f"{where / 'config.json'}: {key} is {theirs[key]!r}, expected {ours[key]!r} from the named parts; only "
                "MGM at 336 and 768 pixels without an image grid is supported"
            )


def _check_tied(where: Path, shards: list[Shard]) -> None:
    if not torch.equal(_read(shards, "lm_head.weight"), _read(shards, "model.embed_tokens.weight")):
        raise InputError(
            f"{where}: lm_head.weight differs from the embeddings, but the language model shares one weight for both"
        )


def _read(shards: list[Shard], name: str) -> torch.Tensor:
    return next(shard.tensor(name) for shard in shards if name in shard.shapes)
