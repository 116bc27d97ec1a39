"""Folders that a model file names: what is missing in them, the downloads that fill them, and CLIPs for scores."""

import os
import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import (
    VISION_LANGUAGE_TYPES,
    DamagedFile,
    check_model_folder,
    check_vision_language_model,
    find_cached_snapshot,
    find_damaged_file,
    find_missing_parts,
    find_model,
    is_folder_path,
    list_local_model_files,
    read_model_type,
)
from dj2mgm.settings.config_files import locate_config_file, read_json_config
from dj2mgm.settings.models import ModelFile, TransformersModel
from dj2mgm.settings.string_formats import has_format

JUDGE_TYPES = {"clip": "CLIP", "siglip": "SigLIP"}  # judges: transformers' `model_type`, and its usual name
HUB_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")
MADE_HERE = re.compile(r"results/foundation/(?P<model>[^/]+)/clip/?")
# parts of the names of operators that select captions with a CLIP; by default it is the model's `clip`
CLIP_OPERATORS = ("image_text_similarity", "low_similarity_recaption")
FOUNDATION_PARTS = ("clip", "convnext", "language_model")  # a folder each
FOUNDATION_SETTINGS = "settings.json"  # settings of their training
WHOLE_MODEL = "whole"  # key of a whole model, among the keys of parts
CLIP_KEY = "clip"
# in the order of a model file's `hub_ids`
PART_KEYS = ("language_model", "vision_tower", "vision_tower_aux")
CONVERT_COMMAND = "python workflow_scripts/convert_mgm_checkpoint.py"
CONVERSIONS = {"vision_tower": "safetensors", "vision_tower_aux": "convnext"}  # arguments of CONVERT_COMMAND


def find_model_folder(name: str) -> Path | None:
    """Return the folder of a model on this machine, or None for a hub id that is not in the cache."""
    return Path(name) if is_folder_path(name) or Path(name).is_dir() else find_cached_snapshot(name, "models")


def check_local_model(name: str) -> None:
    """Check the folder of a model before a library reads it, if it is on this machine.

    Raises:
        InputError: the folder has links to the outside, special files, or a config.json with impossible sizes.
    """
    if (folder := find_model_folder(name)) and folder.is_dir():
        check_model_folder(folder)


def check_named_models(value: object) -> None:
    """Check the folders of models that a recipe names, at any depth; raises as `check_local_model` does."""
    if isinstance(value, str):
        if os.path.exists(os.path.join(value, "config.json")) or HUB_ID.fullmatch(value):
            check_local_model(value)
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            check_named_models(item)


def list_clip_files(name: str) -> list[str]:
    """Return the files of a CLIP, as inputs of stages; none for a hub id or a missing folder."""
    if MADE_HERE.fullmatch(name):
        return [f"{name.rstrip('/')}/model.safetensors"]
    return list_local_model_files(str(Path(name)))


def check_made(name: str, key: str, models: Collection[str]) -> None:
    """Check that a CLIP in results/foundation is a part of a model that the workflow makes.

    Args:
        name: folder or hub id of the CLIP.
        key: the setting that names it, for the message.
        models: names of the models whose parts the workflow makes.

    Raises:
        InputError: it is a part of another model.
    """
    made = MADE_HERE.fullmatch(name)
    if made and made["model"] not in models:
        remedy = f"; name a CLIP of {', '.join(sorted(models))}" if models else ""
        raise InputError(f"{key}: {name} is not made here: no experiment uses the model {made['model']}{remedy}")


def check_judge(name: str, key: str) -> None:
    """Check a judge of captions.

    Raises:
        InputError: it is neither a CLIP nor a SigLIP, or its folder is incomplete. The message begins with `key`.
    """
    if MADE_HERE.fullmatch(name):
        return
    folder = find_model_folder(name)
    if folder == Path(name):
        if not folder.is_dir():
            raise InputError(f"{key}: there is no folder {name}; name a folder or a hub id of a CLIP or SigLIP")
        if missing := find_missing_parts(folder):
            raise InputError(
                f"{key}: {name} has no {' and no '.join(missing)}; save the whole model and its processor there, with "
                "save_pretrained"
            )
        if damage := find_damaged_file(folder):
            raise InputError(f"{key}: {damage}; copy or download the model again")
    check_local_model(name)
    if folder and (folder / "config.json").is_file():
        check_kind(name, read_json_config(folder / "config.json").get("model_type"), key)


def check_kind(name: str, model_type: object, key: str) -> None:
    """Raise InputError unless a model's type is one of `JUDGE_TYPES`."""
    if model_type not in JUDGE_TYPES:
        raise InputError(
            f"{key}: {name} is a model of type {model_type!r}, and only a {' or a '.join(JUDGE_TYPES.values())} can "
            "judge captions; name one of these"
        )


def list_selecting_clips(recipes: dict[str, dict | None], clip: str) -> list[str]:
    """Return the CLIPs that recipes select captions with.

    Args:
        recipes: contents of the recipes by stage.
        clip: the default of operators.
    """
    steps = [step for recipe in recipes.values() if recipe for step in recipe["process"]]
    clips = {
        (arguments or {}).get("hf_clip", clip)
        for step in steps
        for operator, arguments in step.items()
        if any(part in operator for part in CLIP_OPERATORS)
    }
    return sorted(clips)


def find_shipped_foundation(model: ModelFile) -> Path | None:
    """Return the folder of the trained parts that come with the workflow.

    None if there are none, or if they were trained with other settings than the model's.
    """
    folder = locate_config_file("foundation", model.name)
    if model.trained_parts is not model or not (folder / FOUNDATION_SETTINGS).is_file():
        return None
    return folder if read_json_config(folder / FOUNDATION_SETTINGS) == model.foundation.model_dump() else None


@dataclass(frozen=True)
class HubFacts:
    """Size and license of a repository, for messages without internet."""

    size_gb: float
    license: str = "not stated"
    gated: bool = False

    def __str__(self) -> str:
        return f"{self.size_gb:.1f} GB, license {self.license}{', gated' if self.gated else ''}"


# Facts of the parts of listed models; those of whole models are in their files.
PART_FACTS = {
    "google/gemma-2b-it": HubFacts(5.0, "gemma", gated=True),
    "Qwen/Qwen2.5-1.5B-Instruct": HubFacts(3.1, "apache-2.0"),
    "openai/clip-vit-large-patch14": HubFacts(1.7),
    "openai/clip-vit-large-patch14-336": HubFacts(1.7),
    "laion/CLIP-convnext_large_d_320.laion2B-s29B-b131K-ft-soup": HubFacts(1.4, "mit"),
}


class MissingModelError(InputError):
    """A model that `snakemake fetch` downloads; a dry run needs only its configuration."""


@dataclass(frozen=True)
class ModelDownload:
    """A repository of the hub that fills a folder of a model.

    Attributes:
        hub_id: id of the repository.
        folder: folder of its files; None for the hub's cache.
        conversion: command that converts the downloaded files into `converted`, if it has no usable safetensors.
        converted: the folder that the model needs.
    """

    hub_id: str
    folder: str | None = None
    conversion: str | None = None
    converted: str | None = None

    def iterate_commands(self) -> Iterator[str]:
        """Yield the shell commands that do the same."""
        yield shlex.join(["hf", "download", self.hub_id, *(["--local-dir", self.folder] if self.folder else [])])
        if self.conversion:
            yield f"{CONVERT_COMMAND} {shlex.join([self.conversion, self.folder, self.converted])}"


def check_model_folders(model: ModelFile) -> None:
    """Check that the folders of a model or its parts are there, with all their weights.

    Raises:
        MissingModelError: states what `fetch` downloads, with sizes and licenses.
        InputError: names the missing or damaged folders and files, and the commands that download them.
    """
    _refuse(model, {key: part for key, part in find_missing_models(model).items() if key != CLIP_KEY})
    if isinstance(model, TransformersModel):
        check_vision_language_model(f"model {model.name}", Path(find_model(model.whole_model)))


def check_clip_folder(model: ModelFile) -> None:
    """Check that the folder of a model's CLIP is there; raises as `check_model_folders` does."""
    _refuse(model, {key: part for key, part in find_missing_models(model).items() if key == CLIP_KEY})


def find_missing_models(model: ModelFile) -> dict[str, str]:
    """Return the folders and hub ids of a model that this machine lacks or has in part.

    Keys are the keys of `parts`, `CLIP_KEY`, and `WHOLE_MODEL` for the model itself.
    """
    parts = _list_parts(model)
    whole = parts.pop(WHOLE_MODEL, None)
    missing = {key: part for key, part in parts.items() if not is_complete(part)}
    if whole and not (os.path.isfile(f"{whole}/config.json") and is_complete(whole)):
        missing = {WHOLE_MODEL: whole} | missing
    return missing


def _list_parts(model: ModelFile) -> dict[str, str]:
    """Return the folders and hub ids of the model itself, its parts and its CLIP, by key."""
    whole = {WHOLE_MODEL: model.whole_model} if model.whole_model else {}
    return whole | model.parts | {CLIP_KEY: model.clip}


def find_downloads(model: ModelFile, missing: dict[str, str]) -> list[ModelDownload]:
    """Return the downloads that fill missing folders, as far as the model's file names their sources."""
    downloads = (_find_download(model, key, part) for key, part in missing.items())
    return list(dict.fromkeys(download for download in downloads if download))


def list_part_files(model: ModelFile) -> list[str]:
    """Return the files of the folders that an MGM is assembled from.

    Parts that the workflow makes and hub ids have none.
    """
    return [
        file
        for part in model.parts.values()
        if not part.startswith("results/")
        for file in list_local_model_files(part)
    ]


def find_facts(model: ModelFile, hub_id: str) -> HubFacts | None:
    """Return size and license of a model's repository; None if they are not known without internet."""
    if isinstance(model, TransformersModel) and hub_id in model.hub_ids:
        return model.size_gb and HubFacts(model.size_gb, model.license or "not stated", model.gated)
    return PART_FACTS.get(hub_id)


def describe_downloads(model: ModelFile, missing: dict[str, str]) -> str:
    """Return sizes and licenses of the downloads that fill missing folders; empty if they are not all known."""
    if not (size := compute_download_gb(model, missing)):
        return ""
    hub_ids = [download.hub_id for download in find_downloads(model, missing)]
    return f"{size:.1f} GB: {', '.join(f'{hub_id} ({find_facts(model, hub_id)})' for hub_id in hub_ids)}"


def compute_download_gb(model: ModelFile, missing: dict[str, str] | None = None) -> float | None:
    """Return the GB of the downloads that fill missing folders (default: of all); None if they are not all known."""
    missing = _list_parts(model) if missing is None else missing
    facts = [find_facts(model, download.hub_id) for download in find_downloads(model, missing)]
    is_known = facts and all(facts) and all(_find_download(model, key, part) for key, part in missing.items())
    return sum(each.size_gb for each in facts) if is_known else None


def is_complete(part: str) -> bool:
    """Return whether a folder or hub id is on this machine with all its weights, or made by the workflow."""
    if part.startswith("results/"):
        return True
    return os.path.isdir(find_model(part)) and _find_damage(part) is None


def _find_damage(part: str) -> DamagedFile | None:
    """Return the damage of a part's files; None for a part that is not on this machine at all."""
    folder = Path(find_model(part))
    if not (folder / "config.json").is_file():
        return None
    if damage := find_damaged_file(folder):
        return damage
    is_vlm = read_model_type(read_json_config(folder / "config.json")) in VISION_LANGUAGE_TYPES
    missing = find_missing_parts(folder) if is_vlm else []
    return DamagedFile(folder, f"has no {' and no '.join(missing)}") if missing else None


def _list_obstacles(model: ModelFile, missing: dict[str, str]) -> Iterator[str]:
    """Yield the incomplete files that a download takes for complete ones; a conversion replaces its whole folder."""
    for key, part in missing.items():
        damage, download = _find_damage(part), _find_download(model, key, part)
        if damage and damage.path.is_file() and not (download and download.conversion):
            yield str(damage.path.resolve())  # in the hub's cache, the blob


def _refuse(model: ModelFile, missing: dict[str, str]) -> None:
    """Raise InputError about missing folders, unless there is none."""
    if not missing:
        return
    fetch = shlex.join(["snakemake", "fetch", "--config", f"model={model.name}"])
    if not any(_find_damage(part) for part in missing.values()):
        whole_download = find_missing_models(model)  # `fetch` downloads all of it
        if facts := describe_downloads(model, whole_download):
            raise MissingModelError(f"model {model.name}: it is not on this machine yet. `{fetch}` downloads {facts}")
    problems = dict.fromkeys(describe_missing(key, part) for key, part in missing.items())
    commands = [command for download in find_downloads(model, missing) for command in download.iterate_commands()]
    obstacles = dict.fromkeys(_list_obstacles(model, missing))
    if commands:
        delete = f"delete {' and '.join(obstacles)}, and " if obstacles else ""
        remedy = f"{delete}run `{fetch}` first, or (docs/models.md): {' ; '.join(commands)}"
    elif any(_find_damage(part) for part in missing.values()):
        remedy = (
            "save the model and its processor there again, or download both: "
            "`hf download <hub id> --local-dir <folder>`"
        )
    else:
        remedy = "docs/models.md says where models come from"
    raise InputError(f"model {model.name}: {' and '.join(problems)}; {remedy}")


def describe_missing(key: str, part: str) -> str:
    """Describe why a folder or hub id of `find_missing_models` cannot be used."""
    if damage := _find_damage(part):
        return str(damage)
    if not is_folder_path(part):
        return f"{part} is neither a folder nor in the hub's cache on this machine"
    return f"there is no {part}/config.json" if key == WHOLE_MODEL else f"there is no folder {part}"


def _find_download(model: ModelFile, key: str, part: str) -> ModelDownload | None:
    """Return the download that fills the part `key` of a model; None if the model's file names no source for it."""
    if has_format("repository", part) and not is_folder_path(part) and not os.path.isdir(part):
        return ModelDownload(part)
    if key not in (WHOLE_MODEL, "language_model") and len(model.hub_ids) != len(PART_KEYS):
        return None
    index = 0 if key == WHOLE_MODEL else PART_KEYS.index("vision_tower" if key == CLIP_KEY else key)
    if index >= len(model.hub_ids):
        return None
    hub_id = model.hub_ids[index]
    if part == find_model(hub_id):  # a part of it is in the hub's cache
        return ModelDownload(hub_id)
    if conversion := None if key == WHOLE_MODEL else CONVERSIONS.get(PART_KEYS[index]):
        return ModelDownload(hub_id, f"downloads/{Path(part).name}", conversion, part)
    if model.is_mgm and key == WHOLE_MODEL:
        return ModelDownload(hub_id, f"downloads/{Path(part).name}")  # docs/models.md: converted by hand
    return ModelDownload(hub_id, part)
