"""MGM as a transformers model.

Shapes: B images, N CLIP patches, M² high-resolution sub-patches in each, C CLIP channels, C' ConvNeXt channels of all
stages, H hidden size of the language model, T tokens, V vocabulary size.

Both towers are frozen in every stage, so they run without gradients and always in evaluation mode.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel, CLIPVisionModel, ConvNextModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

from dj2mgm.models.loss import LanguageModelHead, compute_answer_loss, find_answer_positions
from dj2mgm.models.mgm.configuration_mgm import MGMConfig

__all__ = ["MGMForConditionalGeneration", "MGMModel", "MGMPreTrainedModel"]


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


def find_image_positions(input_ids: torch.LongTensor, image_token_id: int) -> torch.LongTensor:
    """Return the flat indices of the image tokens in input_ids (B, T), in order."""
    return (input_ids.flatten() == image_token_id).nonzero().squeeze(1)


# The last decoder layer computes its MLP only at positions that predict an answer.
#
# After attention, each position is computed separately, and the loss uses only the positions that predict an answer.
# Leaving out the MLP elsewhere saves 5 % of Gemma-2B's operations without changing loss or gradients. Hooks select the
# positions, so that parameters keep their names and compiled or replaced forwards stay in use.


def prepare_position_selection(layer: nn.Module) -> None:
    """Prepare a decoder layer for `select_positions`."""
    layer.mlp.selected_positions = None
    layer.mlp.register_forward_pre_hook(_take_positions)
    layer.mlp.register_forward_hook(_put_positions_back)


def select_positions(layer: nn.Module, positions: torch.LongTensor | None, hidden: torch.Tensor) -> None:
    """Compute the layer's MLP only at some positions, until the next call and also in activation checkpointing.

    Args:
        layer: a decoder layer.
        positions: flat indices into B·T; None for all positions.
        hidden: (B, T, H), with shape, dtype and device of the output, which is zero at all other positions.
    """
    layer.mlp.selected_positions = positions
    layer.mlp.zero_output = None if positions is None else hidden.new_zeros(()).expand(hidden.shape)


def get_position_selection(layer: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a layer's MLP reads in addition to its argument; empty if no positions are selected."""
    mlp = getattr(layer, "mlp", None)
    return () if getattr(mlp, "selected_positions", None) is None else (mlp.selected_positions, mlp.zero_output)


def _take_positions(mlp: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor | None:
    """Select positions: (B, T, H) → (selected, H)."""
    return None if mlp.selected_positions is None else args[0].flatten(0, 1).index_select(0, mlp.selected_positions)


def _put_positions_back(mlp: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
    """Put selected positions back: (selected, H) → (B, T, H)."""
    if mlp.selected_positions is None:
        return None
    return mlp.zero_output.flatten(0, 1).index_copy(0, mlp.selected_positions, output).view(mlp.zero_output.shape)


@dataclass
class MGMCausalLMOutput(ModelOutput):
    """Output of MGM; `logits` (B, T, V) are None if a loss is computed, which projects supervised positions only."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: object | None = None


class MGMProjector(nn.Sequential):
    """Projector `mlp2x_gelu` of the published code: (…, C) → (…, H)."""

    def __init__(self, channels: int, hidden_size: int):
        super().__init__(nn.Linear(channels, hidden_size), nn.GELU(), nn.Linear(hidden_size, hidden_size))


class MGMPreTrainedModel(PreTrainedModel):
    """Base class of MGM's models."""

    config_class = MGMConfig
    base_model_prefix = "model"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ["PatchInfoMining"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True


class MGMModel(MGMPreTrainedModel):
    """MGM without the language model's head."""

    def __init__(self, config: MGMConfig):
        super().__init__(config)
        channels = config.vision_config.hidden_size
        self.vision_tower = CLIPVisionModel._from_config(config.vision_config)
        self.vision_tower_aux = ConvNextModel._from_config(config.vision_aux_config)
        self.patch_info_mining = PatchInfoMining(channels, config.aux_channels)
        self.projector = MGMProjector(channels, config.text_config.hidden_size)
        self.language_model = AutoModel.from_config(config.text_config)
        for layer in self.language_model.layers:  # torch.compile needs the same hooks in all layers
            prepare_position_selection(layer)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    def train(self, mode: bool = True) -> "MGMModel":
        self.training = mode
        for child in self.children():
            child.train(mode and child is not self.vision_tower and child is not self.vision_tower_aux)
        return self

    @torch.no_grad()
    def compute_clip_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return layer −2 of the CLIP tower without the class token: (B, 3, S', S') → (B, N, C).

        The image is scaled down to CLIP's resolution in float32 for any dtype of the weights, as in the published
        training.
        """
        tower = self.vision_tower
        low = F.interpolate(
            pixel_values.float(), size=self.config.vision_config.image_size, mode="bilinear", align_corners=False
        )
        hidden = tower.pre_layrnorm(tower.embeddings(low.to(self.dtype)))
        layers = tower.encoder.layers
        for layer in layers[: self.config.vision_feature_layer % (len(layers) + 1)]:  # later layers are not used
            hidden = layer(hidden, attention_mask=None)
        return hidden[:, 1:]

    @torch.no_grad()
    def compute_stage_features(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        """Return the output of every ConvNeXt stage: (B, 3, S', S') → [(B, C_s, h_s, h_s)], finest first."""
        tower = self.vision_tower_aux
        # depthwise convolutions are several times faster with channels innermost
        features = tower.embeddings(pixel_values.to(self.dtype, memory_format=torch.channels_last))
        return [features := stage(features) for stage in tower.encoder.stages]

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the visual tokens: (B, 3, S', S') → (B, N, H)."""
        patches = self.compute_clip_features(pixel_values)
        mined = self.patch_info_mining(patches, *self.compute_stage_features(pixel_values))
        return self.projector(patches + mined)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        visual_tokens: torch.Tensor | None = None,
        image_positions: torch.LongTensor | None = None,
        read_positions: torch.LongTensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Compute the last hidden states (B, T, H).

        Args:
            input_ids: (B, T) with N image tokens for each image.
            pixel_values: (images, 3, S', S')
            visual_tokens: (images, N, H), instead of pixel_values if they are already computed.
            image_positions: flat indices of the image tokens in `input_ids`; finding them waits for the GPU.
            read_positions: flat indices at which hidden states are read (None: all positions); hidden states at other
                positions are undefined.
        """
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        images = visual_tokens if pixel_values is None else pixel_values
        if images is not None:
            if image_positions is None:
                image_positions = find_image_positions(input_ids, self.config.image_token_id)
            expected = len(images) * self.config.num_image_tokens
            if len(image_positions) != expected:
                placeholders = len(image_positions)
                raise ValueError(
                    f"{len(images)} images need {expected} image tokens in input_ids, found {placeholders}"
                )
            tokens = images if pixel_values is None else self.get_image_features(pixel_values)
            tokens = tokens.to(inputs_embeds.dtype).flatten(0, 1)
            # Gemma scales its input embeddings by √H; in MGM visual tokens are scaled, too
            scale = getattr(self.get_input_embeddings(), "scalar_embed_scale", 1.0)
            rows = inputs_embeds.flatten(0, 1).index_copy(0, image_positions, tokens * scale)
            inputs_embeds = rows.view_as(inputs_embeds)
        elif self.training:
            # Without images, projector and mining must get a gradient of zero. Without a gradient,
            # DeepSpeed would use the gradient of the previous step, and hang if only some processes had one.
            side = self.config.image_size_aux
            blank = inputs_embeds.new_zeros(1, 3, side, side, dtype=torch.float32)
            inputs_embeds = inputs_embeds + 0 * self.get_image_features(blank).sum().to(inputs_embeds.dtype)
        select_positions(self.language_model.layers[-1], read_positions, inputs_embeds)
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )


class MGMForConditionalGeneration(MGMPreTrainedModel, GenerationMixin):
    """MGM with the language model's head."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}

    def __init__(self, config: MGMConfig):
        super().__init__(config)
        self.model = MGMModel(config)
        self.lm_head = LanguageModelHead(config.text_config.hidden_size, config.text_config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        visual_tokens: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        answer_positions: torch.LongTensor | None = None,
        **kwargs,
    ) -> MGMCausalLMOutput:
        """Compute logits or, given labels, the loss without logits.

        Args:
            labels: (B, T) token ids of the answers, −100 elsewhere.
            logits_to_keep: number of last positions with logits; 0 for all.
            num_items_in_batch: number of tokens by which the summed loss is divided.
            answer_positions: flat indices of the tokens that predict an answer; found in `labels` if not given.
        """
        if labels is not None:
            kwargs["use_cache"] = False
            if answer_positions is None:
                answer_positions = find_answer_positions(labels)
        output = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            visual_tokens=visual_tokens,
            read_positions=None if labels is None else answer_positions,
            **kwargs,
        )
        hidden = output.last_hidden_state
        if labels is not None:
            loss = compute_answer_loss(self.lm_head, hidden, labels, answer_positions, num_items_in_batch)
            return MGMCausalLMOutput(loss=loss)
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        return MGMCausalLMOutput(logits=logits, past_key_values=output.past_key_values)

    def prepare_inputs_for_generation(
        self, input_ids, pixel_values=None, visual_tokens=None, is_first_iteration=False, **kwargs
    ):
        # the image is needed once, with the prompt; then its keys and values are in the cache
        inputs = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration or not kwargs.get("use_cache", True):
            inputs |= {"pixel_values": pixel_values, "visual_tokens": visual_tokens}
        return inputs
