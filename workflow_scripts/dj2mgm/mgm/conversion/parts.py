"""Parts of an MGM: what stage 1 trains, OpenCLIP's ConvNeXt, and transformers folders that have no safetensors."""

import re
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import ConvNextConfig, ConvNextModel

from dj2mgm.errors import InputError
from dj2mgm.files import replace_file, replace_folder
from dj2mgm.mgm.conversion.tensors import (
    OPEN_CLIP,
    OPEN_CLIP_CONVNEXT,
    PROJECTOR,
    Shard,
    check_names,
    check_shapes,
    match_names,
    rename,
    renamed,
    reverse,
    shards_of,
    write_shards,
)
from dj2mgm.mgm.modeling_mgm import MGMProjector, PatchInfoMining
from dj2mgm.model_folders import CONFIGS, PROCESSOR, TOKENIZER, check_model_folder, copy_model_files

MODEL = "model."  # before the names in a whole model, not before those in projector.safetensors
# of a stage-1 file: the towers, frozen then, which the published code stores along with what it has trained
TOWERS = re.compile(r"model\.vision_tower(_aux)?\..*")
# of an OpenCLIP checkpoint: everything but the ConvNeXt's stem and stages
NOT_CONVNEXT = re.compile(
    r"visual\.trunk\.(head|norm_pre)\..*|visual\.head\..*|(text|transformer|token_embedding|ln_final)\..*"
    r"|positional_embedding|text_projection|logit_scale|logit_bias"
)
LAST_NORM = {"layernorm.weight": torch.ones, "layernorm.bias": torch.zeros}  # of ConvNextModel; MGM never applies it


def projector_from_mgm(source: Path, output: Path) -> int:
    """A published stage 1 (mm_projector.bin) → output/projector.safetensors; returns the number of tensors."""
    shard = Shard(source)
    names = match_names(source, [shard], PROJECTOR, left_out=TOWERS)
    weights = {new.removeprefix(MODEL): shard.tensor(name) for name, new in names.items()}
    check_names(source, weights, _projector_names())
    with replace_file(output / "projector.safetensors", "wb") as file:
        file.write(save(weights))
    return len(weights)


def projector_to_mgm(source: Path, output: Path) -> int:
    """A stage's output folder → the published code's mm_projector.bin; returns the number of tensors."""
    path = source / "projector.safetensors"
    shard = Shard(path)
    check_names(path, shard.shapes, _projector_names())
    weights = {rename(f"{MODEL}{name}", reverse(PROJECTOR)): shard.tensor(name) for name in shard.shapes}
    with replace_file(output, "wb") as file:
        torch.save(weights, file)
    return len(weights)


def convnext_from_openclip(source: Path, output: Path) -> int:
    """The ConvNeXt of an OpenCLIP folder → a folder for `ConvNextModel`; returns the number of tensors."""
    shards = shards_of(source, OPEN_CLIP)
    names = match_names(source, shards, OPEN_CLIP_CONVNEXT, left_out=NOT_CONVNEXT)
    shapes = {names[name]: shape for shard in shards for name, shape in shard.shapes.items() if name in names}
    config = _convnext_config(source, shapes)
    with torch.device("meta"):
        expected = {name: p.shape for name, p in ConvNextModel(config).named_parameters() if name not in LAST_NORM}
    check_shapes(source, shapes, expected)
    with replace_folder(output) as folder:
        [tensors] = renamed(shards, names)  # OpenCLIP writes one file
        tensors |= {name: fill(config.hidden_sizes[-1]) for name, fill in LAST_NORM.items()}
        write_shards(folder, [tensors], 1)
        config.save_pretrained(folder)
    return len(names)


def to_safetensors(source: Path, output: Path) -> int:
    """A transformers folder with pickled weights → the same with safetensors; returns the number of tensors."""
    check_model_folder(source)
    shards = shards_of(source)
    names = {name: name for shard in shards for name in shard.shapes}
    with replace_folder(output) as folder:
        write_shards(folder, renamed(shards, names), len(shards))
        copy_model_files(source, folder, CONFIGS | PROCESSOR | TOKENIZER)
    return len(names)


def _projector_names() -> set[str]:
    with torch.device("meta"):
        modules = {"projector": MGMProjector(1, 1), "patch_info_mining": PatchInfoMining(1, 1)}
    return {f"{part}.{name}" for part, module in modules.items() for name, _ in module.named_parameters()}


def _convnext_config(source: Path, shapes: dict[str, torch.Size]) -> ConvNextConfig:
    """Depths and widths, as the tensors have them."""
    widths: dict[int, int] = {}
    depths: dict[int, int] = {}
    for name, shape in shapes.items():
        if match := re.fullmatch(r"encoder\.stages\.(\d+)\.layers\.\d+\.dwconv\.weight", name):
            stage = int(match[1])
            widths[stage], depths[stage] = shape[0], depths.get(stage, 0) + 1
    if sorted(widths) != [0, 1, 2, 3] or "embeddings.patch_embeddings.weight" not in shapes:
        raise InputError(f"{source}: its image tower is no ConvNeXt of four stages")
    patch_size = shapes["embeddings.patch_embeddings.weight"][-1]
    config = ConvNextConfig(
        hidden_sizes=[widths[stage] for stage in range(4)],
        depths=[depths[stage] for stage in range(4)],
        patch_size=patch_size,
    )
    config.architectures = [ConvNextModel.__name__]
    return config
