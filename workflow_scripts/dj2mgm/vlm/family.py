"""Any vision-language model of transformers as training sees it (dj2mgm/vision_language.py).

Chat format, image tokens and parts come from the model's own processor, configuration and class.
"""

import inspect
import sys
from pathlib import Path
from types import MethodType

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from dj2mgm.compute import default_device
from dj2mgm.errors import InputError
from dj2mgm.messages import note
from dj2mgm.mgm.loss import LanguageModelHead, loss_and_gradient
from dj2mgm.mgm.modeling_mgm import positions_of_answers
from dj2mgm.mgm.weights import add_trained
from dj2mgm.vision_language import Parts
from dj2mgm.vlm.encoder import ProcessorEncoder
from dj2mgm.vlm.folder import REMEDY, check_folder, copy_processor, faults_of
from dj2mgm.vlm.generation import Generator
from dj2mgm.vlm.packed_images import on_device, tower_inputs, use_packed_attention, use_tower_inputs
from dj2mgm.vlm.prefix_encoder import PrefixEncoder
from dj2mgm.vlm.processors import load_processor


class TransformersVLM:
    def __init__(self, folder: Path):
        check_folder(folder)
        self.folder = folder
        with faults_of(folder):
            self.config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            self.processor = load_processor(folder)
        self.tower_inputs = tower_inputs(self.config)

    def encoder(self, template: str | dict, max_length: int) -> "ProcessorEncoder":
        """`template` is not looked at: the processor has its own."""
        with faults_of(self.folder):
            encoder = encoder_class(self.processor)(self.processor, self.config.image_token_id, max_length)
            encoder.tower_inputs = self.tower_inputs
            encoder.try_out()
        return encoder

    def load(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        if attention == "flash_attention_2" and sees_images_both_ways(self.config.model_type):
            note(f"models of type {self.config.model_type} need a mask, which FlashAttention has not: they run by sdpa")
            attention = "sdpa"
        if attention == "sdpa" and not supports_sdpa(self.config):
            note(f"models of type {self.config.model_type} have no attention but eager, which holds all of its weights")
            attention = "eager"
        return make_trainable(self._loaded(dtype, attn_implementation={"text_config": attention}))

    def trained(self, stage: Path | None, dtype: torch.dtype | str) -> PreTrainedModel:
        model = self._loaded(dtype)
        return model if stage is None else add_trained(model, stage)

    def generator(self, stage: Path | None, device: str | torch.device | None) -> Generator:
        device = torch.device(device or default_device())
        model = self.trained(stage, torch.bfloat16 if device.type == "cuda" else torch.float32)
        return Generator(model.to(device), self.encoder("", max_length=sys.maxsize))

    def save_processor(self, folder: Path) -> None:
        copy_processor(self.folder, folder)

    def _loaded(self, dtype: torch.dtype | str, **more) -> PreTrainedModel:
        with faults_of(self.folder):
            model, found = AutoModelForImageTextToText.from_pretrained(
                self.folder,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **more,
            )
        if missing := sorted(found["missing_keys"]):
            raise InputError(f"{self.folder} lacks weights: {missing[0]} and others, {len(missing)} in all; {REMEDY}")
        use_packed_attention(model)
        return model

    def inputs(self, batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        if self.tower_inputs:
            return {name: on_device(name, value, device) for name, value in batch.items()}
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    @staticmethod
    def parts(model: nn.Module) -> Parts:
        [found] = [module for module in model.modules() if isinstance(module, PreTrainedModel) and is_whole(module)]
        tower = found.get_encoder(modality="image")
        lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList)]
        return Parts(
            towers=max(lists, key=len, default=[]),
            between=[],
            decoder=found.get_decoder().layers,
            head=found.get_output_embeddings(),
            called=[],
            fresh=[],
        )


def encoder_class(processor: ProcessorMixin) -> type[ProcessorEncoder]:
    return ProcessorEncoder if processor.chat_template else PrefixEncoder


def supports_sdpa(config: PretrainedConfig) -> bool:
    kind = type(config.get_text_config())  # of some models, none that transformers knows by itself
    return kind not in MODEL_MAPPING or MODEL_MAPPING[kind]._supports_sdpa


def is_whole(model: PreTrainedModel) -> bool:
    """Whether it has a language model's head."""
    return isinstance(model.get_output_embeddings(), LanguageModelHead)


def sees_images_both_ways(kind: str) -> bool:
    """Whether tokens of an image see those to their right: transformers' FlashAttention leaves that out in silence."""
    stock = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    return "block_sequence_ids" in inspect.getsource(inspect.getmodule(getattr(transformers, stock)))


def make_trainable(model: PreTrainedModel) -> PreTrainedModel:
    """In place: with the loss in parts, and with gradients for the language model's input.

    Recomputation needs something whose gradient is asked for, and LoRA has nothing so early. transformers would ask for
    those of the towers' inputs, too, whose layers would then keep all that a backward pass needs.
    """
    compute_loss_in_parts(model)
    model.get_input_embeddings().register_forward_hook(lambda module, given, output: output.requires_grad_(True))
    model.enable_input_require_grads = lambda: None
    return model


# keys of configurations that scale logits, or what they are computed from
SCALES = ("logits_scaling", "logit_scale", "logits_mup_width_multiplier")


def compute_loss_in_parts(model: PreTrainedModel) -> None:
    """In place: given labels, the model computes its loss at supervised positions only, without ever holding logits for
    all of them (mgm/loss.py). Names of parameters stay as they are.

    Raises:
        InputError: its head does more than multiply, and bound the products.
    """
    head, text = model.get_output_embeddings(), model.config.get_text_config()
    scaled = any(getattr(text, key, None) not in (None, 0, 1) for key in SCALES)
    softcap = getattr(text, "final_logit_softcapping", None)
    if type(head) is not nn.Linear or head.bias is not None or scaled or not _is_product(model, head, softcap):
        raise InputError(f"models of type {model.config.model_type} are not supported: their logits are not a product")
    head.__class__ = LanguageModelHead
    head.softcap = softcap
    head.loss_and_gradient = lambda logits, targets: loss_and_gradient(logits, targets, softcap)
    plain, take_tower_inputs = model.forward, use_tower_inputs(model)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        answer_positions: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ):
        take_tower_inputs(kwargs)
        if labels is None:
            return plain(input_ids=input_ids, **kwargs)
        kwargs["use_cache"] = False
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        if answer_positions is None:
            answer_positions = positions_of_answers(labels)
        targets = labels.flatten()[answer_positions + 1]
        total = self.lm_head(hidden.flatten(0, 1).index_select(0, answer_positions), targets)
        return CausalLMOutput(loss=total / (max(1, len(targets)) if num_items_in_batch is None else num_items_in_batch))

    model.forward = MethodType(forward, model)
    model.accepts_loss_kwargs = True  # else Trainer does not say how many tokens a step's loss is over


@torch.no_grad()
def _is_product(model: PreTrainedModel, head: nn.Linear, softcap: float | None) -> bool:
    """Whether logits are the last hidden states times the head's weight, bounded by `softcap`.

    Where ZeRO-3 divides it, or there are only shapes, nobody looks.
    """
    if hasattr(head.weight, "ds_id") or head.weight.is_meta:
        return True
    ids = torch.arange(1, 5, device=model.device)[None]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    product = head(hidden)
    bounded = product if softcap is None else softcap * (product / softcap).tanh()
    return torch.allclose(model(input_ids=ids, use_cache=False).logits, bounded, rtol=1e-2, atol=1e-2)
