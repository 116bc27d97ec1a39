"""Names, shards and completeness checks for the tensors of published checkpoints."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dj2mgm.errors import InputError
from dj2mgm.files import read_json, write_json

# The table of weight names. `{stage}` and `{block}` match numbers, `{rest}` the rest of a name, equal on both sides.

Pairs = tuple[tuple[str, str], ...]  # (their template, our template)


def convnext_pairs(stem: str, stages: str, ours: str = "") -> Pairs:
    """Return the names of timm's ConvNeXt, as OpenCLIP and MGM store it, and of transformers' `ConvNextModel`.

    Args:
        stem: Prefix of timm's stem.
        stages: Prefix of timm's stages.
        ours: Prefix of the `ConvNextModel`.
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


PROJECTOR: Pairs = (  # trained in stage 1
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
    """Return the new name of a tensor; None if no template matches `name`."""
    for source, target in pairs:
        if match := _pattern(source).fullmatch(name):
            return target.format(**match.groupdict())
    return None


def _pattern(template: str) -> re.Pattern:
    pattern = re.escape(template)
    for place, text in (("stage", r"\d+"), ("block", r"\d+"), ("rest", ".+")):
        pattern = pattern.replace(rf"\{{{place}\}}", f"(?P<{place}>{text})")
    return re.compile(pattern)


# Checkpoints are read and written shard by shard, so that host memory holds one shard instead of the model.

INDEX = "model.safetensors.index.json"
TRANSFORMERS = ("model.safetensors", "pytorch_model.bin")
OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


class Shard:
    """File of weights, `.safetensors` or pickled by PyTorch, whose tensors are read one at a time.

    Args:
        path: The file. Only tensors and containers of a pickle are loaded, and no code is run.

    Raises:
        InputError: The file cannot be read or contains anything except tensors.
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
                # copied because two names of a pickle may share one storage, which safetensors rejects
                self.tensor = lambda name: tensors[name].clone(memory_format=torch.contiguous_format)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read as weights ({error}); download it again") from None
        except Exception:  # torch.load raises many types for damaged files, and advises to turn off its check
            raise InputError(
                f"{path} cannot be read as weights: it is damaged, or contains objects other than tensors, which are "
                "never loaded; download it again, or use its publisher's safetensors"
            ) from None


def shards_of(folder: Path, names: tuple[str, ...] = TRANSFORMERS) -> list[Shard]:
    """Return the shards of a checkpoint folder.

    Args:
        folder: The folder.
        names: Possible names of the file with all weights; the first that exists, whole or in shards, is used.

    Raises:
        InputError: There are no weights, or a file that the index names is missing.
    """
    for name in names:
        index = folder / f"{name}.index.json"
        if index.is_file():
            files = sorted(set(read_json(index, remedy="download the folder again")["weight_map"].values()))
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
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def rename_shards(shards: list[Shard], names: dict[str, str]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each shard under their new names; leave out tensors that `names` lacks."""
    for shard in shards:
        yield {names[name]: shard.tensor(name) for name in shard.shapes if name in names}


# Completeness: every tensor of a checkpoint gets a new name, none is missing, none is left over.


def match_names(where: Path, shards: list[Shard], pairs: Pairs, left_out: re.Pattern) -> dict[str, str]:
    """Return the new name of every tensor except those that `left_out` matches.

    Raises:
        InputError: A tensor has no new name, or two tensors get the same one.
    """
    names: dict[str, str] = {}
    for name in (name for shard in shards for name in shard.shapes):
        if left_out.fullmatch(name):
            continue
        new = rename(name, pairs)
        if new is None:
            raise InputError(f"{where}: tensor {name} is unknown to this conversion; name a model of the expected kind")
        if name in names or new in names.values():
            raise InputError(f"{where}: tensor {name} occurs twice; download the folder again")
        names[name] = new
    return names


def check_names(where: Path, found: Collection[str], expected: Collection[str]) -> None:
    """Check that the expected tensors, and no others, were found.

    Raises:
        InputError: Names the first missing or unexpected tensor by its name in this project.
    """
    if missing := sorted(set(expected) - set(found)):
        raise InputError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if surplus := sorted(set(found) - set(expected)):
        raise InputError(f"{where}: the model does not have {len(surplus)} tensors, the first is {surplus[0]}")


def check_shapes(where: Path, found: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    """Check names and shapes of the tensors.

    Raises:
        InputError: As `check_names`, or names a tensor with another shape.
    """
    check_names(where, found, expected)
    for name, shape in expected.items():
        if found[name] != shape:
            raise InputError(
                f"{where}: tensor {name} has shape {tuple(found[name])}, expected {tuple(shape)}; name the "
                "configuration of the same model"
            )
