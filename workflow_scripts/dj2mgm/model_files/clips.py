"""CLIPs and SigLIPs that a configuration names, to select data or to judge captions."""

import os
import re
from collections.abc import Collection
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import (
    check_model_folder,
    find_cached_snapshot,
    find_damaged_file,
    find_missing_parts,
    is_folder_path,
    list_local_model_files,
)
from dj2mgm.settings.config_files import read_json_config

JUDGE_TYPES = {"clip": "CLIP", "siglip": "SigLIP"}  # judges: transformers' `model_type`, and its usual name
HUB_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")
MADE_HERE = re.compile(r"results/foundation/(?P<model>[^/]+)/clip/?")
# parts of the names of operators that select captions with a CLIP; by default it is the model's `clip`
CLIP_OPERATORS = ("image_text_similarity", "low_similarity_recaption")


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
