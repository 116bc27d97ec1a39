"""Patch info mining: what each CLIP patch finds in its own high-resolution sub-patches.

Shapes: B images, N CLIP patches, M² sub-patches in each, C CLIP channels, C' channels of all ConvNeXt stages.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class PatchInfoMining(nn.Module):
    """Attention of each CLIP patch over its own sub-patches (Li et al. 2024, arXiv:2403.18814, eq. 1).

    Query, key and value are a LayerNorm and a linear layer each; scores are scaled by 1/√C and normalised over the
    M² sub-patches.

    Keys and values are linear in the normalised sub-patches x̂, so that neither is ever made: the query is projected
    back to x̂'s channels, it attends over x̂ itself, and the sum it attends to is projected. That is the same function
    with M² times fewer multiplications in the projections.

    The forward pass reads its layers' parameters and calls none of them: they are external parameters to ZeRO-3.
    """

    def __init__(self, channels: int, aux_channels: int):
        super().__init__()
        self.query = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, channels))
        self.key = nn.Sequential(nn.LayerNorm(aux_channels), nn.Linear(aux_channels, channels))
        self.value = nn.Sequential(nn.LayerNorm(aux_channels), nn.Linear(aux_channels, channels))

    def forward(self, patches: torch.Tensor, *stages: torch.Tensor) -> torch.Tensor:
        """patches (B, N, C), ConvNeXt stages (B, C_s, h_s, h_s) → mined features (B, N, C), to be added to `patches`.

        The stages are joined once more in the backward pass: joined features that were kept until then would take
        0.2 GiB an image in MGM-2B, as much as the activations of two decoder layers.
        """
        return checkpoint(self._mine, patches, *stages, use_reentrant=False)

    def _mine(self, patches: torch.Tensor, *stages: torch.Tensor) -> torch.Tensor:
        return self.attend(patches, join_stages(stages, math.isqrt(patches.shape[1])))

    def attend(self, patches: torch.Tensor, sub_patches: torch.Tensor) -> torch.Tensor:
        """patches (B, N, C), sub_patches (B, N, M², C') → mined features (B, N, C)."""
        (key_norm, key), (value_norm, value) = self.key, self.value
        # x̂, which keys and values share: both norms have one epsilon
        normalised = F.layer_norm(sub_patches, key_norm.normalized_shape, eps=key_norm.eps)
        query = _linear_after_norm(self.query, patches)  # (B, N, C)
        back = (query @ key.weight) * key_norm.weight  # (B, N, C')
        # the same for all sub-patches, so that the softmax cancels it; kept so that every parameter has a gradient
        offset = query @ (key.weight @ key_norm.bias + key.bias)  # (B, N)
        scores = (normalised @ back.unsqueeze(-1)).squeeze(-1) + offset.unsqueeze(-1)  # (B, N, M²)
        weights = (scores / query.shape[-1] ** 0.5).softmax(dim=-1)
        attended = (weights.unsqueeze(-2) @ normalised).squeeze(-2)  # (B, N, C')
        return F.linear(attended * value_norm.weight + value_norm.bias, value.weight, value.bias)


def _linear_after_norm(layers: nn.Sequential, features: torch.Tensor) -> torch.Tensor:
    norm, linear = layers
    normalised = F.layer_norm(features, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return F.linear(normalised, linear.weight, linear.bias)


def join_stages(stages: Sequence[torch.Tensor], patches_per_side: int) -> torch.Tensor:
    """ConvNeXt stages (B, C_s, h_s, h_s), finest first → sub-patches (B, N, M², C') at the finest one's resolution."""
    finest, *coarser = (stage.permute(0, 2, 3, 1) for stage in stages)
    side, size = patches_per_side, finest.shape[1]
    grids = [finest, *(upsample(grid, size) for grid in coarser)]  # (B, side·M, side·M, C_s)
    grouped = [grid.unflatten(2, (side, -1)).unflatten(1, (side, -1)).transpose(2, 3) for grid in grids]
    return torch.cat(grouped, dim=-1).flatten(3, 4).flatten(1, 2)


def upsample(grid: torch.Tensor, size: int) -> torch.Tensor:
    """(B, h, w, C) → (B, size, size, C), bilinearly.

    Bilinear interpolation is linear in each direction, so it is two products with the matrix that interpolates unit
    vectors. GPUs do those at the speed of their memory; elementwise kernels spend several times as long on indices.
    """
    height, width = (_interpolation(length, size, grid.device).to(grid.dtype) for length in grid.shape[1:3])
    rows = width @ grid  # (B, h, size, C)
    return (height @ rows.flatten(2)).unflatten(2, rows.shape[2:])


def _interpolation(length: int, size: int, device: torch.device) -> torch.Tensor:
    """(size, length) in float32; where `size` is 2, 4 or 8 times `length`, exact in bf16."""
    units = torch.eye(length, device=device).unsqueeze(0)
    return F.interpolate(units, size=size, mode="linear", align_corners=False).squeeze(0).T
