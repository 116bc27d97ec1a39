"""Patch info mining: attention of each CLIP patch over its own high-resolution sub-patches.

Shapes: B images, N CLIP patches, M² sub-patches in each, C CLIP channels, C' channels of all ConvNeXt stages, C_s
channels of one stage, K cells of a stage that a patch attends to.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn


class PatchInfoMining(nn.Module):
    """Attention of each CLIP patch over its own sub-patches (Li et al. 2024, arXiv:2403.18814, eq. 1).

    Query, key and value are a LayerNorm and a linear layer each. Scores are scaled by 1/√C and normalized over the M²
    sub-patches. The sub-patches are the ConvNeXt stages, bilinearly upsampled to the finest stage's resolution and
    concatenated.

    Sub-patches, keys and values are never materialized, because scores and sums are linear in all three. The query is
    projected back to the C' channels and multiplied with the stages' own cells, and the products are upsampled.
    Likewise the attention weights are reduced to the cells, and the weighted sum of the cells is projected. This is the
    same function with fewer bytes and multiplications: in MGM-2B the cells of a patch hold 52 224 numbers, its
    concatenated sub-patches 184 320.

    The forward pass reads the layers' parameters without calling the layers, so they are external parameters to ZeRO-3.
    """

    def __init__(self, channels: int, aux_channels: int):
        super().__init__()
        self.query = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, channels))
        self.key = nn.Sequential(nn.LayerNorm(aux_channels), nn.Linear(aux_channels, channels))
        self.value = nn.Sequential(nn.LayerNorm(aux_channels), nn.Linear(aux_channels, channels))

    def forward(self, patches: torch.Tensor, *stages: torch.Tensor) -> torch.Tensor:
        """Mine features: patches (B, N, C), ConvNeXt stages (B, C_s, h_s, h_s), finest first → (B, N, C)."""
        (key_norm, key), (value_norm, value) = self.key, self.value
        side, size = math.isqrt(patches.shape[1]), stages[0].shape[-1]
        windows = [gather_cells(stage, side, size) for stage in stages]
        _subtract_mean([cells for cells, _ in windows])
        scale = _compute_inverse_deviation(windows, key_norm.eps)  # (B, N, M²); both norms have the same epsilon

        query = _apply_norm_and_linear(self.query, patches)  # (B, N, C)
        back = (query @ key.weight) * key_norm.weight  # (B, N, C')
        centered = back - back.mean(dim=-1, keepdim=True)  # replaces the norm's centering of every sub-patch
        by_stage = centered.split([cells.shape[-1] for cells, _ in windows], dim=-1)
        products = [
            _upsample((cells @ part.unsqueeze(-1)).squeeze(-1), upsample)
            for part, (cells, upsample) in zip(by_stage, windows, strict=True)
        ]
        # equal for all sub-patches, so the softmax cancels it; kept so that every parameter has a gradient
        offset = (query @ (key.weight @ key_norm.bias + key.bias)).unsqueeze(-1)
        weights = ((sum(products) * scale + offset) / query.shape[-1] ** 0.5).softmax(dim=-1)  # (B, N, M²)

        scaled = weights * scale
        sums = [
            (_reduce_to_cells(scaled, upsample).to(cells.dtype).unsqueeze(-2) @ cells).squeeze(-2)
            for cells, upsample in windows
        ]
        attended = torch.cat(sums, dim=-1)  # (B, N, C')
        attended = attended - attended.mean(dim=-1, keepdim=True)
        return F.linear(attended * value_norm.weight + value_norm.bias, value.weight, value.bias)


def gather_cells(stage: torch.Tensor, patches_per_side: int, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the cells of a stage from which each patch's sub-patches are interpolated, and the weights.

    Args:
        stage: (B, C_s, h_s, h_s)
        patches_per_side: √N
        size: side of the grid of all sub-patches.

    Returns:
        Cells (B, N, K, C_s), and interpolation weights (N, M², K) in at least float32; None if the cells are the
        sub-patches.
    """
    dtype = torch.promote_types(stage.dtype, torch.float32)
    images, _, length, _ = stage.shape
    cells, upsample = _compute_window(length, size, patches_per_side, dtype, stage.device)
    first = torch.arange(images, device=stage.device).unsqueeze(1) * length**2
    rows = stage.permute(0, 2, 3, 1).flatten(0, 2)  # (B·h_s², C_s); whole rows are copied fast
    gathered = rows.index_select(0, (first + cells).flatten())
    return gathered.unflatten(0, (images, len(upsample), -1)), None if length == size else upsample


def _upsample(values: torch.Tensor, upsample: torch.Tensor | None) -> torch.Tensor:
    """Interpolate values of cells (B, N, K) at the sub-patches (B, N, M²), in at least float32."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values if upsample is None else torch.einsum("nmk,bnk->bnm", upsample, values)


def _reduce_to_cells(weights: torch.Tensor, upsample: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of the cells (B, N, K) whose sum equals that of the sub-patches' weights (B, N, M²)."""
    return weights if upsample is None else torch.einsum("nmk,bnm->bnk", upsample, weights)


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a tensor made in inference mode could not be used in training
def _compute_window(
    length: int, size: int, side: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return the indices (N·K,) of the cells that each patch uses, and their weights (N, M², K) for its sub-patches.

    `length`, `size` and `side` are cells, sub-patches (after upsampling) and patches per side.
    """
    units = torch.eye(length, dtype=torch.float64).unsqueeze(0)
    linear = F.interpolate(units, size=size, mode="linear", align_corners=False).squeeze(0).T  # (size, length)
    linear = linear.unflatten(0, (side, -1))  # (side, M, length)
    used = linear.ne(0).any(dim=1)
    width = int(used.sum(dim=1).max())
    first = used.int().argmax(dim=1).clamp(max=length - width)
    columns = first.unsqueeze(1) + torch.arange(width)  # (side, k)
    weights = linear.gather(2, columns.unsqueeze(1).expand(-1, linear.shape[1], -1))  # (side, M, k)
    cells = columns[:, None, :, None] * length + columns[None, :, None, :]  # (side, side, k, k)
    upsample = torch.einsum("rmk,cnl->rcmnkl", weights, weights)
    return cells.flatten().to(device), upsample.flatten(4).flatten(2, 3).flatten(0, 1).to(device, dtype)


@torch.no_grad()
def _subtract_mean(stages: list[torch.Tensor]) -> None:
    """Subtract from each patch's cells (B, N, K, C_s), in place, their mean over cells and all stages' channels.

    LayerNorm ignores an offset that all channels share, and so do the other operations here. But the variance is
    computed as a difference of squares, whose precision a large mean would destroy.
    """
    channels = sum(cells.shape[-1] for cells in stages)
    totals = (cells.sum(dim=(-2, -1), keepdim=True, dtype=torch.float32) / cells.shape[-2] for cells in stages)
    mean = sum(totals) / channels  # (B, N, 1, 1)
    for cells in stages:
        cells.sub_(mean.to(cells.dtype))  # rounding the mean does not change the results


def _compute_inverse_deviation(windows: list[tuple[torch.Tensor, torch.Tensor]], eps: float) -> torch.Tensor:
    """Return the factor (B, N, M²) by which LayerNorm scales each sub-patch."""
    channels = sum(cells.shape[-1] for cells, _ in windows)
    mean = square = 0
    for cells, upsample in windows:
        dtype = torch.promote_types(cells.dtype, torch.float32)
        mean = mean + _upsample(cells.sum(dim=-1, dtype=dtype), upsample)
        if upsample is None:
            square = square + torch.linalg.vector_norm(cells, dim=-1, dtype=dtype).square()
            continue
        products = (cells @ cells.mT).to(dtype)  # inner products of each pair of a patch's cells
        square = square + (torch.einsum("nmk,bnkl->bnml", upsample, products) * upsample).sum(dim=-1)
    return (square / channels - (mean / channels) ** 2).clamp(min=0).add(eps).rsqrt()


def _apply_norm_and_linear(layers: nn.Sequential, features: torch.Tensor) -> torch.Tensor:
    norm, linear = layers
    normalized = F.layer_norm(features, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return F.linear(normalized, linear.weight, linear.bias)
