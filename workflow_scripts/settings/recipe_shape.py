"""What any recipe looks like, whichever operators there are; asked before a run and again by the stage."""

import difflib
import math
import os
from collections.abc import Collection

from errors import InputError

KEYS = {"process", "executor", "ray_address"}
EXECUTORS = ("default", "ray")  # Data-Juicer's words
MOST_VALUES = 10_000
# A recipe is data: whoever is handed one can run it. What it may not ask of an operator, and why
REFUSED_OPERATORS = ("python_lambda_mapper", "python_file_mapper")
REFUSED_ARGUMENTS = {
    "trust_remote_code": "a model's folder could run code of its own",
    "save_dir": "an operator writes no files of its own, and images stay what they are",
    "skip_op_error": "rows on which an operator fails would be lost; an operator that fails stops the stage",
}


def files_named(value: object) -> list[str]:
    """Files that a recipe's arguments name, such as a list of words: a stage reads them beside its data."""
    if isinstance(value, str):
        return [value] if os.path.isfile(value) else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [file for item in items for file in files_named(item)]


def nearest(name: object, known: Collection[str]) -> str:
    return difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0)[0]


def check_keys(where: object, values: dict, known: set[str], prefix: str = "") -> None:
    """Raise InputError, with the nearest known key, for one that is not known."""
    for key in values:
        if key not in known:
            raise InputError(
                f"{where}: unknown key '{prefix}{key}'; the nearest known one is '{prefix}{nearest(key, known)}'"
            )


def check_shape(where: object, recipe: dict, prefix: str = "") -> None:
    """Check a recipe's keys and all but its `process`.

    Args:
        where: the file, for messages.
        prefix: of the keys in that file.

    Raises:
        InputError: names the key and what belongs there.
    """
    for key in recipe:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "data, outputs and processes are set in config/"
            keys = ", ".join(sorted(KEYS))
            raise InputError(f"{where}: a recipe has the keys {keys}, and no '{prefix}{key}'; {remedy}")
    if (executor := recipe.get("executor", EXECUTORS[0])) not in EXECUTORS:
        raise InputError(f"{where}: '{prefix}executor' must be {' or '.join(EXECUTORS)}, found {executor!r}")
    address = recipe.get("ray_address")
    if address is not None and (not isinstance(address, str) or executor != "ray"):
        raise InputError(f"{where}: '{prefix}ray_address' must be a text beside 'executor: ray', found {address!r}")


def check_steps(where: object, process: object) -> list[tuple[str, str, dict]]:
    """Place, name and arguments of every operator of a `process` list, and of those that are arguments of others.

    Raises:
        InputError: names the step and what belongs there.
    """
    if not isinstance(process, list) or not process:
        raise InputError(
            f"{where}: 'process' must be a list of at least one operator, as in config/recipes/baseline.yaml"
        )
    operators = []
    for number, step in enumerate(process, start=1):
        place = f"{where}, step {number}"
        operators.append((place, *_operator(place, step)))
        if (captioner := operators[-1][2].get("captioner")) is not None:
            operators.append((f"{place}, captioner", *_operator(f"{place}, captioner", captioner)))
    return operators


def merges_rows(place: str, name: str) -> InputError:
    return InputError(
        f"{place}: {name} merges or groups rows; this stage only keeps, drops or edits them: "
        "use a filter, mapper, deduplicator or selector"
    )


def _operator(place: str, step: object) -> tuple[str, dict]:
    _check_plain(place, step)
    name, arguments = next(iter(step.items())) if isinstance(step, dict) and len(step) == 1 else ("", "")
    if not name or not isinstance(arguments, dict | None):
        raise InputError(f"{place}: expected 'operator: {{argument: value}}', found {step!r}")
    _check_harmless(place, name, arguments or {})
    return name, arguments or {}


def _check_harmless(place: str, name: str, arguments: dict) -> None:
    if name in REFUSED_OPERATORS:
        raise InputError(
            f"{place}: {name} runs any Python code, which a recipe may not; write an operator in "
            "workflow_scripts/juicer/operators/ instead"
        )
    for argument, reason in REFUSED_ARGUMENTS.items():
        if arguments.get(argument):
            raise InputError(f"{place}: {name}: {argument!r} is not allowed, since {reason}; leave it out")
    batch_size = arguments.get("batch_size")
    if isinstance(batch_size, int | float) and batch_size < 1:
        raise InputError(f"{place}: {name}: 'batch_size' must be 1 or more, found {batch_size!r}")


def _check_plain(place: str, value: object) -> None:
    """Refuse what JSON has no word for: such a value would reach the operator as another one."""
    waiting, seen = [value], 0
    while waiting:
        value, seen = waiting.pop(), seen + 1
        if seen > MOST_VALUES:
            raise InputError(f"{place}: it holds more than {MOST_VALUES} values, or itself; use fewer")
        if isinstance(value, dict):
            if odd := [key for key in value if not isinstance(key, str)]:
                raise InputError(f"{place}: the key {odd[0]!r} is not a text; put it in quotes")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{place}: {value} is no number to compare with; leave the argument out for no limit")
        elif not isinstance(value, str | int | float | None):
            raise InputError(f"{place}: {value!r} is a {type(value).__name__}; a text needs quotes")
