"""Preparation of the folder that reproduces a crate's run, with the crate's configuration and this clone's code.

Nothing else of the crate is used. Its configuration is validated, and may not name a server: a server's answers cannot
be reproduced, and the crate's author would receive images and keys. It may name only files in the user's folders, and
nothing that would be downloaded (`AllowedFolders`). It enables no tracker that sends data.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.model_files.hub_cache import find_cached_snapshot, is_folder_path
from dj2mgm.provenance.crate_files import CONFIG_SUFFIXES, MADE_HERE, ROOT, is_config, list_model_parts
from dj2mgm.provenance.crate_reader import Crate
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.layers import MODEL_KEYS, build_command_line_layer
from dj2mgm.runs.pages import list_page_experiments
from dj2mgm.settings.config_files import SHIPPED, quote_value, read_config
from dj2mgm.settings.configuration import build_configuration_model
from dj2mgm.settings.schema import build_schema
from dj2mgm.storage.files import can_be_path, write_bytes, write_json, write_yaml

SYSTEM_FOLDERS = ("/proc", "/sys", "/dev", "/run")  # never data, even inside a user's folder
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
PATTERN = re.compile(r"[*?[]")  # a text with one of these characters may match several files
FOLDERS_KEY = "crate_folders"


class OutsideError(InputError):
    """Error of a crate that names a path outside of the user's folders."""


class AllowedFolders:
    """Folders that a crate's run may read: `here`, which relative paths refer to, and further folders of the user.

    Links in them are followed. They are the user's own, because crates contain no links.
    """

    def __init__(self, here: Path, folders: Sequence[Path] = ()):
        self._here = Path(os.path.abspath(here))
        self._allowed = [self._here, ROOT, *(Path(os.path.abspath(folder.expanduser())) for folder in folders)]

    def resolve(self, text: str) -> Path:
        """Return the absolute path, without `..`, of a path in the crate, unless it is outside or a system file."""
        if not can_be_path(text):
            raise OutsideError(
                f"the crate names {quote_value(text)}, which is not a path of a file; take another crate"
            )
        path = Path(os.path.normpath(self._here / os.path.expanduser(text)))
        if any(candidate.is_relative_to(folder) for candidate in (path, path.resolve()) for folder in SYSTEM_FOLDERS):
            raise OutsideError(f"the crate names {path}, a file of the system; a crate may not read it")
        if not any(path.is_relative_to(folder) for folder in self._allowed):
            raise OutsideError(
                f"the crate names {path}, which is outside of the current folder; put the folder into {FOLDERS_KEY} "
                "if the crate may read it"
            )
        return path

    def make_absolute(self, text: str) -> str:
        """Return the absolute path of a file, folder or pattern; hub ids and names without a file stay unchanged.

        Paths of the run's own results stay relative to the project of the run.
        """
        if text.startswith(MADE_HERE) and os.path.normpath(text).startswith(MADE_HERE):
            return text
        path = self.resolve(text)
        return str(path) if path.exists() or PATTERN.search(text) else text

    def check_model(self, name: str) -> None:
        """Check that a model of the crate's run, a hub id or a checked folder, is on this machine."""
        is_folder = is_folder_path(name) or not HUB_NAME.fullmatch(name) or os.path.isdir(name)
        if not is_folder and find_cached_snapshot(name, "models") is None:
            raise InputError(
                f"the crate names {name}, which is not on this machine, and nothing is fetched for a crate; "
                f"`hf download {name}` fetches it"
            )

    def check_input(self, source: str, file: str) -> None:
        """Check the path of an input in a crate's record: a file, or `file` in a folder or hub id `source`."""
        if file and ({"..", ""} & set(file.split("/")) or not can_be_path(f"{source}/{file}")):
            raise OutsideError(
                f"the crate names {quote_value(file)} in {source}, which leads out of it; take another crate"
            )
        if not (file and HUB_NAME.fullmatch(source) and find_cached_snapshot(source, "models")):
            self.resolve(source)


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
