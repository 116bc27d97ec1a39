"""The folders that a model file names: which are missing, how to fill them, and the files in them."""

import os
from collections.abc import Iterator
from glob import escape, glob
from pathlib import Path

from dj2mgm.config.clips import MADE_HERE
from dj2mgm.config.reading import names_folder
from dj2mgm.errors import InputError

WHOLE = ("assembled", "transformers")
# in the order of a model file's `hub_ids`
PARTS = ("language_model", "vision_tower", "vision_tower_aux")
SUFFIXES = ("json", "safetensors", "jinja", "model", "txt")
CONVERT = "python workflow_scripts/convert_mgm_checkpoint.py"
KINDS = {"vision_tower": "safetensors", "vision_tower_aux": "convnext"}  # of towers, for CONVERT


def check_model_folders(model: dict, *keys: str) -> None:
    """Check that the folders that a model file names are there.

    Args:
        model: the file's keys, with its name.
        keys: those of folders that only a part of the stages needs, such as `clip_score`.

    Raises:
        InputError: names the missing folders, and the commands that fill them.
    """
    for key in WHOLE:
        if key in model and not os.path.isfile(f"{model[key]}/config.json"):
            _refuse(model, [(key, model[key])], f"there is no {model[key]}/config.json")
    named = [(key, model[key]) for key in (*PARTS, *keys) if isinstance(model.get(key), str)]
    missing = [(key, part) for key, part in named if names_folder(part) and not _is_there(part)]
    if missing:
        folders = ", ".join(dict.fromkeys(part for _, part in missing))
        _refuse(model, missing, f"there is no folder {folders}")


def model_files(folder: str) -> list[str]:
    """The files of a model's folder that a stage may read; none of a hub id."""
    return sorted(file for suffix in SUFFIXES for file in glob(f"{escape(folder)}/*.{suffix}") if folder)


def part_files(model: dict) -> list[str]:
    """The files of the folders that an MGM is assembled from; none of parts that are made here, or of hub ids."""
    parts = [model[key] for key in PARTS if isinstance(model.get(key), str)]
    return [file for part in parts if not part.startswith("results/") for file in model_files(part)]


def _is_there(part: str) -> bool:
    return part.startswith("results/") or MADE_HERE.fullmatch(part) is not None or os.path.isdir(part)


def _refuse(model: dict, missing: list[tuple[str, str]], problem: str) -> None:
    commands = list(dict.fromkeys(command for key, part in missing for command in _commands(model, key, part)))
    remedy = f". Fill it by: {' ; '.join(commands)}" if commands else ""
    raise InputError(f"model {model['name']}: {problem}; docs/models.md says where models come from{remedy}")


def _commands(model: dict, key: str, folder: str) -> Iterator[str]:
    if not names_folder(folder):
        yield f"hf download {folder}"
        return
    hub_ids = model.get("hub_ids", [])
    place = PARTS.index("vision_tower" if key == "clip_score" else key) if key not in WHOLE else 0
    if key not in WHOLE and key != "language_model" and len(hub_ids) != len(PARTS):
        return
    if place < len(hub_ids):
        kind = KINDS.get(PARTS[place]) if key not in WHOLE else None
        converted = kind or key == "assembled"
        target = f"downloads/{Path(folder).name}" if converted else folder
        yield f"hf download {hub_ids[place]} --local-dir {target}"
        if kind:
            yield f"{CONVERT} {kind} {target} {folder}"
