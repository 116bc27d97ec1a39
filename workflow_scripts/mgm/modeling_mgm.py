"""MGM in the transformers library's model layout.

Shapes: B images, N CLIP patches, M² high-resolution sub-patches in each, C CLIP channels, C' ConvNeXt channels of all
stages, H hidden size of the language model, T tokens, V words.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel, CLIPVisionModel, ConvNextModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

from mgm.configuration_mgm import MGMConfig

IGNORED = -100  # label of positions that carry no loss


@dataclass
class MGMCausalLMOutput(ModelOutput):
    """`logits` (B, T, V) is left out when a loss is computed: only supervised positions are projected then."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: object | None = None


class PatchInfoMining(nn.Module):
    """Each CLIP patch looks into its own high-resolution sub-patches (Li et al. 2024, arXiv:2403.18814, eq. 1).

    Query, key and value are a LayerNorm and a linear layer each; scores are scaled by 1/√C and normalised over the
    M² sub-patches.
    """

    def __init__(self, channels: int, aux_channels: int):
        super().__init__()
        self.query = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, channels))
        self.key = nn.Sequential(nn.LayerNorm(aux_channels), nn.Linear(aux_channels, channels))
        self.value = nn.Sequential(nn.LayerNorm(aux_channels), nn.Linear(aux_channels, channels))

    def forward(self, patches: torch.Tensor, sub_patches: torch.Tensor) -> torch.Tensor:
        """patches (B, N, C), sub_patches (B, N, M², C') → mined features (B, N, C), to be added to `patches`."""
        query = self.query(patches).unsqueeze(2)  # (B, N, 1, C)
        key, value = self.key(sub_patches), self.value(sub_patches)  # (B, N, M², C)
        scores = query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5  # (B, N, 1, M²)
        return (scores.softmax(dim=-1) @ value).squeeze(2)


class MGMProjector(nn.Sequential):
    """`mlp2x_gelu`: (…, C) → (…, H)."""

    def __init__(self, channels: int, hidden_size: int):
        super().__init__(nn.Linear(channels, hidden_size), nn.GELU(), nn.Linear(hidden_size, hidden_size))


class MGMPreTrainedModel(PreTrainedModel):
    config_class = MGMConfig
    base_model_prefix = "model"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ["PatchInfoMining"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True


class MGMModel(MGMPreTrainedModel):
    def __init__(self, config: MGMConfig):
        super().__init__(config)
        channels = config.vision_config.hidden_size
        self.vision_tower = CLIPVisionModel._from_config(config.vision_config)
        self.vision_tower_aux = ConvNextModel._from_config(config.vision_aux_config)
        self.patch_info_mining = PatchInfoMining(channels, config.aux_channels)
        self.projector = MGMProjector(channels, config.text_config.hidden_size)
        self.language_model = AutoModel.from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    def clip_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(B, 3, S', S') → (B, N, C): layer −2 of the CLIP tower without the class token, at CLIP's resolution.

        The image is scaled down in float32 whatever the weights are, as in the published training.
        """
        low = F.interpolate(
            pixel_values.float(), size=self.config.vision_config.image_size, mode="bilinear", align_corners=False
        )
        hidden = self.vision_tower(low.to(self.vision_tower.dtype), output_hidden_states=True).hidden_states
        return hidden[self.config.vision_feature_layer][:, 1:]

    def sub_patch_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(B, 3, S', S') → (B, N, M², C'): every ConvNeXt stage at the first stage's resolution, grouped by patch."""
        features, stages = self.vision_tower_aux.embeddings(pixel_values), []
        for stage in self.vision_tower_aux.encoder.stages:
            features = stage(features)
            stages.append(features)
        size = stages[0].shape[-2:]
        upsampled = [
            F.interpolate(stage.float(), size=size, mode="bilinear", align_corners=False).to(stage.dtype)
            for stage in stages[1:]
        ]
        grid = torch.cat([stages[0], *upsampled], dim=1)  # (B, C', side·M, side·M)
        side, m = self.config.patches_per_side, self.config.sub_patches_per_side
        grid = grid.unflatten(3, (side, m)).unflatten(2, (side, m))  # (B, C', side, M, side, M)
        return grid.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(B, 3, S', S') → visual tokens (B, N, H)."""
        patches = self.clip_features(pixel_values)
        sub_patches = self.sub_patch_features(pixel_values.to(self.vision_tower_aux.dtype))
        mined = self.patch_info_mining(patches, sub_patches)
        return self.projector(patches + mined)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """input_ids (B, T) with N image tokens for each image in pixel_values (images, 3, S', S')."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            tokens = self.get_image_features(pixel_values).to(inputs_embeds.dtype)
            positions = (input_ids == self.config.image_token_id).unsqueeze(-1).expand_as(inputs_embeds)
            if int(positions.sum()) != tokens.numel():
                raise ValueError(
                    f"{len(pixel_values)} images need {tokens.shape[0] * tokens.shape[1]} image tokens in input_ids, "
                    f"found {int(positions[..., 0].sum())}"
                )
            # Gemma scales its word embeddings by √H; in MGM visual tokens pass through the same scale
            scale = getattr(self.get_input_embeddings(), "scalar_embed_scale", 1.0)
            inputs_embeds = inputs_embeds.masked_scatter(positions, tokens * scale)
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )


class MGMForConditionalGeneration(MGMPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}

    def __init__(self, config: MGMConfig):
        super().__init__(config)
        self.model = MGMModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
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
        labels: torch.LongTensor | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MGMCausalLMOutput:
        """labels (B, T): the answer's token ids, −100 elsewhere. With labels, `logits` are not materialised."""
        output = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        hidden = output.last_hidden_state
        if labels is not None:
            return MGMCausalLMOutput(loss=self._answer_loss(hidden, labels, num_items_in_batch))
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        return MGMCausalLMOutput(logits=logits, past_key_values=output.past_key_values)

    def _answer_loss(self, hidden: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int | None):
        """Next-token cross-entropy in float32 at supervised positions only: a full (B, T, V) tensor is 500 MiB for
        Gemma's 256 000 words at 1024 tokens, and most of it would carry no loss."""
        target = labels[:, 1:]
        supervised = target != IGNORED
        logits = self.lm_head(hidden[:, :-1][supervised]).float()  # (answer tokens, V)
        total = F.cross_entropy(logits, target[supervised], reduction="sum")
        return total / (supervised.sum().clamp(min=1) if items is None else items)

    def prepare_inputs_for_generation(self, input_ids, pixel_values=None, is_first_iteration=False, **kwargs):
        # the image enters once, with the prompt; afterwards its keys and values are in the cache
        inputs = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration or not kwargs.get("use_cache", True):
            inputs["pixel_values"] = pixel_values
        return inputs


__all__ = ["MGMForConditionalGeneration", "MGMModel", "MGMPreTrainedModel", "PatchInfoMining"]
