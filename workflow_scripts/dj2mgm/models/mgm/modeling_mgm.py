"""MGM as a transformers model.

Shapes: B images, N CLIP patches, M² high-resolution sub-patches in each, C CLIP channels, C' ConvNeXt channels of all
stages, H hidden size of the language model, T tokens, V vocabulary size.

Both towers are frozen in every stage, so they run without gradients and always in evaluation mode.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel, CLIPVisionModel, ConvNextModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

from dj2mgm.models.loss import LanguageModelHead, compute_answer_loss, find_answer_positions
from dj2mgm.models.mgm.configuration_mgm import MGMConfig
from dj2mgm.models.mgm.mining import PatchInfoMining


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


__all__ = ["MGMForConditionalGeneration", "MGMModel", "MGMPreTrainedModel"]
