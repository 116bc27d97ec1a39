"""Names of tensors in the layouts of MGM's published code, OpenCLIP and this project.

There is one table of names for each layout: projector, towers, language model, OpenCLIP's ConvNeXt. Whole checkpoints
in the published layout (https://github.com/dvlab-research/MGM) have the language model's names directly under `model.`,
CLIP under `model.vision_tower.vision_tower`, and OpenCLIP's ConvNeXt under `model.vision_tower_aux`. A conversion is
complete if every tensor gets a new name, none is missing and none is left over.
"""

import re
from collections.abc import Collection
from pathlib import Path

import torch

from dj2mgm.errors import InputError
from dj2mgm.models.trained_weights import Shard

NamePairs = tuple[tuple[str, str], ...]  # (their template, our template)


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


PROJECTOR_NAMES: NamePairs = (  # trained in stage 1
    ("model.mm_projector.{rest}", "model.projector.{rest}"),
    ("model.vlm_uni_query_projector.{rest}", "model.patch_info_mining.query.{rest}"),
    ("model.vlm_uni_aux_projector.{rest}", "model.patch_info_mining.key.{rest}"),
    ("model.vlm_uni_val_projector.{rest}", "model.patch_info_mining.value.{rest}"),
)
TOWER_NAMES: NamePairs = (
    ("model.vision_tower.vision_tower.vision_model.{rest}", "model.vision_tower.{rest}"),
    *build_convnext_pairs(
        "model.vision_tower_aux.vision_stem", "model.vision_tower_aux.vision_stages", "model.vision_tower_aux."
    ),
)
LANGUAGE_MODEL_NAMES: NamePairs = (
    ("model.embed_tokens.{rest}", "model.language_model.embed_tokens.{rest}"),
    ("model.layers.{rest}", "model.language_model.layers.{rest}"),
    ("model.norm.{rest}", "model.language_model.norm.{rest}"),
    ("lm_head.{rest}", "lm_head.{rest}"),
)
MGM_NAMES: NamePairs = PROJECTOR_NAMES + TOWER_NAMES + LANGUAGE_MODEL_NAMES

OPEN_CLIP_CONVNEXT_NAMES: NamePairs = build_convnext_pairs("visual.trunk.stem", "visual.trunk.stages")

# Tensors without a counterpart.

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


def make_last_norm(channels: int, dtype: torch.dtype, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the unused norm of a `ConvNextModel` as an identity."""
    name = prefix + LAST_NORM
    return {f"{name}weight": torch.ones(channels, dtype=dtype), f"{name}bias": torch.zeros(channels, dtype=dtype)}


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
