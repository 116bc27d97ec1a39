"""Folders that a model file names: missing or incomplete ones, the downloads that fill them, and the files in them."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.model_files.hub_cache import find_model, is_folder_path
from dj2mgm.model_files.model_folders import MODEL_SUFFIXES, DamagedFile, find_damaged_file, find_missing_parts
from dj2mgm.model_files.model_types import VISION_LANGUAGE_TYPES, check_vision_language_model, read_model_type
from dj2mgm.settings.config_files import read_json_config
from dj2mgm.settings.models import ModelFile, TransformersModel
from dj2mgm.settings.string_formats import has_format

WHOLE_MODEL = "whole"  # key of a whole model, among the keys of parts
CLIP_KEY = "clip"
# in the order of a model file's `hub_ids`
PART_KEYS = ("language_model", "vision_tower", "vision_tower_aux")
CONVERT_COMMAND = "python workflow_scripts/convert_mgm_checkpoint.py"
CONVERSIONS = {"vision_tower": "safetensors", "vision_tower_aux": "convnext"}  # arguments of CONVERT_COMMAND


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
        InputError: names the missing folders and files, and the commands that download them.
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
    parts = model.parts | {CLIP_KEY: model.clip}
    missing = {key: part for key, part in parts.items() if not is_complete(part)}
    if model.whole_model and not (
        os.path.isfile(f"{model.whole_model}/config.json") and is_complete(model.whole_model)
    ):
        missing = {WHOLE_MODEL: model.whole_model} | missing
    return missing


def find_downloads(model: ModelFile, missing: dict[str, str]) -> list[ModelDownload]:
    """Return the downloads that fill missing folders, as far as the model's file names their sources."""
    downloads = (_find_download(model, key, part) for key, part in missing.items())
    return list(dict.fromkeys(download for download in downloads if download))


def list_local_model_files(folder: str) -> list[str]:
    """Return the files of a model's folder that a stage may read; none for a hub id."""
    return sorted(file for suffix in MODEL_SUFFIXES for file in glob(f"{escape(folder)}/*{suffix}") if folder)


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


def describe_download(model: ModelFile) -> str:
    """Return size and license of a model, as its file states them; empty if it states no size."""
    if not isinstance(model, TransformersModel) or model.size_gb is None:
        return ""
    gated = "gated" if model.gated else ""
    return ", ".join(filter(None, [f"{model.size_gb:.1f} GB", f"license {model.license or 'not stated'}", gated]))


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
    if WHOLE_MODEL in missing and not os.path.isdir(missing[WHOLE_MODEL]) and (facts := describe_download(model)):
        raise InputError(
            f"model {model.name}: {missing[WHOLE_MODEL]} is not on this machine; run `{fetch}` first: {facts}"
        )
    problems = dict.fromkeys(describe_missing(key, part) for key, part in missing.items())
    commands = [command for download in find_downloads(model, missing) for command in download.iterate_commands()]
    obstacles = dict.fromkeys(_list_obstacles(model, missing))
    if commands:
        delete = f"delete {' and '.join(obstacles)}, and " if obstacles else ""
        remedy = f"{delete}run `{fetch}` first, or these commands (docs/models.md): {' ; '.join(commands)}"
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
