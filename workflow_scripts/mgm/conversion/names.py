"""Tensor names in published MGM checkpoints and in this project's, as pairs of templates.

`{stage}`, `{block}` stand for numbers, `{rest}` for whatever follows; what stands there is the same on both sides.
"""

import re

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
