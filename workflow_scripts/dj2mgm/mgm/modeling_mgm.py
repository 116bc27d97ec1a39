"""MGM in the transformers library's model layout."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel, CLIPVisionModel, ConvNextModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

from dj2mgm.mgm.configuration_mgm import MGMConfig
from dj2mgm.mgm.loss import LanguageModelHead
from dj2mgm.mgm.mining import PatchInfoMining
from dj2mgm.vision_language import IGNORED

# Which of a batch's tokens stand for images, and which predict an answer.


def positions_of_images(input_ids: torch.LongTensor, image_token_id: int) -> torch.LongTensor:
    """input_ids (B, T) → flat indices of the image tokens, in order."""
    return (input_ids.flatten() == image_token_id).nonzero().squeeze(1)


def positions_of_answers(labels: torch.LongTensor) -> torch.LongTensor:
    """labels (B, T) → flat indices of the tokens whose next label is not `IGNORED`."""
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    return (following != IGNORED).nonzero().squeeze(1)


# Leaves out of the last decoder layer what nobody reads.
#
# After its attention, the last layer computes each position by itself, and a loss reads only those that predict an
# answer. Its MLP, 5 % of Gemma-2B's operations, is therefore left out at all others: the loss and its gradients are the
# same. It is told so by hooks, so that parameters keep their names and compiled or replaced forwards stay what they
# are.


def select_positions_in(layer: nn.Module) -> None:
    """Prepare a decoder layer for `select_positions`."""
    layer.mlp.chosen = None
    layer.mlp.register_forward_pre_hook(_take)
    layer.mlp.register_forward_hook(_put_back)


def select_positions(layer: nn.Module, chosen: torch.LongTensor | None, hidden: torch.Tensor) -> None:
    """Until the next call, compute the MLP at `chosen` (flat indices into B·T; None: all) of tensors like `hidden`
    (B, T, H), and add nothing elsewhere. Holds for the recomputation in a backward pass, too."""
    layer.mlp.chosen = chosen
    layer.mlp.elsewhere = None if chosen is None else hidden.new_zeros(()).expand(hidden.shape)


def selection_of(layer: nn.Module) -> tuple[torch.Tensor, ...]:
    """What the MLP of a layer reads beside its argument: nothing unless positions are selected in it."""
    mlp = getattr(layer, "mlp", None)
    return () if getattr(mlp, "chosen", None) is None else (mlp.chosen, mlp.elsewhere)


def _take(mlp: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor | None:
    """(B, T, H) → (chosen, H)"""
    return None if mlp.chosen is None else args[0].flatten(0, 1).index_select(0, mlp.chosen)


def _put_back(mlp: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
    """(chosen, H) → (B, T, H)"""
    if mlp.chosen is None:
        return None
    return mlp.elsewhere.flatten(0, 1).index_copy(0, mlp.chosen, output).view(mlp.elsewhere.shape)


# MGM in the transformers library's model layout.
#
# Shapes: B images, N CLIP patches, M² high-resolution sub-patches in each, C CLIP channels, C' ConvNeXt channels of all
# stages, H hidden size of the language model, T tokens, V words.
#
# Both towers are frozen in every stage, so they run without gradients, and always as in evaluation.


@dataclass
class MGMCausalLMOutput(ModelOutput):
    """`logits` (B, T, V) is left out when a loss is computed: only supervised positions are projected then."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: object | None = None


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
        for layer in self.language_model.layers:  # all alike: torch.compile does not tell layers apart by their hooks
            select_positions_in(layer)
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
    def clip_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(B, 3, S', S') → (B, N, C): layer −2 of the CLIP tower without the class token, at CLIP's resolution.

        The image is scaled down in float32 whatever the weights are, as in the published training.
        """
        tower = self.vision_tower
        low = F.interpolate(
            pixel_values.float(), size=self.config.vision_config.image_size, mode="bilinear", align_corners=False
        )
        hidden = tower.pre_layrnorm(tower.embeddings(low.to(self.dtype)))
        layers = tower.encoder.layers
        for layer in layers[: self.config.vision_feature_layer % (len(layers) + 1)]:  # none after the one that is read
            hidden = layer(hidden, attention_mask=None)
        return hidden[:, 1:]

    @torch.no_grad()
    def stage_features(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        """(B, 3, S', S') → what every ConvNeXt stage gives, [(B, C_s, h_s, h_s)], finest first."""
        tower = self.vision_tower_aux
        # its depthwise convolutions are several times faster with channels innermost
        features = tower.embeddings(pixel_values.to(self.dtype, memory_format=torch.channels_last))
        return [features := stage(features) for stage in tower.encoder.stages]

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(B, 3, S', S') → visual tokens (B, N, H)."""
        patches = self.clip_features(pixel_values)
        mined = self.patch_info_mining(patches, *self.stage_features(pixel_values))
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
        """input_ids (B, T) with N image tokens for each image in pixel_values (images, 3, S', S').

        visual_tokens: (images, N, H) in their place, if they are known already.
        image_positions: flat indices of those tokens in `input_ids`. Where they are not given they are looked for,
        which waits for a GPU to have counted them.
        read_positions: flat indices at which the last hidden states are wanted (None: at all); others are not right.
        """
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        images = visual_tokens if pixel_values is None else pixel_values
        if images is not None:
            if image_positions is None:
                image_positions = positions_of_images(input_ids, self.config.image_token_id)
            expected = len(images) * self.config.num_image_tokens
            if len(image_positions) != expected:
                placeholders = len(image_positions)
                raise ValueError(
                    f"{len(images)} images need {expected} image tokens in input_ids, found {placeholders}"
                )
            tokens = images if pixel_values is None else self.get_image_features(pixel_values)
            tokens = tokens.to(inputs_embeds.dtype).flatten(0, 1)
            # Gemma scales its word embeddings by √H; in MGM visual tokens pass through the same scale
            scale = getattr(self.get_input_embeddings(), "scalar_embed_scale", 1.0)
            rows = inputs_embeds.flatten(0, 1).index_copy(0, image_positions, tokens * scale)
            inputs_embeds = rows.view_as(inputs_embeds)
        elif self.training:
            # Texts alone must give projector and mining a gradient, of zero: for what has none DeepSpeed keeps that of
            # the step before, and waits for ever where another process has one.
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
        """labels (B, T): the answer's token ids, −100 elsewhere. With labels, `logits` are not materialised.

        answer_positions: flat indices of what predicts them; looked for where they are not given.
        """
        if labels is not None:
            kwargs["use_cache"] = False
            if answer_positions is None:
                answer_positions = positions_of_answers(labels)
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
            targets = labels.flatten()[answer_positions + 1]
            total = self.lm_head(hidden.flatten(0, 1).index_select(0, answer_positions), targets)
            items = num_items_in_batch if num_items_in_batch is not None else max(1, len(targets))
            return MGMCausalLMOutput(loss=total / items)
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        return MGMCausalLMOutput(logits=logits, past_key_values=output.past_key_values)

    def prepare_inputs_for_generation(
        self, input_ids, pixel_values=None, visual_tokens=None, is_first_iteration=False, **kwargs
    ):
        # the image enters once, with the prompt; afterwards its keys and values are in the cache
        inputs = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration or not kwargs.get("use_cache", True):
            inputs |= {"pixel_values": pixel_values, "visual_tokens": visual_tokens}
        return inputs


__all__ = ["MGMForConditionalGeneration", "MGMModel", "MGMPreTrainedModel"]
