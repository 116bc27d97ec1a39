"""Family of the vision-language models that transformers loads; implements `dj2mgm/models/vision_language.py`.

Chat template, image tokens and parts come from the model's own processor, configuration and class.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn
from torch._ops import OpOverloadPacket
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from dj2mgm.cli.messages import note
from dj2mgm.compute import select_device
from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import PROCESSOR_FILES, TOKENIZER_FILES, copy_model_files
from dj2mgm.models.loss import LanguageModelHead
from dj2mgm.models.trained_weights import load_stage_weights
from dj2mgm.models.vision_language import ModelParts
from dj2mgm.models.vlm.chunked_loss import use_chunked_loss
from dj2mgm.models.vlm.encoder import ProcessorEncoder
from dj2mgm.models.vlm.folder_checks import REMEDY, check_vlm_folder, folder_errors
from dj2mgm.models.vlm.packed_images import make_tower_inputs, move_to_device, use_packed_attention
from dj2mgm.models.vlm.prefix_encoder import PrefixEncoder
from dj2mgm.models.vlm.processors import load_processor
from dj2mgm.models.vlm.vlm_generator import TransformersGenerator


class TransformersFamily:
    """Vision-language model of transformers in a folder."""

    has_stock_class = True

    def __init__(self, folder: Path):
        check_vlm_folder(folder)
        self.folder = folder
        with folder_errors(folder):
            self.config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            self.processor = load_processor(folder)
        self.tower_inputs = make_tower_inputs(self.config)

    def make_encoder(self, template: str | dict, max_length: int) -> "ProcessorEncoder":
        """Return the encoder; `template` is ignored, because the processor has its own chat template."""
        encoder_class = ProcessorEncoder if self.processor.chat_template else PrefixEncoder
        with folder_errors(self.folder):
            return encoder_class(self.processor, self.config.image_token_id, max_length, self.tower_inputs)

    def load(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        if attention == "flash_attention_2" and has_bidirectional_images(self.config.model_type):
            note(
                f"models of type {self.config.model_type} need an attention mask, which FlashAttention does not "
                "support; sdpa is used"
            )
            attention = "sdpa"
        if attention == "sdpa" and not supports_sdpa(self.config):
            note(
                f"models of type {self.config.model_type} support eager attention only, which stores all attention "
                "weights"
            )
            attention = "eager"
        return make_trainable(self._load_model(dtype, attn_implementation={"text_config": attention}))

    def load_trained_model(self, stage: Path | None, dtype: torch.dtype | str) -> PreTrainedModel:
        model = self._load_model(dtype)
        return model if stage is None else load_stage_weights(model, stage)

    def make_generator(self, stage: Path | None, device: str | torch.device | None) -> TransformersGenerator:
        device = torch.device(device or select_device())
        model = self.load_trained_model(stage, torch.bfloat16 if device.type == "cuda" else torch.float32)
        return TransformersGenerator(model.to(device), self.make_encoder("", max_length=sys.maxsize))

    def save_processor(self, folder: Path) -> None:
        copy_processor(self.folder, folder)

    def _load_model(self, dtype: torch.dtype | str, **options) -> PreTrainedModel:
        with folder_errors(self.folder):
            model, loading_info = AutoModelForImageTextToText.from_pretrained(
                self.folder,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        if missing := sorted(loading_info["missing_keys"]):
            raise InputError(f"{self.folder}: {len(missing)} weights are missing, the first is {missing[0]}; {REMEDY}")
        use_packed_attention(model)
        return model

    def prepare_inputs(self, batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        if self.tower_inputs:
            return {name: move_to_device(name, value, device) for name, value in batch.items()}
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    @staticmethod
    def find_parts(model: nn.Module) -> ModelParts:
        [vlm] = [module for module in model.modules() if isinstance(module, PreTrainedModel) and is_whole(module)]
        tower = vlm.get_encoder(modality="image")
        lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList)]
        return ModelParts(
            towers=max(lists, key=len, default=[]),
            compiled_tower_modules=[],
            decoder=vlm.get_decoder().layers,
            head=vlm.get_output_embeddings(),
            externally_read=[],
            initialized_in_stage_1=[],
        )


def supports_sdpa(config: PretrainedConfig) -> bool:
    kind = type(config.get_text_config())  # some models have one that transformers does not register
    return kind not in MODEL_MAPPING or MODEL_MAPPING[kind]._supports_sdpa


def is_whole(model: PreTrainedModel) -> bool:
    """Return whether a model includes the language model's head."""
    return isinstance(model.get_output_embeddings(), LanguageModelHead)


def has_bidirectional_images(kind: str) -> bool:
    """Return whether an image's tokens attend to each other in both directions.

    transformers ignores this without a warning under FlashAttention.
    """
    return "block_sequence_ids" in read_model_code(kind)


def build_substitute_operations(kind: str) -> dict[OpOverloadPacket, Callable[[torch.Tensor], torch.Tensor]]:
    """Map operations that read values of images to substitutes, because the memory plan has no images.

    SmolVLM and models with its code drop tiles that have black pixels only; they compare numbers of pixels (`!=`). The
    plan assumes that no tile is black.
    """
    if "nb_values_per_image" not in read_model_code(kind):
        return {}
    return {torch.ops.aten.ne: lambda counts: torch.ones(counts.shape, dtype=torch.bool)}


def read_model_code(kind: str) -> str:
    """Return the source of transformers' module for a type of models."""
    stock = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    return inspect.getsource(inspect.getmodule(getattr(transformers, stock)))


def make_trainable(model: PreTrainedModel) -> PreTrainedModel:
    """Compute the loss in chunks and require gradients of the language model's input; change the model in place.

    Activation checkpointing needs an input that requires a gradient, and LoRA has no trainable parameter that early.
    transformers' own method would also require gradients of the towers' inputs, so that their layers would keep all
    activations for a backward pass.
    """
    use_chunked_loss(model)
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    model.enable_input_require_grads = lambda: None
    return model


def copy_processor(base: Path, folder: Path) -> None:
    """Copy processor, tokenizer and license unchanged, including files not used here, such as a video processor's."""
    copy_model_files(base, folder, PROCESSOR_FILES | TOKENIZER_FILES)
