"""Checks of model folders of third parties before they are read, and their errors in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import WEIGHTS_INDEX, read_shard_names
from dj2mgm.storage.files import FIX_FILE_REMEDY, read_json

REMEDY = "fix the folder, or download it again"
UNSUPPORTED_ERRORS = (NotImplementedError, AttributeError, ImportError)  # the cause is missing code, not a damaged file
RUST_PANIC = "PanicException"  # raised by libraries in Rust, e.g. by a tokenizer whose pattern takes too many steps
MAX_MESSAGE_LENGTH = 200  # characters of a library's own message that are shown
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
