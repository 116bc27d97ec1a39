"""Conversion of parts: projectors of stage 1, OpenCLIP's ConvNeXt, and transformers folders without safetensors."""

import re
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import ConvNextConfig, ConvNextModel

from dj2mgm.errors import InputError
from dj2mgm.files import replace_file, replace_folder
from dj2mgm.mgm.conversion.checkpoint_shards import OPEN_CLIP, Shard, open_shards, rename_shards, write_shards
from dj2mgm.mgm.conversion.weight_names import (
    FROZEN_TOWERS,
    LAST_NORM,
    NOT_CONVNEXT,
    OPEN_CLIP_CONVNEXT,
    PROJECTOR,
    check_names,
    check_shapes,
    make_last_norm,
    match_names,
    rename,
    reverse,
)
from dj2mgm.mgm.modeling_mgm import MGMProjector, PatchInfoMining
from dj2mgm.model_folders import CONFIGS, PROCESSOR, TOKENIZER, check_model_folder, copy_model_files

MODEL = "model."  # prefix of the names in a whole model; projector.safetensors has no prefix


def projector_from_mgm(source: Path, output: Path) -> int:
    """Convert a published stage 1 (mm_projector.bin) to output/projector.safetensors; return the number of tensors."""
    shard = Shard(source)
    names = match_names(source, [shard], PROJECTOR, left_out=FROZEN_TOWERS)
    weights = {new.removeprefix(MODEL): shard.tensor(name) for name, new in names.items()}
    check_names(source, weights, _projector_names())
    with replace_file(output / "projector.safetensors", "wb") as file:
        file.write(save(weights))
    return len(weights)


def projector_to_mgm(source: Path, output: Path) -> int:
    """Convert a stage's folder to the published code's mm_projector.bin; return the number of tensors."""
    path = source / "projector.safetensors"
    shard = Shard(path)
    check_names(path, shard.shapes, _projector_names())
    weights = {rename(f"{MODEL}{name}", reverse(PROJECTOR)): shard.tensor(name) for name in shard.shapes}
    with replace_file(output, "wb") as file:
        torch.save(weights, file)
    return len(weights)


def convnext_from_openclip(source: Path, output: Path) -> int:
    """Convert the ConvNeXt of an OpenCLIP folder to a folder for `ConvNextModel`; return the number of tensors."""
    shards = open_shards(source, OPEN_CLIP)
    names = match_names(source, shards, OPEN_CLIP_CONVNEXT, left_out=NOT_CONVNEXT)
    shapes = {names[name]: shape for shard in shards for name, shape in shard.shapes.items() if name in names}
    config = _convnext_config(source, shapes)
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


def to_safetensors(source: Path, output: Path) -> int:
    """Convert a transformers folder with pickled weights to safetensors; return the number of tensors."""
    check_model_folder(source)
    shards = open_shards(source)
    names = {name: name for shard in shards for name in shard.shapes}
    with replace_folder(output) as folder:
        write_shards(folder, rename_shards(shards, names), len(shards))
        copy_model_files(source, folder, CONFIGS | PROCESSOR | TOKENIZER)
    return len(names)


def _projector_names() -> set[str]:
    with torch.device("meta"):
        modules = {"projector": MGMProjector(1, 1), "patch_info_mining": PatchInfoMining(1, 1)}
    return {f"{part}.{name}" for part, module in modules.items() for name, _ in module.named_parameters()}


def _convnext_config(source: Path, shapes: dict[str, torch.Size]) -> ConvNextConfig:
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
