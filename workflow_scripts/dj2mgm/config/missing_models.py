"""Folders that a model file names: missing ones, the commands that fill them, and the files in them."""

import os
from collections.abc import Iterator
from glob import escape, glob
from pathlib import Path

from dj2mgm.config.clips import MADE_HERE
from dj2mgm.config.reading import names_folder
from dj2mgm.config.settings.models import ModelFile
from dj2mgm.errors import InputError

WHOLE = "whole"  # in place of the key of a part
# in the order of a model file's `hub_ids`
PARTS = ("language_model", "vision_tower", "vision_tower_aux")
SUFFIXES = ("json", "safetensors", "jinja", "model", "txt")
CONVERT = "python workflow_scripts/convert_mgm_checkpoint.py"
KINDS = {"vision_tower": "safetensors", "vision_tower_aux": "convnext"}  # of towers, for CONVERT


def check_model_folders(model: ModelFile) -> None:
    """Check that the folders of a model or its parts are there.

    Raises:
        InputError: names the missing folders, and the commands that fill them.
    """
    if model.given and not os.path.isfile(f"{model.given}/config.json"):
        _refuse(model, {WHOLE: model.given}, f"there is no {model.given}/config.json")
    _check_parts(model, model.parts)


def check_clip_folder(model: ModelFile) -> None:
    """Check that the folder of a model's CLIP is there; raises as `check_model_folders` does."""
    _check_parts(model, {"clip_score": model.clip_score})


def _check_parts(model: ModelFile, parts: dict[str, str]) -> None:
    missing = {key: part for key, part in parts.items() if names_folder(part) and not _is_there(part)}
    if missing:
        _refuse(model, missing, f"there is no folder {', '.join(dict.fromkeys(missing.values()))}")


def model_files(folder: str) -> list[str]:
    """Return the files of a model's folder that a stage may read; none for a hub id."""
    return sorted(file for suffix in SUFFIXES for file in glob(f"{escape(folder)}/*.{suffix}") if folder)


def part_files(model: ModelFile) -> list[str]:
    """Return the files of the folders that an MGM is assembled from.

    Parts that the workflow makes and hub ids have none.
    """
    return [file for part in model.parts.values() if not part.startswith("results/") for file in model_files(part)]


def _is_there(part: str) -> bool:
    return part.startswith("results/") or MADE_HERE.fullmatch(part) is not None or os.path.isdir(part)


def _refuse(model: ModelFile, missing: dict[str, str], problem: str) -> None:
    commands = [command for key, folder in missing.items() for command in _commands(model, key, folder)]
    remedy = f". Fill it by: {' ; '.join(dict.fromkeys(commands))}" if commands else ""
    raise InputError(f"model {model.name}: {problem}; docs/models.md says where models come from{remedy}")


def _commands(model: ModelFile, key: str, folder: str) -> Iterator[str]:
    if not names_folder(folder):
        yield f"hf download {folder}"
        return
    if key not in (WHOLE, "language_model") and len(model.hub_ids) != len(PARTS):
        return
    place = 0 if key == WHOLE else PARTS.index("vision_tower" if key == "clip_score" else key)
    if place < len(model.hub_ids):
        kind = None if key == WHOLE else KINDS.get(PARTS[place])
        converted = kind or (key == WHOLE and model.is_mgm)
        target = f"downloads/{Path(folder).name}" if converted else folder
        yield f"hf download {model.hub_ids[place]} --local-dir {target}"
        if kind:
            yield f"{CONVERT} {kind} {target} {folder}"
