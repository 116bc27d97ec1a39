"""Folders of models, which are untrusted input: where they are, checks, and copies of their files of known names."""

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.settings.config_files import read_json_config
from dj2mgm.settings.models import WITHOUT_CHAT
from dj2mgm.storage.files import MAX_NESTING, MIB, check_plain, copy_plain, read_json, resolve_inside

COMMIT = re.compile("[0-9a-f]{40}")  # Git names contents as it names commits


def is_folder_path(part: str) -> bool:
    """Return whether a part of a model is named by a folder, not by a hub id (`owner/name` or `name`)."""
    return part.startswith((".", "/", "~", "model_zoo/")) or part.count("/") > 1


def find_cached_snapshot(hub_id: str, kind: str) -> Path | None:
    """Return the folder of a repository in the hub's cache on this machine, or None if it is not there.

    The cache's layout is documented (https://huggingface.co/docs/huggingface_hub/guides/manage-cache). Not every
    environment that reads configurations has the hub's library.

    Args:
        hub_id: id of the repository.
        kind: `models` or `datasets`.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", Path(os.environ.get("HF_HOME", default), "hub"))).expanduser()
    repository = cache / f"{kind}--{hub_id.replace('/', '--')}"
    main = repository / "refs/main"
    commit = main.read_bytes().decode("ascii", errors="replace") if main.is_file() else ""
    snapshot = repository / "snapshots" / commit
    return snapshot if COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def find_model(part: str) -> str:
    """Return the folder of a model: in the hub's cache if it has the hub id, otherwise as it is named."""
    if is_folder_path(part) or os.path.isdir(part):
        return part
    return str(find_cached_snapshot(part, "models") or part)


CONFIG_FILES = frozenset({"config.json", "generation_config.json"})
PROCESSOR_FILES = frozenset(
    {
        "chat_template.jinja",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)
# files of transformers' tokenizers (`vocab_files_names`) and their settings
TOKENIZER_FILES = frozenset(
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
TERMS_FILES = re.compile(r"(license|notice|use_policy)([-_.][\w.-]*)?", re.I)
FIX_REMEDY = "Correct the file, or download it again"
# weights, configuration, chat template and tokenizer, in the formats that this workflow loads
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
# weights, whose files may have any size
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf")
POINTER_PROBLEM = "is a pointer of Git LFS, not the file itself"
LFS_POINTER = b"version https://git-lfs.github.com/"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"  # in one file, or in shards
SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
LENGTH_BYTES, MAX_HEADER_BYTES = 8, 100_000_000  # of safetensors
MAX_PARSED_BYTES = 4 * MIB  # larger JSON files, such as vocabularies, are only checked at their ends
# files of each part in a model's folder: alternatives, the usual one first
REQUIRED_FILES = {
    "weights": ((WEIGHTS,), (WEIGHTS_INDEX,)),
    "config": (("config.json",),),
    "tokenizer": (
        *(("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",), ("spiece.model",)),
        *(("sentencepiece.bpe.model",), ("vocab.txt",), ("tekken.json",)),
    ),
    "image processor": (("processor_config.json",), ("preprocessor_config.json",)),
}
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
TEMPLATE_SETTINGS = ("processor_config.json", "tokenizer_config.json")  # may have the key chat_template
MAX_FILES = 10_000
MAX_FILE_BYTES, MAX_CONFIG_BYTES = 256 * MIB, 8 * MIB  # bytes of vocabularies, and of settings or templates
SETTINGS_FILES = re.compile(r".*config\.json|chat_template\..*|.*\.jinja|license.*|notice.*", re.I)

# Limits of the integers in a configuration by key; the first matching pattern counts. They are far above the numbers
# of published models, and below the numbers at which a machine runs out of time or memory before a library complains.
NUMBER_LIMITS = (
    (re.compile(r".*(_ids?|_index|token|theta|base|seed|length|window\w*|scale\w*|factor|window_size)"), 1 << 31),
    (re.compile(r".*(layers?|blocks?|depths?|stages?|experts|heads?|groups)(_per_\w+)?"), 1 << 10),
    (re.compile(r".*(image|img|patch|crop|tile|kernel|stride).*"), 1 << 14),
    (re.compile(r".*(vocab|position_embeddings|positions).*"), 1 << 24),
)
OTHER_NUMBERS = 1 << 20
# numbers without which there is no model; other numbers may be 0 or negative, such as `vision_feature_layer`
POSITIVE_NUMBERS = re.compile(
    "hidden_sizes?|intermediate_size|vocab_size|image_size|patch_size|(temporal_patch|spatial_merge|merge)_size|"
    "num_(hidden_layers|attention_heads|key_value_heads|heads|channels)|embed_dim|depths?|in_channels|d_model|"
    "n_(embd|layer|head)"
)
SIDE_KEYS = re.compile(r".*(edge|height|width|size)")  # keys of processors, in pixels
AREA_LIMIT_KEY = re.compile(r"(min|max)_pixels")
MAX_SIDE, MAX_AREA = 1 << 13, 1 << 25
AREA_KEY = "temporal_patch_size"  # marks a processor whose edges are areas, as in Qwen's models
PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def check_model_folder(folder: Path) -> None:
    """Check a model folder before a library reads it."""
    for number, path in enumerate(sorted(folder.iterdir())):
        if number == MAX_FILES:
            raise InputError(f"{folder} has more than {MAX_FILES} files; name the folder of one model")
        _check_entry(path, folder)
    templates = folder / "additional_chat_templates"  # read by transformers
    if templates.is_dir():
        for path in templates.iterdir():
            check_plain(path, folder, MAX_CONFIG_BYTES)
    for name in ("config.json", *PROCESSOR_CONFIGS):
        if (folder / name).is_file():
            check_config(folder / name)


def _check_entry(path: Path, folder: Path) -> None:
    if stat.S_ISDIR(resolve_inside(path, folder).lstat().st_mode):
        return
    check_plain(path, folder, None if path.suffix in WEIGHT_SUFFIXES else compute_size_limit(path.name))


def compute_size_limit(name: str) -> int:
    return MAX_CONFIG_BYTES if SETTINGS_FILES.fullmatch(name) else MAX_FILE_BYTES


def list_local_model_files(folder: str) -> list[str]:
    """Return the files of a model's folder that a stage may read; none for a hub id."""
    return sorted(file for suffix in MODEL_SUFFIXES for file in glob(f"{escape(folder)}/*{suffix}") if folder)


def find_missing_parts(folder: Path) -> list[str]:
    """Return the missing parts of a folder with a model and its processor, with the files that they are usually in."""
    return [
        f"{part} ({' and '.join(alternatives[0])})"
        for part, alternatives in REQUIRED_FILES.items()
        if not any(all((folder / name).is_file() for name in names) for names in alternatives)
    ]


def has_chat_template(folder: Path) -> bool:
    """Return whether a folder has a chat template in one of the places where transformers looks for it."""
    files = (folder / name for name in TEMPLATE_SETTINGS)
    return any((folder / name).exists() for name in TEMPLATE_FILES) or any(
        read_json(file, remedy=FIX_REMEDY).get("chat_template") for file in files if file.is_file()
    )


@dataclass(frozen=True)
class DamagedFile:
    """A missing or incomplete file of a model folder, and what is wrong with it."""

    path: Path
    problem: str

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


def find_damaged_file(folder: Path) -> DamagedFile | None:
    """Return the first missing or incomplete file of a folder's weights, tokenizer, processor and configuration.

    Raises:
        InputError: the index of the weights cannot be read, or names files outside the folder.
    """
    names = sorted(CONFIG_FILES | PROCESSOR_FILES | TOKENIZER_FILES)
    files = (folder / name for name in names)
    damages = (_find_damaged_settings(file) for file in files if file.is_file())
    return find_damaged_weights(folder) or next(filter(None, damages), None)


def _find_damaged_settings(path: Path) -> DamagedFile | None:
    """Return what is wrong with a file of a tokenizer, processor or configuration; None if it can be read."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        content = file.read(MAX_PARSED_BYTES)
        if size > MAX_PARSED_BYTES:
            file.seek(size - len(LFS_POINTER))
        end = file.read().rstrip() or content.rstrip()
    if content.startswith(LFS_POINTER):
        return DamagedFile(path, POINTER_PROBLEM)
    if not content.strip() and path.suffix != ".txt":  # a vocabulary that another file replaces may be empty
        return DamagedFile(path, "is empty")
    if path.suffix == ".json":
        try:
            if size <= MAX_PARSED_BYTES:
                json.loads(content)
            elif not end.endswith((b"}", b"]")):
                raise ValueError
        except (ValueError, RecursionError):
            return DamagedFile(path, "is not complete JSON")
    return None


def find_damaged_weights(folder: Path) -> DamagedFile | None:
    """Return the first missing or incomplete file of a folder's safetensors, or None if all are complete.

    Only the index and the headers are read.

    Raises:
        InputError: the index cannot be read, or names files outside the folder.
    """
    index = folder / WEIGHTS_INDEX
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists():  # transformers prefers it to shards
        if index.is_file():
            names = read_shard_names(index)
        elif any(SHARD_NAME.fullmatch(path.name) for path in folder.iterdir()):
            return DamagedFile(index, "is missing")
    if missing := [name for name in names if not (folder / name).is_file()]:
        count = f" ({len(missing)} of {len(names)} shards are)" if len(missing) > 1 else ""
        return DamagedFile(folder / missing[0], f"is missing{count}")
    return next(filter(None, (_find_damaged_shard(folder / name) for name in names)), None)


def read_shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index of weights names.

    Raises:
        InputError: it is not an index, or names files outside its folder.
    """
    shards = read_json(index, remedy=FIX_REMEDY).get("weight_map")
    if not isinstance(shards, dict) or any("/" in str(name) for name in shards.values()):
        raise InputError(f"{index}: weight_map must name files of this folder. {FIX_REMEDY}")
    return sorted({str(name) for name in shards.values()})


def _find_damaged_shard(path: Path) -> DamagedFile | None:
    """Compare the size of a safetensors file with the size that its header states."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return DamagedFile(path, POINTER_PROBLEM)
        file.seek(0)
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        try:
            header = json.loads(file.read(header_bytes)) if header_bytes <= min(size, MAX_HEADER_BYTES) else None
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected_size = LENGTH_BYTES + header_bytes + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return DamagedFile(path, f"has no header of safetensors in its {size} bytes")
    return None if size == expected_size else DamagedFile(path, f"has {size} of {expected_size} bytes")


def copy_model_files(source: Path, target: Path, names: frozenset[str]) -> None:
    """Copy the files with these names and the terms of use from one model folder to another."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if not path.is_dir() and (path.name in names or TERMS_FILES.fullmatch(path.name)):
            copy_plain(path, source, target / path.name, compute_size_limit(path.name))


def check_config(path: Path) -> None:
    """Check the integers in a configuration of a model or a processor, at any depth."""
    find_limit = _find_processor_limit if path.name in PROCESSOR_CONFIGS else _find_model_limit
    try:
        for key_path, key, number, has_areas in _find_numbers(read_json(path, remedy=FIX_REMEDY)):
            if abs(number) > (limit := find_limit(key, has_areas)):
                raise InputError(f"{path}: {key_path} is {str(number)[:40]}; at most {limit} is allowed. {FIX_REMEDY}")
            if number < 1 and POSITIVE_NUMBERS.fullmatch(key):
                raise InputError(f"{path}: {key_path} is {number}; at least 1 is expected. {FIX_REMEDY}")
    except (RecursionError, OverflowError, ValueError):  # ValueError: a number with thousands of digits
        raise InputError(f"{path}: it is nested too deeply, or has a number that is too large. {FIX_REMEDY}") from None


def _is_size(key: str) -> bool:
    return key.endswith("size") or any(pattern.fullmatch(key) for pattern, _ in NUMBER_LIMITS)


def _find_model_limit(key: str, has_areas: bool) -> int:
    return next((limit for pattern, limit in NUMBER_LIMITS if pattern.fullmatch(key)), OTHER_NUMBERS)


def _find_processor_limit(key: str, has_areas: bool) -> int:
    if AREA_LIMIT_KEY.fullmatch(key) or (has_areas and key.endswith("edge")):
        return MAX_AREA
    return MAX_SIDE if SIDE_KEYS.fullmatch(key) else _find_model_limit(key, has_areas)


def _find_numbers(
    value: object, key_path: str = "", key: str = "", has_areas: bool = False, depth: int = 0
) -> Iterator[tuple[str, str, float, bool]]:
    """Yield path of keys, key and number, and whether an enclosing object has the key `AREA_KEY`.

    A value that is nested more than `MAX_NESTING` levels deep raises RecursionError.
    """
    if depth > MAX_NESTING:
        raise RecursionError
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _find_numbers(
                item, f"{key_path}.{name}" if key_path else name, name, has_areas or AREA_KEY in value, depth + 1
            )
    elif isinstance(value, list):
        for item in value:
            yield from _find_numbers(item, key_path, key, has_areas, depth + 1)
    elif isinstance(value, int) or (isinstance(value, float) and _is_size(key)):
        yield key_path, key, value, has_areas


# types of transformers' AutoModelForImageTextToText; a test compares them with the installed version
VISION_LANGUAGE_TYPES = frozenset(
    """
    aria aya_vision blip blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2
    deepseek_vl deepseek_vl_hybrid diffusion_gemma dots3_note emu3 ernie4_5_vl_moe evolla exaone4_5 fast_vlm
    florence2 fuyu gemma3 gemma3n gemma4 gemma4_unified git glm46v glm4v glm4v_moe glm5_next glm_ocr glmga got_ocr2
    granite4_vision granite_docling hunyuan_vl hyperclovax_vision_v2 idefics idefics2 idefics3 inkling2
    inkling_mm_model instructblip instructblipvideo internvl janus kimi_k25 kosmos-2 kosmos-2.5 lfm2_vl lfm3_vl
    lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7
    minimax_m3_vl mistral3 mistral4 mistral_large4 mllama molmo2 muse_glimmer muse_spark nemotron_h_omni ovis2
    paddleocr_vl paligemma perception_lm pi0 pix2struct pp_chart2table pp_formulanet qianfan_ocr
    qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
    qwen4_exp shieldgemma2 smolvlm step3p7 t5gemma2 udop unlimited_ocr video_llama_3 video_llava vipllava
    vision-encoder-decoder
    """.split()
)
# model types of repositories whose code transformers does not contain: an example of their form for transformers
OTHER_FORMS = {
    "llava_llama": "llava-hf/llava-1.5-7b-hf",
    "llava_mistral": "llava-hf/llava-v1.6-mistral-7b-hf",
    "llava_qwen": "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
    "internvl_chat": "OpenGVLab/InternVL3_5-2B-HF",
}
ORIGINAL_LLAVA = "LlavaLlamaForCausalLM"  # the architecture of LLaVA's first versions, whose model type is `llava`


def read_model_type(config: dict) -> str | None:
    """Return the model type of a config.json; None if it states none, or no string."""
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else None


def check_model_type(location: str, config: dict) -> None:
    """Check that transformers, without code of the folder, reads a model with this config.json.

    Raises:
        InputError: the message begins with `location`, and names the form of the model that works.
    """
    kind, architectures = read_model_type(config), config.get("architectures")
    is_original = isinstance(architectures, list) and ORIGINAL_LLAVA in architectures
    form = OTHER_FORMS.get("llava_llama" if is_original else kind)
    if form:
        raise InputError(
            f"{location} is in a format that transformers does not read (model_type {kind}). Name the model's form for "
            f"transformers, such as {form}"
        )
    if config.keys() & {"vision_config", "mm_vision_tower", "auto_map"} and kind not in VISION_LANGUAGE_TYPES:
        code = ", and the code in its folder is never run" if "auto_map" in config else ""
        raise InputError(
            f"{location}: transformers has no vision-language model of the type {kind}{code}. Name a model of "
            "docs/models.md, or this model's form for transformers if its authors publish one"
        )


def check_vision_language_model(location: str, folder: Path) -> None:
    """Check the format of a complete model folder, and that it has a chat template; no download would help.

    Raises:
        InputError: the message begins with `location`.
    """
    config = read_json_config(folder / "config.json")
    check_model_type(location, config)
    if read_model_type(config) not in WITHOUT_CHAT and not has_chat_template(folder):
        raise InputError(
            f"{location}: {folder} has no chat template, without which no prompt can be written. Name the "
            "instruction-tuned model, or copy its chat_template.jinja into the folder"
        )
