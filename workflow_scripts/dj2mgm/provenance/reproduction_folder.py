"""Preparation of the folder that reproduces a crate's run, with the crate's configuration and this clone's code.

Nothing else of the crate is used. Its configuration is validated, and may not name a server: a server's answers cannot
be reproduced, and the crate's author would receive images and keys. It may name only files in the user's folders, and
nothing that would be downloaded (`AllowedFolders`). It enables no tracker that sends data.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from dj2mgm.errors import InputError, quote_value
from dj2mgm.model_files.hub_cache import is_folder_path
from dj2mgm.provenance.allowed_folders import FOLDERS_KEY, AllowedFolders, OutsideError
from dj2mgm.provenance.crate_files import CONFIG_SUFFIXES, is_config, list_model_parts
from dj2mgm.provenance.crate_reader import Crate
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.layers import build_command_line_layer
from dj2mgm.runs.model_reader import MODEL_KEYS
from dj2mgm.runs.pages import list_page_experiments
from dj2mgm.settings.config_files import SHIPPED, read_config
from dj2mgm.settings.configuration import build_configuration_model
from dj2mgm.settings.schema import build_schema
from dj2mgm.storage.files import write_bytes, write_json, write_yaml

COMMAND_LINE = "command_line.json"
SERVER_KEYS = ("base_url", "ray_address", "key_variable")
TRACKERS = ["tensorboard"]  # writes only files
NOT_USED = ("crate", FOLDERS_KEY)  # keys of a crate's configuration that are ignored


def write_reproduction_folder(crate: Crate, folder: Path, allowed_folders: AllowedFolders) -> Runs:
    """Write the crate's configuration to `folder` and return its runs.

    Paths relative to the current folder become absolute, so that they lead to the same files. A configuration is
    refused if it is incomplete, is not valid with this clone's code, or names a server, a file outside of
    `allowed_folders`, or a model that is not on this machine.
    """
    _check_whole(crate)
    names = [name for name in crate.select_digests("config") if is_config(name) and name.endswith(CONFIG_SUFFIXES)]
    files = {Path(name).stem for name in names if name.startswith(("config/datasets/", "config/models/"))}
    with writing_to(folder):
        _clear(folder / "config")
        for name in names:
            write_bytes(folder / name, crate.read(name))
    problems: list[str] = []
    with chdir(folder):
        for name in names:
            if name.endswith(".yaml"):
                problems += _make_file_absolute(Path(name), allowed_folders, files)
        layer = build_command_line_layer(crate.record.command_line).values
        command_line = _make_absolute(layer, build_schema(build_configuration_model()), allowed_folders, files)
        # `trusted_recipes`: others wrote the recipes, so the crate's own value is ignored
        command_line |= {"trackers": TRACKERS, "trusted_recipes": False}
        with writing_to(folder):
            write_json(COMMAND_LINE, command_line)
        try:
            runs = _resolve_runs(crate, command_line)
        except InputError as error:
            raise InputError("; ".join([str(error), *problems[:1]])) from None
        for run in runs:
            _check_no_server(run.experiment, {name: stage.file_content() for name, stage in run.settings.items()})
            config = run.config.model_dump()
            for name in _list_models(config):
                allowed_folders.check_model(name)
            if (captioner := find_captioner(config)) and is_folder_path(captioner):
                allowed_folders.resolve(captioner)  # not made absolute above
    return runs


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn errors of writing below a folder into an `InputError`."""
    try:
        yield
    except OSError as error:
        location = error.filename2 or error.filename or folder
        raise InputError(
            f"{folder} cannot be filled: {quote_value(str(location))}: {error.strerror}; free space, or delete the "
            "files in the way"
        ) from None


def _check_whole(crate: Crate) -> None:
    """Raise InputError if a file of the configuration is missing, because the clone's own would replace it."""
    experiments = [f"config/experiments/{name}.yaml" for name in crate.record.experiments]
    for name in ("config/config.yaml", *experiments):
        if name not in crate.digests:
            raise InputError(f"the crate holds no {name}; take another crate")


def _clear(folder: Path) -> None:
    """Delete the folder of an earlier start; of a link, only the link."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def _resolve_runs(crate: Crate, command_line: dict) -> Runs:
    runs = Runs(command_line)
    available = [name for name in crate.record.experiments if name in runs.experiments.files]
    page_experiments = [
        name for name in list_page_experiments(runs, crate.record.page) if name in runs.experiments.files
    ]
    if available != page_experiments:
        raise InputError(f"the configuration compares other experiments than {crate.record.experiments}")
    runs.experiments.require(*available)
    return runs


def find_captioner(config: dict) -> str | None:
    """Return the folder or hub id of the BLIP-2 model that an experiment captions with, or None."""
    settings = config["synthesize"]
    return settings["blip2"]["model"] if settings["recipe"] and settings["captioner"] == "blip2" else None


def _list_models(config: dict) -> Iterator[str]:
    """Yield the folders or hub ids of an experiment's models."""
    yield from list_model_parts(config["model"])
    yield from filter(None, (config["evaluate"][key] for key in ("judge_clip", "second_judge")))
    if captioner := find_captioner(config):
        yield captioner


def _make_file_absolute(path: Path, allowed_folders: AllowedFolders, files: set[str]) -> list[str]:
    """Make the paths in a configuration file absolute.

    A file that names other folders is removed, and the reason returned, unless the clone's own file of the same name
    would replace it.
    """
    try:
        _make_paths_absolute(path, allowed_folders, files)
    except OutsideError as error:
        if (SHIPPED / path.relative_to("config")).exists():
            raise InputError(f"{path}: {error}") from None
        path.unlink()
        return [f"{path}: {error}"]
    return []


def _make_paths_absolute(path: Path, allowed_folders: AllowedFolders, files: set[str]) -> None:
    """Write a configuration file's paths as absolute ones; raise InputError for a path outside the allowed folders."""
    values = read_config(path)
    kind = path.parts[1]
    if kind in ("experiments", "config.yaml"):
        values = read_config(path, build_schema(build_configuration_model()))
        absolute_values = _make_absolute(values, build_schema(build_configuration_model()), allowed_folders, files)
    elif kind == "datasets":
        absolute_values = _make_keys_absolute(values, allowed_folders, ("file", "images", "questions", "path"))
    elif kind == "models":
        absolute_values = _make_keys_absolute(values, allowed_folders, MODEL_KEYS)
        if "settings" in values:
            absolute_values["settings"] = _make_absolute(
                values["settings"], build_schema(build_configuration_model()), allowed_folders, files
            )
    else:
        return
    if absolute_values != values:
        write_yaml(path, absolute_values)


def _make_absolute(
    value: object, schema: dict, allowed_folders: AllowedFolders, files: set[str], key: str = ""
) -> object:
    """Return the value with the paths of the schema made absolute; names of files in config/ stay unchanged."""
    if isinstance(value, dict):
        properties, other_schema = schema.get("properties", {}), schema.get("additionalProperties")
        other_schema = other_schema if isinstance(other_schema, dict) else {}
        return {
            name: item
            if not key and name in NOT_USED
            else _make_absolute(item, properties.get(name, other_schema), allowed_folders, files, name)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_make_absolute(item, schema.get("items", {}), allowed_folders, files, key) for item in value]
    is_path = isinstance(value, str) and schema.get("format") == "path" and value not in files
    return allowed_folders.make_absolute(value) if is_path else value


def _make_keys_absolute(value: object, allowed_folders: AllowedFolders, keys: tuple[str, ...], key: str = "") -> object:
    """Return the value with the strings under these keys made absolute, at any depth."""
    if isinstance(value, dict):
        return {name: _make_keys_absolute(item, allowed_folders, keys, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_make_keys_absolute(item, allowed_folders, keys, key) for item in value]
    return allowed_folders.make_absolute(value) if isinstance(value, str) and key in keys else value


def _check_no_server(experiment: str, value: object) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in SERVER_KEYS and item is not None:
                raise InputError(
                    f"experiment {experiment}: {key}: {json.dumps(item)[:100]}: a server's answers cannot be "
                    "reproduced, and a crate's server is never contacted; run the experiment yourself if you trust it"
                )
            _check_no_server(experiment, item)
    elif isinstance(value, list):
        for item in value:
            _check_no_server(experiment, item)
