"""Family of the vision-language models that transformers loads; implements `dj2mgm/models/vision_language.py`.

Chat template, image tokens and parts come from the model's own processor, configuration and class.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, SimpleNamespace

import torch
import transformers
from torch import nn
from torch._ops import OpOverloadPacket
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PretrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import is_torchvision_available

from dj2mgm.cli.messages import note
from dj2mgm.compute import select_device
from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import (
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    WEIGHTS_INDEX,
    copy_model_files,
    read_shard_names,
)
from dj2mgm.models.loss import LanguageModelHead, compute_answer_loss, compute_loss_and_gradient, find_answer_positions
from dj2mgm.models.trained_weights import load_stage_weights
from dj2mgm.models.vision_language import ModelParts
from dj2mgm.models.vlm.encoder import PrefixEncoder, ProcessorEncoder
from dj2mgm.models.vlm.packed_images import make_tower_inputs, move_to_device, use_packed_attention, use_tower_inputs
from dj2mgm.models.vlm.vlm_generator import TransformersGenerator
from dj2mgm.settings.models import WITHOUT_CHAT
from dj2mgm.storage.files import FIX_FILE_REMEDY, read_json

VIDEO_PROCESSOR = "video_processor"
REMEDY = "fix the folder, or download it again"
UNSUPPORTED_ERRORS = (NotImplementedError, AttributeError, ImportError)  # the cause is missing code, not a damaged file
RUST_PANIC = "PanicException"  # raised by libraries in Rust, e.g. by a tokenizer whose pattern takes too many steps
MAX_MESSAGE_LENGTH = 200  # characters of a library's own message that are shown
ATTENTION = (None, "eager", "sdpa")
# configuration keys that scale the logits or their inputs
SCALE_KEYS = ("logits_scaling", "logit_scale", "logits_mup_width_multiplier")


def load_processor(folder: Path) -> ProcessorMixin:
    """Load the processor of a model folder with the Pillow backend, whose pixels are the same on every machine."""
    kind = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
    if kind not in PROCESSOR_MAPPING_NAMES:
        raise InputError(f"{folder}: transformers has no processor of images and texts for models of type {kind}")
    processor = _load(folder, getattr(transformers, PROCESSOR_MAPPING_NAMES[kind]))
    if not processor.chat_template and kind not in WITHOUT_CHAT:
        raise InputError(f"{folder}: its processor has no chat template, so prompts cannot be written")
    return processor


def _load(folder: Path, stock: type[ProcessorMixin]) -> ProcessorMixin:
    if VIDEO_PROCESSOR not in stock.get_attributes():
        return AutoProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    parameter = inspect.signature(stock.__init__).parameters.get(VIDEO_PROCESSOR)
    required = parameter is not None and parameter.default is inspect.Parameter.empty
    none = {VIDEO_PROCESSOR: None} if required else {}
    try:
        return remove_video_processor(stock).from_pretrained(folder, backend="pil", trust_remote_code=False, **none)
    except TypeError:  # some processors cannot be created without a video processor
        if not is_torchvision_available():
            raise
        return AutoProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)


def remove_video_processor(stock: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """Return a processor's class without its video processor, whose parts `get_attributes` lists."""
    if VIDEO_PROCESSOR not in stock.get_attributes():
        return stock
    processing_smolvlm.num2words = processing_smolvlm.num2words or str  # otherwise SmolVLM's raises ImportError
    attributes = [name for name in stock.get_attributes() if name != VIDEO_PROCESSOR]
    changes = {
        "get_attributes": classmethod(lambda cls: attributes),
        "__module__": stock.__module__,
        VIDEO_PROCESSOR: SimpleNamespace(num_frames=None, fps=None, merge_size=2),  # for SmolVLM's chat template
    }
    return type(stock.__name__, (stock,), changes)


@contextmanager
def folder_errors(folder: Path) -> Iterator[None]:
    """Raise every error of the enclosed code, which reads the folder, as an `InputError` about the folder."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except InputError as error:
        sentence = str(error)
        raise InputError(sentence if str(folder) in sentence else f"{folder}: {sentence}; {REMEDY}") from None
    except BaseException as error:  # from transformers, tokenizers, safetensors, Jinja, Pillow
        if not isinstance(error, Exception) and type(error).__name__ != RUST_PANIC:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        remedy = "models of its kind are not supported" if isinstance(error, UNSUPPORTED_ERRORS) else REMEDY
        raise InputError(f"{folder} cannot be used ({message[:MAX_MESSAGE_LENGTH]}); {remedy}") from None


def check_vlm_folder(folder: Path) -> None:
    """Check that a model folder is safe to load.

    It must not contain a LoRA adapter, which transformers would load without a message; name an attention
    implementation, which could be code from a hub; or refer to weights outside the folder.
    """
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} contains an adapter (adapter_config.json); merge it first, or move it elsewhere")
    config = read_json(folder / "config.json", remedy=FIX_FILE_REMEDY)
    for values in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("attn_implementation", "_attn_implementation"):
            if values.get(key) not in ATTENTION:
                raise InputError(f"{folder}/config.json: {key} is {values[key]!r}; delete it, or make it sdpa")
    if (folder / WEIGHTS_INDEX).exists():
        read_shard_names(folder / WEIGHTS_INDEX)


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


def use_chunked_loss(model: PreTrainedModel) -> None:
    """Let the model compute its loss at supervised positions only, in chunks; change it in place.

    Parameters keep their names. A head that does more than multiply hidden states with its weight and cap the logits is
    refused.
    """
    head, text = model.get_output_embeddings(), model.config.get_text_config()
    is_scaled = any(getattr(text, key, None) not in (None, 0, 1) for key in SCALE_KEYS)
    softcap = getattr(text, "final_logit_softcapping", None)
    if type(head) is not nn.Linear or head.bias is not None or is_scaled or not _is_product(model, head, softcap):
        raise InputError(
            f"models of type {model.config.model_type} are not supported: their logits are not the product of hidden "
            "states and the head's weight"
        )
    head.__class__ = LanguageModelHead
    head.softcap = softcap
    head.loss_and_gradient = lambda logits, targets: compute_loss_and_gradient(logits, targets, softcap)
    original_forward, take_tower_inputs = model.forward, use_tower_inputs(model)

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
            return original_forward(input_ids=input_ids, **kwargs)
        kwargs["use_cache"] = False
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        if answer_positions is None:
            answer_positions = find_answer_positions(labels)
        loss = compute_answer_loss(self.lm_head, hidden, labels, answer_positions, num_items_in_batch)
        return CausalLMOutput(loss=loss)

    model.forward = MethodType(forward, model)
    model.accepts_loss_kwargs = True  # otherwise Trainer does not pass num_items_in_batch


@torch.no_grad()
def _is_product(model: PreTrainedModel, head: nn.Linear, softcap: float | None) -> bool:
    """Return whether logits are the last hidden states times the head's weight, capped by `softcap`.

    The check is skipped, with the result True, for a weight that ZeRO-3 partitions or that is on the meta device.
    """
    if hasattr(head.weight, "ds_id") or head.weight.is_meta:
        return True
    ids = torch.arange(1, 5, device=model.device)[None]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    product = head(hidden)
    bounded = product if softcap is None else softcap * (product / softcap).tanh()
    return torch.allclose(model(input_ids=ids, use_cache=False).logits, bounded, rtol=1e-2, atol=1e-2)


def copy_processor(base: Path, folder: Path) -> None:
    """Copy processor, tokenizer and license unchanged, including files not used here, such as a video processor's."""
    copy_model_files(base, folder, PROCESSOR_FILES | TOKENIZER_FILES)
