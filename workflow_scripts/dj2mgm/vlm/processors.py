"""Processors of transformers without the packages that only videos need: torchvision and, for SmolVLM, num2words.

Model folders of third parties are checked first, and their errors become one sentence.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import is_torchvision_available

from dj2mgm.config.chat_templates import WITHOUT_CHAT
from dj2mgm.errors import InputError
from dj2mgm.files import FIX, read_json
from dj2mgm.model_folders import PROCESSOR, TOKENIZER, copy_model_files

VIDEO = "video_processor"


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
    if VIDEO not in stock.get_attributes():
        return AutoProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    parameter = inspect.signature(stock.__init__).parameters.get(VIDEO)
    required = parameter is not None and parameter.default is inspect.Parameter.empty
    none = {VIDEO: None} if required else {}
    try:
        return without_video(stock).from_pretrained(folder, backend="pil", trust_remote_code=False, **none)
    except TypeError:  # some processors cannot be created without a video processor
        if not is_torchvision_available():
            raise
        return AutoProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)


def without_video(stock: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """Return a processor's class without its video processor, whose parts `get_attributes` lists."""
    if VIDEO not in stock.get_attributes():
        return stock
    processing_smolvlm.num2words = processing_smolvlm.num2words or str  # otherwise SmolVLM's raises ImportError
    attributes = [name for name in stock.get_attributes() if name != VIDEO]
    changes = {
        "get_attributes": classmethod(lambda cls: attributes),
        "__module__": stock.__module__,
        VIDEO: SimpleNamespace(num_frames=None, fps=None, merge_size=2),  # for SmolVLM's chat template
    }
    return type(stock.__name__, (stock,), changes)


REMEDY = "fix the folder, or download it again"
UNSUPPORTED = (NotImplementedError, AttributeError, ImportError)  # the cause is missing code, not a damaged file
PANIC = "PanicException"  # raised by libraries in Rust, e.g. by a tokenizer whose pattern takes too many steps
LONGEST = 200  # characters of a library's own message that are shown
ATTENTION = (None, "eager", "sdpa")


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
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        remedy = "models of its kind are not supported" if isinstance(error, UNSUPPORTED) else REMEDY
        raise InputError(f"{folder} cannot be used ({message[:LONGEST]}); {remedy}") from None


def copy_processor(base: Path, folder: Path) -> None:
    """Copy processor, tokenizer and license unchanged, including files not used here, such as a video processor's."""
    copy_model_files(base, folder, PROCESSOR | TOKENIZER)


def check_folder(folder: Path) -> None:
    """Check that a model folder is safe to load.

    It must not contain a LoRA adapter, which transformers would load without a message; name an attention
    implementation, which could be code from a hub; or refer to weights outside the folder.
    """
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} contains an adapter (adapter_config.json); merge it first, or move it elsewhere")
    config = read_json(folder / "config.json", remedy=FIX)
    for values in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("attn_implementation", "_attn_implementation"):
            if values.get(key) not in ATTENTION:
                raise InputError(f"{folder}/config.json: {key} is {values[key]!r}; delete it, or make it sdpa")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index, remedy=REMEDY).get("weight_map")
        if not isinstance(shards, dict) or any("/" in str(name) for name in shards.values()):
            raise InputError(f"{index}: weight_map must name files of this folder; {REMEDY}")
