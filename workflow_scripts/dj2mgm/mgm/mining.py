"""Patch info mining: what each CLIP patch finds in its own high-resolution sub-patches.

Shapes: B images, N CLIP patches, M² sub-patches in each, C CLIP channels, C' channels of all ConvNeXt stages, C_s those
of one stage, K of whose cells a patch sees.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn


class PatchInfoMining(nn.Module):
    """Attention of each CLIP patch over its own sub-patches (Li et al. 2024, arXiv:2403.18814, eq. 1).

    Query, key and value are a LayerNorm and a linear layer each; scores are scaled by 1/√C and normalized over the
    M² sub-patches, which are all ConvNeXt stages, bilinearly upsampled to the finest one's resolution and joined.

    None of sub-patches, keys and values is ever made, since scores and sums are linear in all three. The query is
    projected back to the C' channels and multiplied with the stages' own cells; those products are upsampled. The
    attention weights are brought down to the cells likewise, and what they sum there is projected. It is the same
    function with a fraction of the bytes and multiplications: in MGM-2B the cells that a patch sees hold 52 224
    numbers, its joined sub-patches 184 320.

    The forward pass reads its layers' parameters and calls none of them: they are external parameters to ZeRO-3.
    """

    def __init__(self, channels: int, aux_channels: int):
        super().__init__()
        self.query = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, channels))
        self.key = nn.Sequential(nn.LayerNorm(aux_channels), nn.Linear(aux_channels, channels))
        self.value = nn.Sequential(nn.LayerNorm(aux_channels), nn.Linear(aux_channels, channels))

    def forward(self, patches: torch.Tensor, *stages: torch.Tensor) -> torch.Tensor:
        """patches (B, N, C), ConvNeXt stages (B, C_s, h_s, h_s), finest first → mined features (B, N, C)."""
        (key_norm, key), (value_norm, value) = self.key, self.value
        side, size = math.isqrt(patches.shape[1]), stages[0].shape[-1]
        seen = [cells_seen(stage, side, size) for stage in stages]
        _subtract_mean([cells for cells, _ in seen])
        scale = _inverse_deviation(seen, key_norm.eps)  # (B, N, M²); keys' and values' norms have one epsilon

        query = _linear_after_norm(self.query, patches)  # (B, N, C)
        back = (query @ key.weight) * key_norm.weight  # (B, N, C')
        centered = back - back.mean(dim=-1, keepdim=True)  # instead of every sub-patch, which the norm centers
        by_stage = centered.split([cells.shape[-1] for cells, _ in seen], dim=-1)
        products = [
            torch.einsum("nmk,bnk->bnm", upsample, (cells @ part.unsqueeze(-1)).squeeze(-1).to(upsample.dtype))
            for part, (cells, upsample) in zip(by_stage, seen, strict=True)
        ]
        # the same for all sub-patches, so that the softmax cancels it; kept so that every parameter has a gradient
        offset = (query @ (key.weight @ key_norm.bias + key.bias)).unsqueeze(-1)
        weights = ((sum(products) * scale + offset) / query.shape[-1] ** 0.5).softmax(dim=-1)  # (B, N, M²)

        scaled = weights * scale
        sums = [
            (torch.einsum("nmk,bnm->bnk", upsample, scaled).to(cells.dtype).unsqueeze(-2) @ cells).squeeze(-2)
            for cells, upsample in seen
        ]
        attended = torch.cat(sums, dim=-1)  # (B, N, C')
        attended = attended - attended.mean(dim=-1, keepdim=True)
        return F.linear(attended * value_norm.weight + value_norm.bias, value.weight, value.bias)


def cells_seen(stage: torch.Tensor, patches_per_side: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, C_s, h_s, h_s) → the cells (B, N, K, C_s) which each patch's sub-patches lie in or between, and the weights
    (N, M², K), in at least float32, that upsample them to these sub-patches of a (size, size) grid."""
    dtype = torch.promote_types(stage.dtype, torch.float32)
    images, _, length, _ = stage.shape
    cells, upsample = _window(length, size, patches_per_side, dtype, stage.device)
    first = torch.arange(images, device=stage.device).unsqueeze(1) * length**2
    rows = stage.permute(0, 2, 3, 1).flatten(0, 2)  # (B·h_s², C_s), of which whole ones are copied fast
    seen = rows.index_select(0, (first + cells).flatten())
    return seen.unflatten(0, (images, len(upsample), -1)), upsample


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a tensor made in inference mode could not be used in training
def _window(length: int, size: int, side: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """For a grid of (length, length) cells, (size, size) once upsampled, under (side, side) patches: the indices (N·K,)
    of cells that matter to each patch, and their weights (N, M², K) for each of its sub-patches."""
    units = torch.eye(length, dtype=torch.float64).unsqueeze(0)
    linear = F.interpolate(units, size=size, mode="linear", align_corners=False).squeeze(0).T  # (size, length)
    linear = linear.unflatten(0, (side, -1))  # (side, M, length)
    matters = linear.ne(0).any(dim=1)
    width = int(matters.sum(dim=1).max())
    first = matters.int().argmax(dim=1).clamp(max=length - width)
    places = first.unsqueeze(1) + torch.arange(width)  # (side, k)
    weights = linear.gather(2, places.unsqueeze(1).expand(-1, linear.shape[1], -1))  # (side, M, k)
    cells = places[:, None, :, None] * length + places[None, :, None, :]  # (side, side, k, k)
    upsample = torch.einsum("rmk,cnl->rcmnkl", weights, weights)
    return cells.flatten().to(device), upsample.flatten(4).flatten(2, 3).flatten(0, 1).to(device, dtype)


@torch.no_grad()
def _subtract_mean(cells_of_stages: list[torch.Tensor]) -> None:
    """Subtract from each patch's cells (B, N, K, C_s), in place, their mean over cells and all stages' channels.

    LayerNorm ignores what all channels share, and so does everything else here. But the variance is a difference of
    squares, of which a large mean would leave nothing.
    """
    channels = sum(cells.shape[-1] for cells in cells_of_stages)
    totals = (cells.sum(dim=(-2, -1), keepdim=True, dtype=torch.float32) / cells.shape[-2] for cells in cells_of_stages)
    mean = sum(totals) / channels  # (B, N, 1, 1)
    for cells in cells_of_stages:
        cells.sub_(mean.to(cells.dtype))  # computed in float32; that the mean is rounded does not matter


def _inverse_deviation(seen: list[tuple[torch.Tensor, torch.Tensor]], eps: float) -> torch.Tensor:
    """What LayerNorm scales each sub-patch with: (B, N, M²)."""
    channels = sum(cells.shape[-1] for cells, _ in seen)
    mean = square = 0
    for cells, upsample in seen:
        mean = mean + torch.einsum("nmk,bnk->bnm", upsample, cells.sum(dim=-1, dtype=upsample.dtype))
        products = (cells @ cells.mT).to(upsample.dtype)  # of each two cells of a patch
        square = square + (torch.einsum("nmk,bnkl->bnml", upsample, products) * upsample).sum(dim=-1)
    return (square / channels - (mean / channels) ** 2).clamp(min=0).add(eps).rsqrt()


def _linear_after_norm(layers: nn.Sequential, features: torch.Tensor) -> torch.Tensor:
    norm, linear = layers
    normalized = F.layer_norm(features, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return F.linear(normalized, linear.weight, linear.bias)
