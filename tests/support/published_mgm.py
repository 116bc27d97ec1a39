"""Reference implementation of the published MGM: names and shapes of its tensors, and a forward pass in plain loops.

It is independent of the project's code and of transformers. Names follow https://github.com/dvlab-research/MGM. The
computation follows the papers (CLIP, ConvNeXt, Gemma, arXiv:2403.18814) for one image and sequence at a time, in
float64.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Sizes of an MGM with Gemma."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    clip_hidden: int
    clip_intermediate: int
    clip_layers: int
    clip_heads: int
    clip_side: int  # px
    clip_patch: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]


MGM_2B = Sizes(
    vocab=256000,
    hidden=2048,
    intermediate=16384,
    layers=18,
    heads=8,
    kv_heads=1,
    head_dim=256,
    clip_hidden=1024,
    clip_intermediate=4096,
    clip_layers=24,
    clip_heads=16,
    clip_side=336,
    clip_patch=14,
    widths=(192, 384, 768, 1536),
    depths=(3, 3, 27, 3),
)


def list_published_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    shapes = {"model.embed_tokens.weight": (sizes.vocab, sizes.hidden), "model.norm.weight": (sizes.hidden,)}
    for layer in range(sizes.layers):
        at, queries, keys = f"model.layers.{layer}", sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (queries, sizes.hidden),
            f"{at}.self_attn.k_proj.weight": (keys, sizes.hidden),
            f"{at}.self_attn.v_proj.weight": (keys, sizes.hidden),
            f"{at}.self_attn.o_proj.weight": (sizes.hidden, queries),
            f"{at}.mlp.gate_proj.weight": (sizes.intermediate, sizes.hidden),
            f"{at}.mlp.up_proj.weight": (sizes.intermediate, sizes.hidden),
            f"{at}.mlp.down_proj.weight": (sizes.hidden, sizes.intermediate),
            f"{at}.input_layernorm.weight": (sizes.hidden,),
            f"{at}.post_attention_layernorm.weight": (sizes.hidden,),
        }
    tower, c = "model.vision_tower.vision_tower.vision_model", sizes.clip_hidden
    shapes |= {
        f"{tower}.embeddings.class_embedding": (c,),
        f"{tower}.embeddings.patch_embedding.weight": (c, 3, sizes.clip_patch, sizes.clip_patch),
        f"{tower}.embeddings.position_embedding.weight": ((sizes.clip_side // sizes.clip_patch) ** 2 + 1, c),
        **_affine(f"{tower}.pre_layrnorm", c),
        **_affine(f"{tower}.post_layernorm", c),
    }
    for layer in range(sizes.clip_layers):
        at = f"{tower}.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _affine(f"{at}.self_attn.{name}", c, c)
        shapes |= _affine(f"{at}.mlp.fc1", sizes.clip_intermediate, c) | _affine(
            f"{at}.mlp.fc2", c, sizes.clip_intermediate
        )
        shapes |= _affine(f"{at}.layer_norm1", c) | _affine(f"{at}.layer_norm2", c)
    shapes |= list_convnext_shapes(sizes, "model.vision_tower_aux.vision_stem", "model.vision_tower_aux.vision_stages")
    for name, channels in (("query", c), ("aux", sum(sizes.widths)), ("val", sum(sizes.widths))):
        at = f"model.vlm_uni_{name}_projector"
        shapes |= _affine(f"{at}.0", channels) | _affine(f"{at}.1", c, channels)
    return (
        shapes
        | _affine("model.mm_projector.0", sizes.hidden, c)
        | _affine("model.mm_projector.2", sizes.hidden, sizes.hidden)
    )


def list_convnext_shapes(sizes: Sizes, stem: str, stages: str) -> dict[str, tuple[int, ...]]:
    """Return shapes by timm's names after the prefixes of OpenCLIP and MGM."""
    shapes = _affine(f"{stem}.0", sizes.widths[0], 3, 4, 4) | _affine(f"{stem}.1", sizes.widths[0])
    for stage, (width, depth) in enumerate(zip(sizes.widths, sizes.depths, strict=True)):
        if stage:
            before = sizes.widths[stage - 1]
            at = f"{stages}.{stage}.downsample"
            shapes |= _affine(f"{at}.0", before) | _affine(f"{at}.1", width, before, 2, 2)
        for block in range(depth):
            at = f"{stages}.{stage}.blocks.{block}"
            shapes |= (
                {f"{at}.gamma": (width,)} | _affine(f"{at}.conv_dw", width, 1, 7, 7) | _affine(f"{at}.norm", width)
            )
            shapes |= _affine(f"{at}.mlp.fc1", 4 * width, width) | _affine(f"{at}.mlp.fc2", width, 4 * width)
    return shapes


def _affine(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def make_random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int = 0, dtype=torch.float32
) -> dict[str, torch.Tensor]:
    """Return random weights, large enough that every tensor changes the results."""
    generator = torch.Generator().manual_seed(seed)
    return {name: (0.3 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}


class PublishedMGM:
    """The published computation with the published names.

    Args:
        weights: Tensors in float64.
        sizes: Sizes of the model.
        image_token: Token id at the positions of the image.
    """

    def __init__(self, weights: dict[str, torch.Tensor], sizes: Sizes, image_token: int):
        self.w, self.sizes, self.image_token = weights, sizes, image_token

    def logits(self, input_ids: list[int], image: torch.Tensor) -> torch.Tensor:
        """Compute logits: input_ids of T tokens, image (3, S', S') → (T, V)."""
        visual = iter(self.visual_tokens(image))
        embeddings = self.w["model.embed_tokens.weight"]
        rows = [next(visual) if token == self.image_token else embeddings[token] for token in input_ids]
        hidden = torch.stack(rows) * math.sqrt(self.sizes.hidden)  # Gemma scales all its input embeddings
        for layer in range(self.sizes.layers):
            at = f"model.layers.{layer}"
            hidden = hidden + self._attend(self._rms(hidden, f"{at}.input_layernorm"), f"{at}.self_attn")
            normed = self._rms(hidden, f"{at}.post_attention_layernorm")
            gate = F.gelu(normed @ self.w[f"{at}.mlp.gate_proj.weight"].T, approximate="tanh")
            up = normed @ self.w[f"{at}.mlp.up_proj.weight"].T
            hidden = hidden + (gate * up) @ self.w[f"{at}.mlp.down_proj.weight"].T
        return self._rms(hidden, "model.norm") @ embeddings.T

    def visual_tokens(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Return one visual token (H,) for each CLIP patch."""
        patches, grid = self._clip(image), self._convnext(image)
        side = self.sizes.clip_side // self.sizes.clip_patch
        m = grid.shape[-1] // side
        tokens = []
        for index, patch in enumerate(patches):
            row, column = index // side, index % side
            query = self._norm_linear(patch, "model.vlm_uni_query_projector")
            scores, values = [], []
            for y in range(row * m, (row + 1) * m):
                for x in range(column * m, (column + 1) * m):
                    key = self._norm_linear(grid[:, y, x], "model.vlm_uni_aux_projector")
                    scores.append(query @ key / math.sqrt(len(key)))
                    values.append(self._norm_linear(grid[:, y, x], "model.vlm_uni_val_projector"))
            weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
            mined = sum(weight * value for weight, value in zip(weights, values, strict=True))
            inner = self._linear(patch + mined, "model.mm_projector.0")
            gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
            tokens.append(self._linear(gelu, "model.mm_projector.2"))
        return tokens

    def _clip(self, image: torch.Tensor) -> torch.Tensor:
        """Return the patches (N, C) after the second-to-last layer."""
        at, sizes = "model.vision_tower.vision_tower.vision_model", self.sizes
        side = sizes.clip_side
        low = F.interpolate(image[None].float(), size=(side, side), mode="bilinear", align_corners=False)[0].double()
        kernel = self.w[f"{at}.embeddings.patch_embedding.weight"].flatten(1)
        rows = [self.w[f"{at}.embeddings.class_embedding"]]
        for y in range(0, side, sizes.clip_patch):
            for x in range(0, side, sizes.clip_patch):
                rows.append(kernel @ low[:, y : y + sizes.clip_patch, x : x + sizes.clip_patch].flatten())
        hidden = torch.stack(rows) + self.w[f"{at}.embeddings.position_embedding.weight"]
        hidden = self._layer_norm(hidden, f"{at}.pre_layrnorm", 1e-5)
        for layer in range(sizes.clip_layers - 1):
            here = f"{at}.encoder.layers.{layer}"
            normed = self._layer_norm(hidden, f"{here}.layer_norm1", 1e-5)
            query, key, value = (self._linear(normed, f"{here}.self_attn.{name}_proj") for name in "qkv")
            heads = []
            for q, k, v in zip(*(t.chunk(sizes.clip_heads, dim=-1) for t in (query, key, value)), strict=True):
                heads.append((q @ k.T / math.sqrt(q.shape[-1])).softmax(-1) @ v)
            hidden = hidden + self._linear(torch.cat(heads, -1), f"{here}.self_attn.out_proj")
            inner = self._linear(self._layer_norm(hidden, f"{here}.layer_norm2", 1e-5), f"{here}.mlp.fc1")
            hidden = hidden + self._linear(inner * torch.sigmoid(1.702 * inner), f"{here}.mlp.fc2")
        return hidden[1:]

    def _convnext(self, image: torch.Tensor) -> torch.Tensor:
        """Return all stages (C', h, h) at the resolution of the first stage."""
        at, stages = "model.vision_tower_aux", []
        features = F.conv2d(image[None].double(), *self._pair(f"{at}.vision_stem.0"), stride=4)
        features = self._channel_norm(features, f"{at}.vision_stem.1")
        for stage, depth in enumerate(self.sizes.depths):
            here = f"{at}.vision_stages.{stage}"
            if stage:
                features = self._channel_norm(features, f"{here}.downsample.0")
                features = F.conv2d(features, *self._pair(f"{here}.downsample.1"), stride=2)
            for block in range(depth):
                features = features + self._block(features, f"{here}.blocks.{block}")
            stages.append(features)
        size = stages[0].shape[-2:]
        # in float32 like the published code
        fine = [F.interpolate(s.float(), size=size, mode="bilinear", align_corners=False).double() for s in stages[1:]]
        return torch.cat([stages[0], *fine], dim=1)[0]

    def _block(self, features: torch.Tensor, at: str) -> torch.Tensor:
        weight, bias = self._pair(f"{at}.conv_dw")
        inner = F.conv2d(features, weight, bias, padding=3, groups=len(weight))
        inner = self._channel_norm(inner, f"{at}.norm").movedim(1, -1)
        inner = self._linear(F.gelu(self._linear(inner, f"{at}.mlp.fc1")), f"{at}.mlp.fc2")
        return (inner * self.w[f"{at}.gamma"]).movedim(-1, 1)

    def _attend(self, hidden: torch.Tensor, at: str) -> torch.Tensor:
        """Compute grouped-query attention with rotary positions, one head and one position at a time."""
        sizes, length, size = self.sizes, len(hidden), self.sizes.head_dim
        query, key, value = ((hidden @ self.w[f"{at}.{name}_proj.weight"].T).split(size, -1) for name in "qkv")
        query, key = [self._rotate(head) for head in query], [self._rotate(head) for head in key]
        heads = []
        for head in range(sizes.heads):
            shared = head // (sizes.heads // sizes.kv_heads)
            rows = []
            for position in range(length):
                scores = key[shared][: position + 1] @ query[head][position] / math.sqrt(size)
                rows.append(scores.softmax(-1) @ value[shared][: position + 1])
            heads.append(torch.stack(rows))
        return torch.cat(heads, -1) @ self.w[f"{at}.o_proj.weight"].T

    @staticmethod
    def _rotate(head: torch.Tensor) -> torch.Tensor:
        half = head.shape[-1] // 2
        frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(head), dtype=torch.float64)[:, None] * frequencies
        first, second = head[:, :half], head[:, half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    def _pair(self, at: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.w[f"{at}.weight"], self.w[f"{at}.bias"]

    def _linear(self, x: torch.Tensor, at: str) -> torch.Tensor:
        weight, bias = self._pair(at)
        return x @ weight.T + bias

    def _layer_norm(self, x: torch.Tensor, at: str, eps: float) -> torch.Tensor:
        weight, bias = self._pair(at)
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * weight + bias

    def _channel_norm(self, x: torch.Tensor, at: str) -> torch.Tensor:
        return self._layer_norm(x.movedim(1, -1), at, 1e-6).movedim(-1, 1)

    def _norm_linear(self, x: torch.Tensor, at: str) -> torch.Tensor:
        return self._linear(self._layer_norm(x, f"{at}.0", 1e-5), f"{at}.1")

    def _rms(self, x: torch.Tensor, at: str) -> torch.Tensor:
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * (1 + self.w[f"{at}.weight"])
