"""The folder in which a crate's run is made again: the crate's configuration, with this clone's code.

Nothing else of the crate gets there. Its configuration is checked as any other, and may not name a server: what one
answers cannot be made again, and whoever wrote the crate would be sent images and keys. It names files in the user's
folders only, and nothing that would be fetched. It switches on no tracker that sends something.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from dj2mgm.config.layers import PARTS, command_line_layer
from dj2mgm.config.pages import experiments_on
from dj2mgm.config.reading import SHIPPED, names_folder, read_config, shown
from dj2mgm.config.runs import Runs
from dj2mgm.config.settings.configuration import configuration_model
from dj2mgm.config.settings.schema import schema_of
from dj2mgm.errors import InputError
from dj2mgm.files import replace_file, write_json, write_yaml
from dj2mgm.provenance.crate_files import CONFIG_SUFFIXES, is_config, list_model_parts
from dj2mgm.provenance.crate_reader import Crate
from dj2mgm.provenance.places import KEY, OutsideError, Places

COMMAND_LINE = "command_line.json"
SERVERS = ("base_url", "ray_address", "key_variable")
TRACKERS = ["tensorboard"]  # which writes files only
SCHEMAS = {"experiments": "config", "config.yaml": "config"}  # by folder or file in config/


NOT_USED = ("crate", KEY)  # of a crate's own configuration


def make_project(crate: Crate, folder: Path, places: Places) -> Runs:
    """Write the crate's configuration to `folder`; return its runs.

    Paths that are relative to the current folder become absolute, so that they lead to the same files.

    Raises:
        InputError: the configuration is not whole, or not valid with this clone's code, or names a server, a file
            outside of `places`, or a model that is not on this machine.
    """
    _check_whole(crate)
    names = [name for name in crate.files("config") if is_config(name) and name.endswith(CONFIG_SUFFIXES)]
    datasets = {Path(name).stem for name in names if name.startswith("config/datasets/")}
    with writing_to(folder):
        _clear(folder / "config")
        for name in names:
            with replace_file(folder / name, "wb") as file:
                file.write(crate.read(name))
    left_out: list[str] = []
    with chdir(folder):
        for name in names:
            if name.endswith(".yaml"):
                left_out += _make_file_absolute(Path(name), places, datasets)
        layer = command_line_layer(crate.record["command_line"]).values
        command_line = _make_absolute(layer, schema_of(configuration_model()), places, datasets) | {
            "trackers": TRACKERS
        }
        command_line |= {"trusted_recipes": False}  # the crate's recipes are somebody else's, whatever it says
        with writing_to(folder):
            write_json(COMMAND_LINE, command_line)
        try:
            runs = _resolve_runs(crate, command_line)
        except InputError as error:
            raise InputError("; ".join([str(error), *left_out[:1]])) from None
        for run in runs:
            _check_no_server(run.experiment, run.settings)
            for name in _list_models(run.config):
                places.check_model(name)
            if (captioner := find_captioner(run.config)) and names_folder(captioner):
                places.path(captioner)  # which is not made absolute above
    return runs


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn what keeps a file from being written below a folder into an `InputError`."""
    try:
        yield
    except OSError as error:
        where = error.filename2 or error.filename or folder
        raise InputError(
            f"{folder} cannot be filled: {shown(str(where))}: {error.strerror}; make room, or delete what is in the way"
        ) from None


def _check_whole(crate: Crate) -> None:
    """Refuse a crate in whose place this clone's own configuration would be taken."""
    experiments = [f"config/experiments/{name}.yaml" for name in crate.record["experiments"]]
    for name in ("config/config.yaml", *experiments):
        if name not in crate.digests:
            raise InputError(f"the crate holds no {name}; take another crate")


def _clear(folder: Path) -> None:
    """Delete what an earlier start left there; of a link, the link only."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def _resolve_runs(crate: Crate, command_line: dict) -> Runs:
    runs = Runs(command_line)
    known = [name for name in crate.record["experiments"] if name in runs.files]
    if known != experiments_on(runs, crate.record["page"]):
        raise InputError(f"the configuration compares other experiments than {crate.record['experiments']}")
    runs.require(*known)
    return runs


def find_captioner(config: dict) -> str | None:
    """Return the folder or hub id of the BLIP-2 that an experiment captions with, if it does."""
    asked = config["synthesize"]
    return asked["blip2"]["model"] if asked["recipe"] and asked["captioner"] == "blip2" else None


def _list_models(config: dict) -> Iterator[str]:
    """Yield the models that an experiment loads, as folders or hub ids."""
    yield from list_model_parts(config["model"])
    yield from filter(None, (config["evaluate"][key] for key in ("judge_clip", "second_judge")))
    if captioner := find_captioner(config):
        yield captioner


def _make_file_absolute(path: Path, places: Places, datasets: set[str]) -> list[str]:
    """Make the paths in a file of the configuration absolute.

    A file that names places outside is left out, unless the clone's own file of the same name would take its place.

    Returns:
        Why it was left out, or nothing.
    """
    try:
        _make_paths_absolute(path, places, datasets)
    except OutsideError as error:
        if (SHIPPED / path.relative_to("config")).exists():
            raise InputError(f"{path}: {error}") from None
        path.unlink()
        return [f"{path}: {error}"]
    return []


def _make_paths_absolute(path: Path, places: Places, datasets: set[str]) -> None:
    values = read_config(path)
    kind = path.parts[1]
    if kind in ("experiments", "config.yaml"):
        values = read_config(path, schema_of(configuration_model()))
        make_absolute = _make_absolute(values, schema_of(configuration_model()), places, datasets)
    elif kind == "datasets":
        make_absolute = _make_keys_absolute(values, places, ("file", "images", "questions", "path"))
    elif kind == "models":
        make_absolute = _make_keys_absolute(values, places, PARTS)
        if "settings" in values:
            make_absolute["settings"] = _make_absolute(
                values["settings"], schema_of(configuration_model()), places, datasets
            )
    else:
        return
    if make_absolute != values:
        write_yaml(path, make_absolute)


def _make_absolute(value: object, schema: dict, places: Places, datasets: set[str], key: str = "") -> object:
    """Return the value with the paths of the schema made absolute; a dataset's name stays one."""
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        others = others if isinstance(others, dict) else {}
        return {
            name: item
            if not key and name in NOT_USED
            else _make_absolute(item, known.get(name, others), places, datasets, name)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_make_absolute(item, schema.get("items", {}), places, datasets, key) for item in value]
    is_path = isinstance(value, str) and schema.get("format") == "path" and value not in datasets
    return places.make_absolute(value) if is_path else value


def _make_keys_absolute(value: object, places: Places, keys: tuple[str, ...], key: str = "") -> object:
    """Return the value with the texts under these keys made absolute, at any depth."""
    if isinstance(value, dict):
        return {name: _make_keys_absolute(item, places, keys, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_make_keys_absolute(item, places, keys, key) for item in value]
    return places.make_absolute(value) if isinstance(value, str) and key in keys else value


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
