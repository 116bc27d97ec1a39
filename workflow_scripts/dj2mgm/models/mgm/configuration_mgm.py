"""Configuration of MGM: its three sub-models and the grid on which their features meet."""

from transformers import AutoConfig, CLIPVisionConfig, ConvNextConfig, PretrainedConfig


class MGMConfig(PretrainedConfig):
    """Configuration of `MGMForConditionalGeneration`.

    Args:
        text_config: configuration of any causal language model (Gemma for MGM-2B).
        vision_config: configuration of the CLIP tower, whose patch grid gives the number of visual tokens.
        vision_aux_config: configuration of the high-resolution ConvNeXt; all of its stages are used.
        image_size_aux: side in pixels of the input image, which is scaled down for the CLIP tower.
        image_token_id: token at the image's positions in `input_ids`.
        vision_feature_layer: index of the CLIP tower's hidden states that are used; the class token is dropped.
        **kwargs: arguments of `PretrainedConfig`.
    """

    model_type = "mgm"
    has_no_defaults_at_init = True  # the grids of transformers' default towers do not fit together
    sub_configs = {"text_config": AutoConfig, "vision_config": CLIPVisionConfig, "vision_aux_config": ConvNextConfig}

    def __init__(
        self,
        text_config=None,
        vision_config=None,
        vision_aux_config=None,
        image_size_aux: int = 768,
        image_token_id: int = 7,
        vision_feature_layer: int = -2,
        **kwargs,
    ):
        self.text_config = _make_sub_config(text_config, "gemma")
        self.vision_config = _make_sub_config(vision_config, "clip_vision_model")
        self.vision_aux_config = _make_sub_config(vision_aux_config, "convnext")
        self.image_size_aux = image_size_aux
        self.image_token_id = image_token_id
        self.vision_feature_layer = vision_feature_layer
        kwargs.setdefault("tie_word_embeddings", self.text_config.tie_word_embeddings)
        super().__init__(**kwargs)
        self._check_grids()

    @property
    def patches_per_side(self) -> int:
        return self.vision_config.image_size // self.vision_config.patch_size

    @property
    def num_image_tokens(self) -> int:
        """N, the number of CLIP patches; independent of the high resolution."""
        return self.patches_per_side**2

    @property
    def sub_patches_per_side(self) -> int:
        """M, the number of high-resolution features along one side of a CLIP patch."""
        return self.image_size_aux // self.vision_aux_config.patch_size // self.patches_per_side

    @property
    def aux_channels(self) -> int:
        return sum(self.vision_aux_config.hidden_sizes)

    def _check_grids(self) -> None:
        fine = self.image_size_aux // self.vision_aux_config.patch_size
        if self.image_size_aux % self.vision_aux_config.patch_size or fine % self.patches_per_side:
            raise ValueError(
                f"image_size_aux {self.image_size_aux}: its {fine} high-resolution features per side must be a "
                f"multiple of the CLIP tower's {self.patches_per_side} patches per side"
            )


def _make_sub_config(value, default_type: str):
    if isinstance(value, dict):
        value = dict(value)
        return AutoConfig.for_model(value.pop("model_type", default_type), **value)
    return value if value is not None else AutoConfig.for_model(default_type)


__all__ = ["MGMConfig"]
