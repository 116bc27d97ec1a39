"""Processors of transformers without the packages that only videos need: torchvision and, for SmolVLM, num2words."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import transformers
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import is_torchvision_available

from dj2mgm.errors import InputError
from dj2mgm.settings.models import WITHOUT_CHAT

VIDEO_PROCESSOR = "video_processor"


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
