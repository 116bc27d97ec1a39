"""Tensors of published checkpoints: their names in this project, their shards, and an account of every one."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dj2mgm.errors import InputError
from dj2mgm.files import read_json, write_json

# `{stage}`, `{block}` stand for numbers, `{rest}` for whatever follows; what stands there is the same on both sides.

Pairs = tuple[tuple[str, str], ...]  # (their template, our template)


def convnext_pairs(stem: str, stages: str, ours: str = "") -> Pairs:
    """timm's ConvNeXt, as OpenCLIP and MGM store it, against transformers' `ConvNextModel`.

    Args:
        stem, stages: their prefixes.
        ours: prefix of the `ConvNextModel`.
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


PROJECTOR: Pairs = (  # what stage 1 trains
    ("model.mm_projector.{rest}", "model.projector.{rest}"),
    ("model.vlm_uni_query_projector.{rest}", "model.patch_info_mining.query.{rest}"),
    ("model.vlm_uni_aux_projector.{rest}", "model.patch_info_mining.key.{rest}"),
    ("model.vlm_uni_val_projector.{rest}", "model.patch_info_mining.value.{rest}"),
)
TOWERS: Pairs = (
    ("model.vision_tower.vision_tower.vision_model.{rest}", "model.vision_tower.{rest}"),
    *convnext_pairs(
        "model.vision_tower_aux.vision_stem", "model.vision_tower_aux.vision_stages", "model.vision_tower_aux."
    ),
)
LANGUAGE_MODEL: Pairs = (
    ("model.embed_tokens.{rest}", "model.language_model.embed_tokens.{rest}"),
    ("model.layers.{rest}", "model.language_model.layers.{rest}"),
    ("model.norm.{rest}", "model.language_model.norm.{rest}"),
    ("lm_head.{rest}", "lm_head.{rest}"),
)
MGM: Pairs = PROJECTOR + TOWERS + LANGUAGE_MODEL

OPEN_CLIP_CONVNEXT: Pairs = convnext_pairs("visual.trunk.stem", "visual.trunk.stages")


def reverse(pairs: Pairs) -> Pairs:
    return tuple((ours, theirs) for theirs, ours in pairs)


def rename(name: str, pairs: Pairs) -> str | None:
    """The name on the right-hand side; None if no left-hand template is that of `name`."""
    for source, target in pairs:
        if match := _pattern(source).fullmatch(name):
            return target.format(**match.groupdict())
    return None


def _pattern(template: str) -> re.Pattern:
    pattern = re.escape(template)
    for place, text in (("stage", r"\d+"), ("block", r"\d+"), ("rest", ".+")):
        pattern = pattern.replace(rf"\{{{place}\}}", f"(?P<{place}>{text})")
    return re.compile(pattern)


# Reading and writing checkpoints shard by shard, so that host memory holds one shard and not the model.

INDEX = "model.safetensors.index.json"
TRANSFORMERS = ("model.safetensors", "pytorch_model.bin")
OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


class Shard:
    """One file of weights, `.safetensors` or pickled by PyTorch; a tensor is read when it is asked for.

    Args:
        path: the file; of a pickle only tensors and containers are loaded, and no code is run.

    Raises:
        InputError: the file cannot be read, or holds something else than tensors.
    """

    shapes: dict[str, torch.Size]
    tensor: Callable[[str], torch.Tensor]

    def __init__(self, path: Path):
        try:
            if path.suffix == ".safetensors":
                file = safe_open(path, framework="pt")
                self.shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                self.tensor = file.get_tensor
            else:
                tensors = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
                self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
                # a copy: in a pickle, two names may share one storage, which safetensors refuses
                self.tensor = lambda name: tensors[name].clone(memory_format=torch.contiguous_format)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read as weights ({error}); download it again") from None
        except Exception:  # torch.load raises whatever a damaged file leads to, and advises to turn its check off
            raise InputError(
                f"{path} cannot be read as weights: it is damaged, or holds more than tensors, which is never loaded; "
                "download it again, or take the safetensors that its publisher has of it"
            ) from None


def shards_of(folder: Path, names: tuple[str, ...] = TRANSFORMERS) -> list[Shard]:
    """The shards of a checkpoint folder.

    Args:
        names: of the file that holds all weights; the first that is there, whole or in shards, is taken.

    Raises:
        InputError: no weights, or a file that the index names is missing.
    """
    for name in names:
        index = folder / f"{name}.index.json"
        if index.is_file():
            files = sorted(set(read_json(index, remedy="download the folder again")["weight_map"].values()))
            if missing := [file for file in files if not (folder / file).is_file()]:
                raise InputError(f"{index} names {missing[0]}, which is not there; download the folder again")
            return [Shard(folder / file) for file in files]
        if (folder / name).is_file():
            return [Shard(folder / name)]
    raise InputError(f"{folder} holds no weights, neither {' nor '.join(names)}; name the folder of a downloaded model")


def write_shards(folder: Path, shards: Iterable[dict[str, torch.Tensor]], count: int) -> None:
    """Write each of `count` shards as it comes, and the index that says where a tensor is."""
    weight_map, total, number = {}, 0, 0
    for tensors in shards:  # not enumerate, which holds the last shard while the next one is read
        number += 1
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def renamed(shards: list[Shard], names: dict[str, str]) -> Iterator[dict[str, torch.Tensor]]:
    """The shards under new names; a tensor that `names` lacks is left out."""
    for shard in shards:
        yield {names[name]: shard.tensor(name) for name in shard.shapes if name in names}


# Accounting for every tensor of a checkpoint: each gets a new name, none is missing, none is left over.


def match_names(where: Path, shards: list[Shard], pairs: Pairs, left_out: re.Pattern) -> dict[str, str]:
    """The new name of every tensor but those that `left_out` matches.

    Raises:
        InputError: a tensor that no pair renames, or two that get one name.
    """
    names: dict[str, str] = {}
    for name in (name for shard in shards for name in shard.shapes):
        if left_out.fullmatch(name):
            continue
        new = rename(name, pairs)
        if new is None:
            raise InputError(f"{where}: tensor {name} has no place in this conversion; is it another kind of model?")
        if name in names or new in names.values():
            raise InputError(f"{where}: tensor {name} is there twice; download the folder again")
        names[name] = new
    return names


def check_names(where: Path, found: Collection[str], expected: Collection[str]) -> None:
    """
    Raises:
        InputError: names the first tensor that is missing or too many, by its name in this project.
    """
    if missing := sorted(set(expected) - set(found)):
        raise InputError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if surplus := sorted(set(found) - set(expected)):
        raise InputError(f"{where}: {len(surplus)} tensors have no place in the model, the first is {surplus[0]}")


def check_shapes(where: Path, found: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    """
    Raises:
        InputError: as `check_names`, or names a tensor of another shape.
    """
    check_names(where, found, expected)
    for name, shape in expected.items():
        if found[name] != shape:
            raise InputError(
                f"{where}: tensor {name} has shape {tuple(found[name])}, the model has {tuple(shape)}; name the "
                "configuration of the same model"
            )
