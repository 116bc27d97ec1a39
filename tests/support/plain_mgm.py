"""Plain implementation of MGM: every formula as in the paper, without optimization of speed or memory.

The workflow's own model must be the same function. tests/unit/models/mgm/test_mgm_golden.py compares losses and
gradients on a CPU, and benchmarks/train_step.py compares losses and speed on a GPU. The parameters are the same as
in `MGMForConditionalGeneration`, so that one folder of weights serves both.
"""

import torch
import torch.nn.functional as F

from dj2mgm.models.mgm import MGMForConditionalGeneration
from dj2mgm.models.mgm.modeling_mgm import MGMCausalLMOutput
from dj2mgm.planning.architecture import MGMArchitecture


class PlainMGM(MGMForConditionalGeneration):
    """MGM with one image in each sample."""

    def forward(
        self,
        input_ids: torch.LongTensor,
        labels: torch.LongTensor,
        pixel_values: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MGMCausalLMOutput:
        """Compute the loss.

        Args:
            input_ids: (B, T), with one image in each row.
            labels: (B, T), −100 at positions without loss.
            pixel_values: (B, 3, S', S').
            attention_mask: (B, T).
            num_items_in_batch: tokens with loss in the whole batch; None: tokens of this micro batch.
            kwargs: ignored.
        """
        embeddings = self.get_input_embeddings()(input_ids)
        scale = getattr(self.get_input_embeddings(), "scalar_embed_scale", 1.0)
        is_image = (input_ids == self.config.image_token_id).unsqueeze(-1).expand_as(embeddings)
        embeddings = embeddings.masked_scatter(is_image, self.visual_tokens(pixel_values).to(embeddings.dtype) * scale)
        hidden = self.model.language_model(
            inputs_embeds=embeddings, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        logits = self.lm_head(hidden).float()
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return MGMCausalLMOutput(loss=total / (num_items_in_batch or (labels[:, 1:] != -100).sum()), logits=logits)

    def visual_tokens(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images (B, 3, S', S') to visual tokens (B, N, H)."""
        model, config = self.model, self.config
        low = F.interpolate(pixel_values.float(), size=config.vision_config.image_size, mode="bilinear")
        clip = model.vision_tower(low.to(self.dtype), output_hidden_states=True)
        patches = clip.hidden_states[config.vision_feature_layer][:, 1:]  # (B, N, C)

        convnext = model.vision_tower_aux(pixel_values.to(self.dtype), output_hidden_states=True)
        stages = convnext.hidden_states[1:]  # the first entry is the embedding
        size = stages[0].shape[-1]
        fine = torch.cat([F.interpolate(stage, size=(size, size), mode="bilinear") for stage in stages], dim=1)
        m, side = config.sub_patches_per_side, config.patches_per_side
        sub_patches = fine.unfold(2, m, m).unfold(3, m, m)  # (B, C', side, side, M, M)
        sub_patches = sub_patches.permute(0, 2, 3, 4, 5, 1).reshape(len(patches), side**2, m**2, -1)  # (B, N, M², C')

        mining = model.patch_info_mining
        query = mining.query(patches).unsqueeze(2)  # (B, N, 1, C)
        key, value = mining.key(sub_patches), mining.value(sub_patches)  # (B, N, M², C)
        weights = (query @ key.transpose(2, 3) / key.shape[-1] ** 0.5).softmax(dim=-1)
        return model.projector(patches + (weights @ value).squeeze(2))


class PlainArchitecture(MGMArchitecture):
    """Architecture of a plain MGM for the memory plan."""

    def build(self, dtype: torch.dtype) -> PlainMGM:
        with torch.device("meta"):
            model = PlainMGM(self.config).to(dtype)
        model.tie_weights()
        model.model.get_image_features = model.visual_tokens
        head = model.lm_head.weight
        model.lm_head.forward = lambda hidden, target: F.cross_entropy((hidden @ head.T).float(), target)
        return model
