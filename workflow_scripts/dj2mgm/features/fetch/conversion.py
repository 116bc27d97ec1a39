"""Conversion of weights from and to the published MGM code; tensors keep their dtype and bytes, only names change.

Whole checkpoints are converted in both directions, and these parts: projectors of stage 1, OpenCLIP's ConvNeXt, and
transformers folders without safetensors.

There is one table of names for each layout: projector, towers, language model, OpenCLIP's ConvNeXt. Whole checkpoints
in the published layout (https://github.com/dvlab-research/MGM) have the language model's names directly under `model.`,
CLIP under `model.vision_tower.vision_tower`, and OpenCLIP's ConvNeXt under `model.vision_tower_aux`. A conversion is
complete if every tensor gets a new name, none is missing and none is left over. Weights are read and written one file
at a time, so that host memory never holds the whole model.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from transformers import ConvNextConfig, ConvNextModel

from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import (
    CONFIG_FILES,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    WEIGHTS,
    WEIGHTS_INDEX,
    check_model_folder,
    copy_model_files,
    read_shard_names,
)
from dj2mgm.models.mgm.assemble import read_config_and_processor
from dj2mgm.models.mgm.configuration_mgm import MGMConfig
from dj2mgm.models.mgm.modeling_mgm import MGMForConditionalGeneration, MGMProjector, PatchInfoMining
from dj2mgm.models.mgm.processing_mgm import MGMProcessor
from dj2mgm.storage.files import read_json, replace_file, replace_folder, write_bytes, write_json

NamePairs = tuple[tuple[str, str], ...]  # (their template, our template)
PROJECTOR_NAMES: NamePairs = (  # trained in stage 1
    ("model.mm_projector.{rest}", "model.projector.{rest}"),
    ("model.vlm_uni_query_projector.{rest}", "model.patch_info_mining.query.{rest}"),
    ("model.vlm_uni_aux_projector.{rest}", "model.patch_info_mining.key.{rest}"),
    ("model.vlm_uni_val_projector.{rest}", "model.patch_info_mining.value.{rest}"),
)
LANGUAGE_MODEL_NAMES: NamePairs = (
    ("model.embed_tokens.{rest}", "model.language_model.embed_tokens.{rest}"),
    ("model.layers.{rest}", "model.language_model.layers.{rest}"),
    ("model.norm.{rest}", "model.language_model.norm.{rest}"),
    ("lm_head.{rest}", "lm_head.{rest}"),
)
DERIVED = re.compile(r".*\.(rotary_emb\.inv_freq|embeddings\.position_ids)")  # old versions stored computed values
# the frozen towers, which the published code also stores in a file of stage 1
FROZEN_TOWERS = re.compile(r"model\.vision_tower(_aux)?\..*")
# all tensors of an OpenCLIP checkpoint except the ConvNeXt's stem and stages
NOT_CONVNEXT = re.compile(
    r"visual\.trunk\.(head|norm_pre)\..*|visual\.head\..*|(text|transformer|token_embedding|ln_final)\..*"
    r"|positional_embedding|text_projection|logit_scale|logit_bias"
)
CONVNEXT = "model.vision_tower_aux."  # prefix of the `ConvNextModel` in an MGM
LAST_NORM = "layernorm."  # prefix of the last norm of a `ConvNextModel`, which MGM never applies
UNUSED_NORM = re.compile(re.escape(CONVNEXT + LAST_NORM) + ".*")
TRANSFORMERS_WEIGHTS = (WEIGHTS, "pytorch_model.bin")
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
COMPARED_SETTINGS = (
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
MODEL_PREFIX = "model."  # prefix of the names in a whole model; projector.safetensors has no prefix


def build_convnext_pairs(stem: str, stages: str, ours: str = "") -> NamePairs:
    """Return the names of timm's ConvNeXt, as OpenCLIP and MGM store it, and of transformers' `ConvNextModel`.

    The arguments are the prefixes of timm's stem, of timm's stages, and of the `ConvNextModel`.
    """
    block = (f"{stages}.{{stage}}.blocks.{{block}}", f"{ours}encoder.stages.{{stage}}.layers.{{block}}")
    return (
        (f"{stem}.0.{{rest}}", f"{ours}embeddings.patch_embeddings.{{rest}}"),
        (f"{stem}.1.{{rest}}", f"{ours}embeddings.layernorm.{{rest}}"),
        (f"{stages}.{{stage}}.downsample.{{rest}}", f"{ours}encoder.stages.{{stage}}.downsampling_layer.{{rest}}"),
        (f"{block[0]}.gamma", f"{block[1]}.layer_scale_parameter"),
        (f"{block[0]}.conv_dw.{{rest}}", f"{block[1]}.dwconv.{{rest}}"),
        (f"{block[0]}.norm.{{rest}}", f"{block[1]}.layernorm.{{rest}}"),
        (f"{block[0]}.mlp.fc1.{{rest}}", f"{block[1]}.pwconv1.{{rest}}"),
        (f"{block[0]}.mlp.fc2.{{rest}}", f"{block[1]}.pwconv2.{{rest}}"),
    )


TOWER_NAMES: NamePairs = (
    ("model.vision_tower.vision_tower.vision_model.{rest}", "model.vision_tower.{rest}"),
    *build_convnext_pairs(
        "model.vision_tower_aux.vision_stem", "model.vision_tower_aux.vision_stages", "model.vision_tower_aux."
    ),
)
MGM_NAMES: NamePairs = PROJECTOR_NAMES + TOWER_NAMES + LANGUAGE_MODEL_NAMES

OPEN_CLIP_CONVNEXT_NAMES: NamePairs = build_convnext_pairs("visual.trunk.stem", "visual.trunk.stages")

# Tensors without a counterpart.


def make_last_norm(channels: int, dtype: torch.dtype, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the unused norm of a `ConvNextModel` as an identity."""
    name = prefix + LAST_NORM
    return {f"{name}weight": torch.ones(channels, dtype=dtype), f"{name}bias": torch.zeros(channels, dtype=dtype)}


class Shard:
    """File of weights, `.safetensors` or pickled by PyTorch, whose tensors are read one at a time.

    Only tensors and containers of a pickle are loaded, and no code is run.
    """

    shapes: dict[str, torch.Size]
    tensor: Callable[[str], torch.Tensor]

    def __init__(self, path: Path):
        try:
            if path.suffix == ".safetensors":
                file = safe_open(path, framework="pt")
                self.shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}
                self.tensor = file.get_tensor
            else:
                tensors = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
                self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
                # copied because two names of a pickle may share one storage, which safetensors rejects
                self.tensor = lambda name: tensors[name].clone(memory_format=torch.contiguous_format)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read as weights ({error}); download it again") from None
        except Exception:  # torch.load raises many types for damaged files, and advises to turn off its check
            raise InputError(
                f"{path} cannot be read as weights: it is damaged, or contains objects other than tensors, which are "
                "never loaded; download it again, or use its publisher's safetensors"
            ) from None


def open_shards(folder: Path, names: tuple[str, ...] = TRANSFORMERS_WEIGHTS) -> list[Shard]:
    """Return the shards of a checkpoint folder.

    `names` are possible names of the file with all weights. The first existing name is used, whole or in shards.
    """
    for name in names:
        index = folder / f"{name}.index.json"
        if index.is_file():
            files = read_shard_names(index)
            if missing := [file for file in files if not (folder / file).is_file()]:
                raise InputError(f"{index} names {missing[0]}, which is missing; download the folder again")
            return [Shard(folder / file) for file in files]
        if (folder / name).is_file():
            return [Shard(folder / name)]
    raise InputError(
        f"{folder} contains neither {' nor '.join(names)}; name the folder of a downloaded model with its weights"
    )


def write_shards(folder: Path, shards: Iterable[dict[str, torch.Tensor]], count: int) -> None:
    """Write `count` shards one after another, and the index of their tensors."""
    weight_map, total, number = {}, 0, 0
    for tensors in shards:  # enumerate would keep the last shard while the next one is read
        number += 1
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
    write_json(
        folder / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


def rename_shards(shards: list[Shard], names: dict[str, str]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each shard under their new names; leave out tensors that `names` lacks."""
    for shard in shards:
        yield {names[name]: shard.tensor(name) for name in shard.shapes if name in names}


def reverse_pairs(pairs: NamePairs) -> NamePairs:
    return tuple((ours, theirs) for theirs, ours in pairs)


def rename_tensor(name: str, pairs: NamePairs) -> str | None:
    """Return the new name of a tensor; None if no template matches `name`."""
    for source, target in pairs:
        if match := _compile_pattern(source).fullmatch(name):
            return target.format(**match.groupdict())
    return None


def _compile_pattern(template: str) -> re.Pattern:
    pattern = re.escape(template)
    for placeholder, expression in (("stage", r"\d+"), ("block", r"\d+"), ("rest", ".+")):
        pattern = pattern.replace(rf"\{{{placeholder}\}}", f"(?P<{placeholder}>{expression})")
    return re.compile(pattern)


def match_names(source: Path, shards: list[Shard], pairs: NamePairs, left_out: re.Pattern) -> dict[str, str]:
    """Return the new name of every tensor whose name does not match `left_out`."""
    names: dict[str, str] = {}
    for name in (name for shard in shards for name in shard.shapes):
        if left_out.fullmatch(name):
            continue
        new = rename_tensor(name, pairs)
        if new is None:
            raise InputError(
                f"{source}: tensor {name} is unknown to this conversion; name a model of the expected kind"
            )
        if name in names or new in names.values():
            raise InputError(f"{source}: tensor {name} occurs twice; download the folder again")
        names[name] = new
    return names


def check_names(source: Path, names: Collection[str], expected: Collection[str]) -> None:
    """Refuse missing and surplus tensors."""
    if missing := sorted(set(expected) - set(names)):
        raise InputError(f"{source}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if surplus := sorted(set(names) - set(expected)):
        raise InputError(f"{source}: the model does not have {len(surplus)} tensors, the first is {surplus[0]}")


def check_shapes(source: Path, shapes: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    """Check names and shapes of the tensors."""
    check_names(source, shapes, expected)
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise InputError(
                f"{source}: tensor {name} has shape {tuple(shapes[name])}, expected {tuple(shape)}; name the "
                "configuration of the same model"
            )


def convert_from_mgm(source: Path, output: Path, parts: dict) -> int:
    """Convert a published MGM folder to a folder for `from_pretrained`, and return the number of tensors.

    `parts` are the arguments of `read_config_and_processor` (assemble.py). Unknown and missing tensors, other shapes
    and other settings are refused.
    """
    check_model_folder(source)
    config, processor = read_config_and_processor(**parts)
    published = read_json(source / "config.json", remedy="download the folder again")
    _check_settings(source, published, build_published_config(config))
    shards = open_shards(source)
    names = match_names(source, shards, MGM_NAMES, left_out=DERIVED)
    if config.tie_word_embeddings and "lm_head.weight" in names:
        _check_tied(source, shards)
        del names["lm_head.weight"]
    shapes = {names[name]: shape for shard in shards for name, shape in shard.shapes.items() if name in names}
    check_shapes(source, shapes, _compute_published_shapes(config))
    config.architectures = [MGMForConditionalGeneration.__name__]
    config.dtype = _read_tensor(shards, "model.mm_projector.0.bias").dtype
    with replace_folder(output) as folder:
        norm = make_last_norm(config.vision_aux_config.hidden_sizes[-1], config.dtype, CONVNEXT)
        tensors = chain(rename_shards(shards, names), [norm])
        write_shards(folder, tensors, len(shards) + 1)
        config.save_pretrained(folder)
        processor.save_pretrained(folder)
    return len(names)


def convert_to_mgm(source: Path, output: Path) -> int:
    """Convert a folder of this project (assembled, converted or merged) to the published layout; count tensors."""
    check_model_folder(source)
    config = MGMConfig.from_pretrained(source)
    if config.text_config.model_type != "gemma":
        raise InputError(
            f"{source}: the published code has no MGM with the language model {config.text_config.model_type}; only "
            "gemma can be converted"
        )
    shards = open_shards(source)
    names = match_names(source, shards, reverse_pairs(MGM_NAMES), left_out=UNUSED_NORM)
    shapes = {name: shape for shard in shards for name, shape in shard.shapes.items() if name in names}
    check_shapes(source, shapes, _compute_published_shapes(config))
    with replace_folder(output) as folder:
        write_shards(folder, rename_shards(shards, names), len(shards))
        write_json(folder / "config.json", build_published_config(config))
        MGMProcessor.from_pretrained(source).tokenizer.save_pretrained(folder)
    return len(names)


def build_published_config(config: MGMConfig) -> dict:
    """Return the config.json of the published code for an MGM with Gemma."""
    text = config.text_config
    text_keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    text_keys += ("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps")
    text_keys += ("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "attention_bias")
    return {
        "architectures": ["MGMGemmaForCausalLM"],
        "model_type": "mgm_gemma",
        **{key: getattr(text, key, None) for key in text_keys},
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


def _compute_published_shapes(config: MGMConfig) -> dict[str, torch.Size]:
    """Return the shapes of all tensors of a checkpoint by their names in this project."""
    with torch.device("meta"):
        model = MGMForConditionalGeneration(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {name: shape for name, shape in shapes.items() if not UNUSED_NORM.fullmatch(name)}


def _check_settings(source: Path, theirs: dict, ours: dict) -> None:
    for key in COMPARED_SETTINGS:
        if theirs.get(key, ours[key]) != ours[key]:
            raise InputError(
                f"{source / 'config.json'}: {key} is {theirs[key]!r}, expected {ours[key]!r} from the named parts; "
                "only MGM at 336 and 768 pixels without an image grid is supported"
            )


def _check_tied(source: Path, shards: list[Shard]) -> None:
    if not torch.equal(_read_tensor(shards, "lm_head.weight"), _read_tensor(shards, "model.embed_tokens.weight")):
        raise InputError(
            f"{source}: lm_head.weight differs from the embeddings, but the language model shares one weight for both"
        )


def _read_tensor(shards: list[Shard], name: str) -> torch.Tensor:
    return next(shard.tensor(name) for shard in shards if name in shard.shapes)


def convert_projector_from_mgm(source: Path, output: Path) -> int:
    """Convert a published stage 1 (mm_projector.bin) to output/projector.safetensors; return the number of tensors."""
    shard = Shard(source)
    names = match_names(source, [shard], PROJECTOR_NAMES, left_out=FROZEN_TOWERS)
    weights = {new.removeprefix(MODEL_PREFIX): shard.tensor(name) for name, new in names.items()}
    check_names(source, weights, _list_projector_names())
    write_bytes(output / "projector.safetensors", save(weights))
    return len(weights)


def convert_projector_to_mgm(source: Path, output: Path) -> int:
    """Convert a stage's folder to the published code's mm_projector.bin; return the number of tensors."""
    path = source / "projector.safetensors"
    shard = Shard(path)
    check_names(path, shard.shapes, _list_projector_names())
    weights = {
        rename_tensor(f"{MODEL_PREFIX}{name}", reverse_pairs(PROJECTOR_NAMES)): shard.tensor(name)
        for name in shard.shapes
    }
    with replace_file(output, "wb") as file:
        torch.save(weights, file)
    return len(weights)


def convert_openclip_convnext(source: Path, output: Path) -> int:
    """Convert the ConvNeXt of an OpenCLIP folder to a folder for `ConvNextModel`; return the number of tensors."""
    shards = open_shards(source, OPEN_CLIP_WEIGHTS)
    names = match_names(source, shards, OPEN_CLIP_CONVNEXT_NAMES, left_out=NOT_CONVNEXT)
    shapes = {names[name]: shape for shard in shards for name, shape in shard.shapes.items() if name in names}
    config = _build_convnext_config(source, shapes)
    with torch.device("meta"):
        parameters = dict(ConvNextModel(config).named_parameters())
    expected = {name: p.shape for name, p in parameters.items() if not name.startswith(LAST_NORM)}
    check_shapes(source, shapes, expected)
    with replace_folder(output) as folder:
        [tensors] = rename_shards(shards, names)  # OpenCLIP writes one file
        tensors |= make_last_norm(config.hidden_sizes[-1], torch.float32)
        write_shards(folder, [tensors], 1)
        config.save_pretrained(folder)
    return len(names)


def convert_to_safetensors(source: Path, output: Path) -> int:
    """Convert a transformers folder with pickled weights to safetensors; return the number of tensors."""
    check_model_folder(source)
    shards = open_shards(source)
    names = {name: name for shard in shards for name in shard.shapes}
    with replace_folder(output) as folder:
        write_shards(folder, rename_shards(shards, names), len(shards))
        copy_model_files(source, folder, CONFIG_FILES | PROCESSOR_FILES | TOKENIZER_FILES)
    return len(names)


def _list_projector_names() -> set[str]:
    with torch.device("meta"):
        modules = {"projector": MGMProjector(1, 1), "patch_info_mining": PatchInfoMining(1, 1)}
    return {f"{part}.{name}" for part, module in modules.items() for name, _ in module.named_parameters()}


def _build_convnext_config(source: Path, shapes: dict[str, torch.Size]) -> ConvNextConfig:
    """Return the configuration that fits the tensors' depths and widths."""
    widths: dict[int, int] = {}
    depths: dict[int, int] = {}
    for name, shape in shapes.items():
        if match := re.fullmatch(r"encoder\.stages\.(\d+)\.layers\.\d+\.dwconv\.weight", name):
            stage = int(match[1])
            widths[stage], depths[stage] = shape[0], depths.get(stage, 0) + 1
    if sorted(widths) != [0, 1, 2, 3] or "embeddings.patch_embeddings.weight" not in shapes:
        raise InputError(f"{source}: its image tower is not a ConvNeXt with four stages; name another model")
    patch_size = shapes["embeddings.patch_embeddings.weight"][-1]
    config = ConvNextConfig(
        hidden_sizes=[widths[stage] for stage in range(4)],
        depths=[depths[stage] for stage in range(4)],
        patch_size=patch_size,
    )
    config.architectures = [ConvNextModel.__name__]
    return config
