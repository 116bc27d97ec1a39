"""A model's folder that somebody else has made: what it may not hold, and whatever is wrong with it in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dj2mgm.errors import InputError
from dj2mgm.files import FIX, read_json
from dj2mgm.model_folders import PROCESSOR, TOKENIZER, copy_model_files

REMEDY = "fix the folder, or download it again"
UNSUPPORTED = (NotImplementedError, AttributeError, ImportError)  # where code is at fault rather than a file
PANIC = "PanicException"  # of libraries in Rust, such as a tokenizer whose pattern takes too many steps
LONGEST = 200  # characters of a library's own message
ATTENTION = (None, "eager", "sdpa")


@contextmanager
def faults_of(folder: Path) -> Iterator[None]:
    """Around what reads the folder: an error of whatever kind is the folder's."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except InputError as error:
        sentence = str(error)
        raise InputError(sentence if str(folder) in sentence else f"{folder}: {sentence}; {REMEDY}") from None
    except BaseException as error:  # of transformers, tokenizers, safetensors, Jinja, Pillow
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        remedy = "models of its kind are not supported" if isinstance(error, UNSUPPORTED) else REMEDY
        raise InputError(f"{folder} cannot be used ({said[:LONGEST]}); {remedy}") from None


def copy_processor(base: Path, folder: Path) -> None:
    """Copy processor, tokenizer and terms unchanged, also files for other machines, such as a video processor's."""
    copy_model_files(base, folder, PROCESSOR | TOKENIZER)


def check_folder(folder: Path) -> None:
    """
    Raises:
        InputError: it holds a LoRA adapter, which transformers would add in silence; it names an implementation of
            attention, which might be code from a hub; or its weights lie outside of it.
    """
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} holds an adapter (adapter_config.json); merge it first, or move it elsewhere")
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
