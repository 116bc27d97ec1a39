"""Model folders, which are untrusted input: the files to read and copy, and limits of sizes and numbers."""

import re
import stat
from collections.abc import Iterator
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.files import read_json
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
# the vocabularies that transformers' tokenizers name (`vocab_files_names`), and what stands beside them
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
TERMS = re.compile(r"(license|notice|use_policy)([-_.][\w.-]*)?", re.I)  # under which others pass a model on
FIX = "Correct the file, or download it again"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf")  # by suffix
MOST_FILES = 10_000
LARGEST, LARGEST_CONFIG = 256 * MIB, 8 * MIB  # of vocabularies; of files that hold settings or a template
SETTINGS = re.compile(r".*config\.json|chat_template\..*|.*\.jinja|license.*|notice.*", re.I)

# Limits of the integers in a configuration, by key; the first pattern that matches counts. They are far above those of
# published models, and below the numbers with which a machine runs out of time or memory before a library complains.
NUMBERS = (
    (re.compile(r".*(_ids?|_index|token|theta|base|seed|length|window\w*|scale\w*|factor|window_size)"), 1 << 31),
    (re.compile(r".*(layers?|blocks?|depths?|stages?|experts|heads?|groups)(_per_\w+)?"), 1 << 10),
    (re.compile(r".*(image|img|patch|crop|tile|kernel|stride).*"), 1 << 14),
    (re.compile(r".*(vocab|position_embeddings|positions).*"), 1 << 24),
)
OTHERS = 1 << 20
DEEPEST = 32
SIDES = re.compile(r".*(edge|height|width|size)")  # of processors, in pixels
AREAS = re.compile(r"(min|max)_pixels")
LONGEST_SIDE, LARGEST_AREA = 1 << 13, 1 << 25
OF_AREAS = "temporal_patch_size"  # a key of processors whose edges are areas: those of Qwen's models
PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def check_model_folder(folder: Path) -> None:
    """Check a model folder before a library reads it.

    Raises:
        InputError: a file is a link out of the folder, is not a regular file, or is larger than such files are; or a
            number of a configuration is larger than a model has.
    """
    for number, path in enumerate(sorted(folder.iterdir())):
        if number == MOST_FILES:
            raise InputError(f"{folder} holds more than {MOST_FILES} files; name the folder of one model")
        _check_entry(path, folder)
    templates = folder / "additional_chat_templates"  # which transformers reads
    if templates.is_dir():
        for path in templates.iterdir():
            check_plain(path, folder, LARGEST_CONFIG)
    for name in ("config.json", *PROCESSOR_CONFIGS):
        if (folder / name).is_file():
            check_config(folder / name)


def _check_entry(path: Path, folder: Path) -> None:
    if stat.S_ISDIR(resolve_inside(path, folder).lstat().st_mode):
        return
    check_plain(path, folder, None if path.suffix in WEIGHTS else size_limit(path.name))


def size_limit(name: str) -> int:
    return LARGEST_CONFIG if SETTINGS.fullmatch(name) else LARGEST


def copy_model_files(source: Path, target: Path, names: frozenset[str]) -> None:
    """Copy the files of these names, and the model's terms, from one model folder to another.

    Raises:
        InputError: one is not a regular file inside `source`, or is too large.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if not path.is_dir() and (path.name in names or TERMS.fullmatch(path.name)):
            copy_plain(path, source, target / path.name, size_limit(path.name))


def check_config(path: Path) -> None:
    """Check the integers in the configuration of a model or a processor, at any depth.

    Raises:
        InputError: names the file and the key of one that is larger than models have it.
    """
    limit_of = _limit_of_processor if path.name in PROCESSOR_CONFIGS else _limit_of_model
    try:
        for place, key, number, of_areas in _integers(read_json(path, remedy=FIX)):
            if abs(number) > (limit := limit_of(key, of_areas)):
                raise InputError(f"{path}: {place} is {str(number)[:40]}; models have at most {limit} there. {FIX}")
    except (RecursionError, OverflowError, ValueError):  # of a number with thousands of digits
        raise InputError(f"{path}: it is nested too deeply, or holds a number that is too large. {FIX}") from None


def _is_size(key: str) -> bool:
    return key.endswith("size") or any(pattern.fullmatch(key) for pattern, _ in NUMBERS)


def _limit_of_model(key: str, of_areas: bool) -> int:
    return next((limit for pattern, limit in NUMBERS if pattern.fullmatch(key)), OTHERS)


def _limit_of_processor(key: str, of_areas: bool) -> int:
    if AREAS.fullmatch(key) or (of_areas and key.endswith("edge")):
        return LARGEST_AREA
    return LONGEST_SIDE if SIDES.fullmatch(key) else _limit_of_model(key, of_areas)


def _integers(
    value: object, place: str = "", key: str = "", of_areas: bool = False, depth: int = 0
) -> Iterator[tuple[str, str, float, bool]]:
    """Yield place, key, number, and whether an object around it has the key `OF_AREAS`.

    Raises:
        RecursionError: the value is nested more than `DEEPEST` levels deep.
    """
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _integers(
                item, f"{place}.{name}" if place else name, name, of_areas or OF_AREAS in value, depth + 1
            )
    elif isinstance(value, list):
        for item in value:
            yield from _integers(item, place, key, of_areas, depth + 1)
    elif isinstance(value, int) or (isinstance(value, float) and _is_size(key)):
        yield place, key, value, of_areas
