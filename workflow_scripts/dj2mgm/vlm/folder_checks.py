"""Checks of model folders from third parties, whose errors become one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dj2mgm.errors import InputError
from dj2mgm.files import FIX, read_json
from dj2mgm.model_folders import PROCESSOR, TOKENIZER, copy_model_files

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

    Raises:
        InputError: The folder contains a LoRA adapter, which transformers would load without a message; names an
            attention implementation, which could be code from a hub; or refers to weights outside the folder.
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
