"""Checks model folders, which are untrusted input, and copies their files of known names."""

import re
import stat
from collections.abc import Iterator
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.files import DEEPEST_NESTING, read_json
from dj2mgm.plain_files import MIB, check_plain, copy_plain, resolve_inside

CONFIGS = frozenset({"config.json", "generation_config.json"})
PROCESSOR = frozenset(
    {
        "chat_template.jinja",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)
# files of transformers' tokenizers (`vocab_files_names`) and their settings
TOKENIZER = frozenset(
    {
        "added_tokens.json",
        "bpe.codes",
        "merges.txt",
        "normalizer.json",
        "sentencepiece.bpe.model",
        "sentencepiece.model",
        "special_tokens_map.json",
        "spiece.model",
        "spm.model",
        "tekken.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
TERMS_FILES = re.compile(r"(license|notice|use_policy)([-_.][\w.-]*)?", re.I)  # files with the terms of use
FIX = "Correct the file, or download it again"
# weights, configuration, chat template and tokenizer, in the formats that this workflow loads
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
# weights, whose files may have any size
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf")
MOST_FILES = 10_000
LARGEST_FILE, LARGEST_CONFIG = 256 * MIB, 8 * MIB  # bytes of vocabularies, and of settings or templates
SETTINGS_FILES = re.compile(r".*config\.json|chat_template\..*|.*\.jinja|license.*|notice.*", re.I)

# Limits of the integers in a configuration by key; the first matching pattern counts. They are far above those of
# published models, and below the numbers at which a machine runs out of time or memory before a library complains.
NUMBER_LIMITS = (
    (re.compile(r".*(_ids?|_index|token|theta|base|seed|length|window\w*|scale\w*|factor|window_size)"), 1 << 31),
    (re.compile(r".*(layers?|blocks?|depths?|stages?|experts|heads?|groups)(_per_\w+)?"), 1 << 10),
    (re.compile(r".*(image|img|patch|crop|tile|kernel|stride).*"), 1 << 14),
    (re.compile(r".*(vocab|position_embeddings|positions).*"), 1 << 24),
)
OTHER_NUMBERS = 1 << 20
SIDE_KEYS = re.compile(r".*(edge|height|width|size)")  # keys of processors, in pixels
AREAS = re.compile(r"(min|max)_pixels")
LONGEST_SIDE, LARGEST_AREA = 1 << 13, 1 << 25
AREA_KEY = "temporal_patch_size"  # marks a processor whose edges are areas, as in Qwen's models
PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def check_model_folder(folder: Path) -> None:
    """Check a model folder before a library reads it."""
    for number, path in enumerate(sorted(folder.iterdir())):
        if number == MOST_FILES:
            raise InputError(f"{folder} has more than {MOST_FILES} files; name the folder of one model")
        _check_entry(path, folder)
    templates = folder / "additional_chat_templates"  # read by transformers
    if templates.is_dir():
        for path in templates.iterdir():
            check_plain(path, folder, LARGEST_CONFIG)
    for name in ("config.json", *PROCESSOR_CONFIGS):
        if (folder / name).is_file():
            check_config(folder / name)


def _check_entry(path: Path, folder: Path) -> None:
    if stat.S_ISDIR(resolve_inside(path, folder).lstat().st_mode):
        return
    check_plain(path, folder, None if path.suffix in WEIGHT_SUFFIXES else size_limit(path.name))


def size_limit(name: str) -> int:
    return LARGEST_CONFIG if SETTINGS_FILES.fullmatch(name) else LARGEST_FILE


def copy_model_files(source: Path, target: Path, names: frozenset[str]) -> None:
    """Copy the files with these names and the terms of use from one model folder to another."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if not path.is_dir() and (path.name in names or TERMS_FILES.fullmatch(path.name)):
            copy_plain(path, source, target / path.name, size_limit(path.name))


def check_config(path: Path) -> None:
    """Check the integers in a configuration of a model or a processor, at any depth."""
    limit_of = _limit_of_processor if path.name in PROCESSOR_CONFIGS else _limit_of_model
    try:
        for place, key, number, has_areas in _integers(read_json(path, remedy=FIX)):
            if abs(number) > (limit := limit_of(key, has_areas)):
                raise InputError(f"{path}: {place} is {str(number)[:40]}; at most {limit} is allowed. {FIX}")
    except (RecursionError, OverflowError, ValueError):  # ValueError: a number with thousands of digits
        raise InputError(f"{path}: it is nested too deeply, or has a number that is too large. {FIX}") from None


def _is_size(key: str) -> bool:
    return key.endswith("size") or any(pattern.fullmatch(key) for pattern, _ in NUMBER_LIMITS)


def _limit_of_model(key: str, has_areas: bool) -> int:
    return next((limit for pattern, limit in NUMBER_LIMITS if pattern.fullmatch(key)), OTHER_NUMBERS)


def _limit_of_processor(key: str, has_areas: bool) -> int:
    if AREAS.fullmatch(key) or (has_areas and key.endswith("edge")):
        return LARGEST_AREA
    return LONGEST_SIDE if SIDE_KEYS.fullmatch(key) else _limit_of_model(key, has_areas)


def _integers(
    value: object, place: str = "", key: str = "", has_areas: bool = False, depth: int = 0
) -> Iterator[tuple[str, str, float, bool]]:
    """Yield place, key and number, and whether an enclosing object has the key `AREA_KEY`.

    A value that is nested more than `DEEPEST_NESTING` levels deep raises RecursionError.
    """
    if depth > DEEPEST_NESTING:
        raise RecursionError
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _integers(
                item, f"{place}.{name}" if place else name, name, has_areas or AREA_KEY in value, depth + 1
            )
    elif isinstance(value, list):
        for item in value:
            yield from _integers(item, place, key, has_areas, depth + 1)
    elif isinstance(value, int) or (isinstance(value, float) and _is_size(key)):
        yield place, key, value, has_areas
