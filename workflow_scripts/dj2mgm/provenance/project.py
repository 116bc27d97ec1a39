"""The folder in which a crate's run is made again: the crate's configuration, with this clone's code.

Nothing else of the crate gets there. Its configuration is checked as any other, and may not name a server: what one
answers cannot be made again, and whoever wrote the crate would be sent images and keys. It switches on no tracker that
sends something.
"""

import json
import os
from contextlib import chdir
from glob import glob
from pathlib import Path

from dj2mgm.config.layers import command_line_layer
from dj2mgm.config.pages import experiments_on
from dj2mgm.config.reading import read_config
from dj2mgm.config.runs import Runs
from dj2mgm.config.schema import schema_of
from dj2mgm.errors import InputError
from dj2mgm.files import replace_file, write_json, write_yaml
from dj2mgm.provenance.files import CONFIG_SUFFIXES, MADE_HERE, PARTS, is_config
from dj2mgm.provenance.reading import Crate

COMMAND_LINE = "command_line.json"
SERVERS = ("base_url", "ray_address", "key_variable")
TRACKERS = ["tensorboard"]  # which writes files only
SCHEMAS = {"experiments": "config", "config.yaml": "config"}  # by folder or file in config/


def make_project(crate: Crate, folder: Path) -> Runs:
    """Write the crate's configuration to `folder`; return its runs.

    Paths that are relative to the current folder become absolute, so that they lead to the same files.

    Raises:
        InputError: the configuration is not valid with this clone's code, or names a server.
    """
    names = [name for name in crate.files("config") if is_config(name) and name.endswith(CONFIG_SUFFIXES)]
    datasets = {Path(name).stem for name in names if name.startswith("config/datasets/")}
    for name in names:
        try:
            with replace_file(folder / name, "wb") as file:
                file.write(crate.read(name))
        except OSError as error:  # a name too long, or one that is also a folder's
            raise InputError(f"{name} cannot be written ({error.strerror})") from None
    here = Path.cwd()
    with chdir(folder):
        for name in names:
            if name.endswith(".yaml"):
                _anchor_file(Path(name), here, datasets)
        layer = command_line_layer(crate.record["command_line"]).values
        command_line = _anchored(layer, schema_of("config"), here, datasets) | {"trackers": TRACKERS}
        command_line |= {"trusted_recipes": False}  # the crate's recipes are somebody else's, whatever it says
        write_json(COMMAND_LINE, command_line)
        runs = Runs(command_line)
        known = [name for name in crate.record["experiments"] if name in runs.files]
        if known != experiments_on(runs, crate.record["page"]):
            raise InputError(f"the configuration compares other experiments than {crate.record['experiments']}")
        runs.require(*known)
        for run in runs:
            _check_no_server(run.experiment, run.settings)
    return runs


def _anchor_file(path: Path, here: Path, datasets: set[str]) -> None:
    values = read_config(path)
    kind = path.parts[1]
    if kind in ("experiments", "config.yaml"):
        values = read_config(path, schema_of("config"))
        anchored = _anchored(values, schema_of("config"), here, datasets)
    elif kind == "datasets":
        anchored = _anchored_paths(values, here, ("file", "images", "questions", "path"))
    elif kind == "models":
        anchored = _anchored_paths(values, here, PARTS)
        if "settings" in values:
            anchored["settings"] = _anchored(values["settings"], schema_of("config"), here, datasets)
    else:
        return
    if anchored != values:
        write_yaml(path, anchored)


def _anchored(value: object, schema: dict, here: Path, datasets: set[str]) -> object:
    """With what the schema calls a path made absolute; a dataset's name stays one."""
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        others = others if isinstance(others, dict) else {}
        return {key: _anchored(item, known.get(key, others), here, datasets) for key, item in value.items()}
    if isinstance(value, list):
        return [_anchored(item, schema.get("items", {}), here, datasets) for item in value]
    is_path = isinstance(value, str) and schema.get("format") == "path" and value not in datasets
    return _absolute(value, here) if is_path else value


def _anchored_paths(value: object, here: Path, keys: tuple[str, ...], key: str = "") -> object:
    """With the texts under these keys made absolute, however deep they are."""
    if isinstance(value, dict):
        return {name: _anchored_paths(item, here, keys, name) for name, item in value.items()}
    return _absolute(value, here) if isinstance(value, str) and key in keys else value


def _absolute(text: str, here: Path) -> str:
    """A hub id, a pattern that finds nothing, and what the run itself makes stay as they are."""
    path = here / os.path.expanduser(text)
    is_there = not text.startswith(MADE_HERE) and (path.exists() or glob(str(path), recursive=True))
    return str(path) if is_there else text


def _check_no_server(experiment: str, value: object) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in SERVERS and item is not None:
                raise InputError(
                    f"experiment {experiment}: {key}: {json.dumps(item)[:100]}: what a server answers cannot be made "
                    "again, and a crate's is asked nothing; run the experiment yourself if you trust it"
                )
            _check_no_server(experiment, item)
    elif isinstance(value, list):
        for item in value:
            _check_no_server(experiment, item)
