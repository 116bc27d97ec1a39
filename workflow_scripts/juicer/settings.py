"""The filter stage's resolved settings."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from files import read_yaml

KEYS = ("image_root", "processes", "recipe")


@dataclass(frozen=True)
class FilterSettings:
    """Which rows to look at and how."""

    image_root: Path  # absolute folder that the rows' image paths are relative to
    processes: int  # how many processes share an operator's rows
    process: list[dict]  # Data-Juicer's `process` list


def read_settings(path: str | Path) -> FilterSettings:
    """Read `{image_root, processes, recipe: {process}}`; `processes: null` means every core this process may use.

    Raises:
        InputError: names the file, the key and what belongs there.
    """
    values = read_yaml(path)
    if not isinstance(values, dict) or not isinstance(values.get("recipe"), dict):
        raise InputError(f"{path}: expected the keys {', '.join(KEYS)}, with a recipe that has a 'process' list")
    _reject_unknown(path, values, KEYS, "")
    _reject_unknown(path, values["recipe"], ("process",), "recipe.")
    root = values.get("image_root")
    if not isinstance(root, str) or not Path(root).is_dir():
        raise InputError(f"{path}: 'image_root' must be the folder that image paths are relative to, found {root!r}")
    processes = values.get("processes")
    if processes is None:
        processes = len(os.sched_getaffinity(0))
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise InputError(
            f"{path}: 'processes' must be a whole number from 1, or null for every core; found {processes!r}"
        )
    return FilterSettings(Path(root).resolve(), processes, values["recipe"].get("process"))


def _reject_unknown(path: str | Path, values: dict, known: tuple[str, ...], prefix: str) -> None:
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0)[0]
            raise InputError(f"{path}: unknown key '{prefix}{key}'; the nearest known one is '{prefix}{nearest}'")
