"""Support for vision towers that take the patches of all images of a batch as one sequence (Qwen2.5-VL, Qwen3-VL).

transformers computes positions and sequence lengths on the GPU, waits for them, and then attends to one image after
another. The loader computes them here on the host; one attention kernel takes all images.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

BASE_CLASSES = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}
# transformers passes image boundaries only to implementations whose name contains "flash".
PACKED_ATTENTION = "packed_flash"
GRID_KEY = "image_grid_thw"
TOWER_PREFIX = "tower_"  # begins the name of each entry of a batch that is an argument of the tower


def _attend_within_images(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attend within each image; query, key, value (1, heads, N, D) → (1, N, heads, D)."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    # PyTorch's public `varlen_attn` calls this operator too, but older releases lack it.
    output = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, 0.0, False, False, scale=scaling
    )[0]
    return output[None], None


AttentionInterface.register(PACKED_ATTENTION, _attend_within_images)


class TowerInputs:
    """Computation of a vision tower's arguments, and of the positions of all tokens, from a batch on the CPU."""

    def __init__(self, config: PretrainedConfig):
        self.vision = config.vision_config
        # Position ids need the configuration only, no weights.
        base = BASE_CLASSES[config.model_type]
        self.model = base.__new__(base)
        nn.Module.__init__(self.model)
        self.model.config = config

    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the arguments of tower and language model.

        Args:
            batch: input_ids and mm_token_type_ids (B, T), image_grid_thw (images, 3).

        Returns:
            position_ids (3, B, T) of the language model, and the tower's arguments with TOWER_PREFIX before the name.
        """
        grid, vision = batch[GRID_KEY], self.vision
        positions, _ = self.model.get_rope_index(batch["input_ids"], batch["mm_token_type_ids"], grid)
        boundaries = get_vision_cu_seqlens(grid)
        arguments = {"cu_seqlens": boundaries, "max_seqlen": _bound_length(boundaries)}
        arguments["position_ids"] = get_vision_position_ids(grid, vision.spatial_merge_size)
        if hasattr(vision, "num_position_embeddings"):
            arguments["interp_indices"], arguments["interp_weights"] = get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=int(vision.num_position_embeddings**0.5),
                align_corners=True,
                spatial_merge_size=vision.spatial_merge_size,
            )
        if hasattr(vision, "window_size"):
            window_index, boundaries = get_vision_window_index(
                grid,
                spatial_merge_size=vision.spatial_merge_size,
                window_size=vision.window_size,
                patch_size=vision.patch_size,
            )
            arguments |= {"window_index": window_index, "cu_window_seqlens": boundaries}
            arguments["max_window_seqlen"] = _bound_length(boundaries)
        return {"position_ids": positions} | {TOWER_PREFIX + name: value for name, value in arguments.items()}


def make_tower_inputs(config: PretrainedConfig) -> TowerInputs | None:
    """Return the computation of a tower's arguments; None for models whose tower takes each image separately."""
    return TowerInputs(config) if config.model_type in BASE_CLASSES else None


def _bound_length(boundaries: torch.Tensor) -> torch.Tensor:
    """Return, as a scalar tensor, the least power of two that is at least the longest sequence.

    Code is compiled for each value, so few values mean few compilations.
    """
    return torch.tensor(1 << (int(boundaries.diff().max()) - 1).bit_length())


def move_to_device(name: str, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a batch's value to the device, except the grid and single numbers, which only the host reads."""
    return value if name == GRID_KEY or value.dim() == 0 else value.to(device, non_blocking=True)


def use_tower_inputs(model: PreTrainedModel) -> Callable[[dict], None]:
    """Let the tower receive what TowerInputs computed, and add its features to the decoder without waiting for the GPU.

    Return a function that takes the tower's arguments out of the model's keyword arguments, before a forward pass.
    """
    pending: dict[str, torch.Tensor | int] = {}

    def take_arguments(kwargs: dict) -> None:
        arguments = {name: kwargs.pop(name) for name in [*kwargs] if name.startswith(TOWER_PREFIX)}
        pending.clear()
        pending.update(
            {name.removeprefix(TOWER_PREFIX): value if value.dim() else int(value) for name, value in arguments.items()}
        )

    if model.config.model_type in BASE_CLASSES:
        tower = model.get_encoder(modality="image")
        tower.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs | pending), with_kwargs=True)
        decoder = model.get_decoder()
        if hasattr(decoder, "_deepstack_process"):
            decoder._deepstack_process = _add_at
        model.base_model.get_placeholder_mask = partial(_find_image_tokens, model.config.image_token_id)
    return take_arguments


def _find_image_tokens(
    image_token_id: int, input_ids: torch.Tensor, inputs_embeds: torch.Tensor, **features: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Return the mask (B, T, 1) of the image tokens in input_ids (B, T), and None for videos.

    transformers also compares the number of tokens with that of the features, for which the host waits. Both numbers
    follow from the image's size, and `check_image_fits` has refused rows whose image tokens are cut.
    """
    return (input_ids == image_token_id).unsqueeze(-1), None


def _add_at(hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return hidden (B, T, H) with features (n, H) added at the n positions of mask (B, T).

    transformers indexes by the mask, for which the host waits until the GPU has counted it.
    """
    return hidden + torch.zeros_like(hidden).masked_scatter(mask[..., None], features.to(hidden.dtype))


def use_packed_attention(model: PreTrainedModel) -> None:
    """Attend to all images with one kernel, which exists for GPUs and 16-bit numbers."""
    halves = (torch.bfloat16, torch.float16)
    if model.config.model_type in BASE_CLASSES and torch.cuda.is_available() and model.dtype in halves:
        model.get_encoder(modality="image").config._attn_implementation = PACKED_ATTENTION


def is_packed(layer: nn.Module) -> bool:
    """Return whether a layer of a tower attends to all images with one kernel."""
    configs = (getattr(module, "config", None) for module in layer.modules())
    return any(getattr(config, "_attn_implementation", None) == PACKED_ATTENTION for config in configs)
