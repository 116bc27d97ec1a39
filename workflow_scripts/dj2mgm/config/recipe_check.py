"""The check of a recipe: its keys, operators and arguments, before anything runs and again by the stage.

A recipe is data, and may be somebody else's. It may use the operators and arguments that config/schemas/operators.yaml
allows, with values of their kinds. `trusted_recipes: true` in config/config.yaml opens the rest of Data-Juicer.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from dj2mgm.config.argument_kinds import PATHS, as_typed, bytes_of, problem_with, problem_with_folder, shown
from dj2mgm.config.endpoints import ADDRESS, VARIABLE, is_address, is_variable
from dj2mgm.config.recipe_operators import REQUIRED, AllowedOperator, allowed_operators, refused_operators
from dj2mgm.errors import InputError

KEYS = {"process", "executor", "ray_address"}
EXECUTORS = ("default", "ray")  # Data-Juicer's words
LOCAL_RAY = re.compile(r"auto|(localhost|127\.0\.0\.1|\[::1\]):[0-9]{1,5}")
MAX_VALUES = 10_000
LONGEST_NAME = 100  # characters of a name that are compared and shown; operators' names are shorter
FOLDER_FILES = (".json", ".txt", ".safetensors")  # of a folder of models or lists of words
# names of arguments, at any depth, that no recipe may give
REFUSED_ARGUMENTS = {
    "trust_remote_code": "a model's folder could run code of its own",
    "skip_op_error": "rows on which an operator fails would be lost; an operator that fails stops the stage",
    "runtime_env": "Ray would install packages while it runs",
    "captions_folder": "the stage states it",
    "writer": "the stage states it",
}
FORMATS = {"base_url": (is_address, ADDRESS), "key_variable": (is_variable, VARIABLE)}
NO_INPUTS = {"image_root", "captions_folder"}  # arguments of the stage: folders whose files are no inputs of a recipe
MERGES_ROWS = "merges or groups rows"  # a reason in config/schemas/operators.yaml
TRUST = "If you trust whoever wrote the recipe, set trusted_recipes: true in config/config.yaml"
# operators for which a stage fills in what a recipe leaves open: the model file's CLIP; and a captioner, here with the
# argument in which a recipe names its own
WITH_CLIP = (
    "batched_image_text_similarity_filter",
    "image_text_similarity_filter",
    "image_embedding_deduplicator",
    "cluster_balance_filter",
)
LIKELIHOOD_GAIN = "likelihood_gain_filter"
RECAPTION = "low_similarity_recaption_mapper"
CAPTIONER = "captioner"  # an argument that is an operator itself
WITH_CAPTIONER = {RECAPTION: CAPTIONER, LIKELIHOOD_GAIN: "stage"}
Change = Callable[[str, object], object]  # (kind, value) -> value


@dataclass(frozen=True)
class RecipeStep:
    """An operator of a recipe, or one that is the argument of another.

    Attributes:
        place: the file and the step, for messages.
    """

    place: str
    name: str
    arguments: dict
    is_captioner: bool = False


def nearest(name: object, known: Collection[str]) -> str:
    """Return the known name that is most like another."""
    return difflib.get_close_matches(str(name)[:LONGEST_NAME], sorted(known), n=1, cutoff=0)[0]


def check_keys(where: object, values: dict, known: set[str], prefix: str = "") -> None:
    """Raise InputError, with the nearest known key, for one that is not known."""
    for key in values:
        if key not in known:
            raise InputError(
                f"{where}: unknown key '{prefix}{key}'; the nearest known one is '{prefix}{nearest(key, known)}'"
            )


def check_shape(where: object, recipe: dict, prefix: str = "", trusted: bool = False) -> None:
    """Check a recipe's keys and all but its `process`.

    Args:
        where: the file, for messages.
        recipe: the contents of the file.
        prefix: of the keys in that file.
        trusted: whether the recipe may name a Ray cluster on another machine.

    Raises:
        InputError: names the key and what belongs there.
    """
    for key in recipe:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key)[:LONGEST_NAME], KEYS, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "data, outputs and processes are set in config/"
            keys = ", ".join(sorted(KEYS))
            raise InputError(
                f"{where}: a recipe has the keys {keys}, and no '{prefix}{str(key)[:LONGEST_NAME]}'; {remedy}"
            )
    if (executor := recipe.get("executor", EXECUTORS[0])) not in EXECUTORS:
        raise InputError(f"{where}: '{prefix}executor' must be {' or '.join(EXECUTORS)}, found {shown(executor)}")
    address = recipe.get("ray_address")
    if address is not None and (not isinstance(address, str) or executor != "ray"):
        raise InputError(
            f"{where}: '{prefix}ray_address' must be a text beside 'executor: ray', found {shown(address)}"
        )
    if address is not None and not trusted and not LOCAL_RAY.fullmatch(address):
        raise InputError(
            f"{where}: '{prefix}ray_address' must be auto, or a port of this machine such as 127.0.0.1:6379, found "
            f"{shown(address)}: another machine would be sent data and code. For a cluster of yours, write auto and "
            "set RAY_ADDRESS in your environment"
        )


def check_steps(where: object, process: object) -> list[RecipeStep]:
    """Return every operator of a `process` list, and those that are arguments of others.

    Raises:
        InputError: names the step and what belongs there.
    """
    if not isinstance(process, list) or not process:
        raise InputError(
            f"{where}: 'process' must be a list of at least one operator, as in config/recipes/baseline.yaml"
        )
    steps = []
    for number, step in enumerate(process, start=1):
        steps.append(_step(f"{where}, step {number}", step))
        if (captioner := steps[-1].arguments.get(CAPTIONER)) is not None:
            steps.append(_step(f"{where}, step {number}, {CAPTIONER}", captioner, is_captioner=True))
    return steps


def check_operators(
    where: object, process: object, folders: Collection[str] | None = None, trusted: bool = False
) -> None:
    """Check the operators of a `process` list, and their arguments by value.

    Args:
        where: the file, for messages.
        process: the list, of any shape.
        folders: the places in which the recipe's models may lie; None if that has been checked before.
        trusted: whether the recipe may use operators and arguments that are not in config/schemas/operators.yaml.

    Raises:
        InputError: names the step, the operator and the argument, what is wrong and the remedy.
    """
    for step in check_steps(where, process):
        _check_never_allowed(step)
        operator = allowed_operators().get(step.name)
        if trusted:
            if operator:
                _check_names(step, operator, operator.arguments.keys() | operator.defaults.keys())
            continue
        if operator is None:
            raise _not_allowed(step)
        if step.is_captioner and not operator.writes_captions:
            captioners = ", ".join(name for name, known in allowed_operators().items() if known.writes_captions)
            raise InputError(f"{step.place}: {step.name} writes no captions. Use one of {captioners}")
        _check_names(step, operator, operator.arguments.keys())
        _check_values(step, operator, folders)
        _check_limits(step, operator)
        _check_rules(step, operator)


def check_models_named(where: object, process: object) -> None:
    """Refuse an operator whose model is its default, a hub id: nothing is fetched that the user has not named.

    Args:
        where: the file, for messages.
        process: the list, with what the stage fills in.

    Raises:
        InputError: names the step, the operator and the argument.
    """
    for step in check_steps(where, process):
        operator = allowed_operators().get(step.name)
        for argument, kind in operator.arguments.items() if operator else ():
            default = operator.defaults.get(argument)
            if kind == "model" and step.arguments.get(argument) is None and default not in (None, REQUIRED):
                raise InputError(
                    f"{step.place}: {step.name}: {argument!r} is missing, and its default, {default}, is on the hub. "
                    "Name the folder of a model"
                )


def merges_rows(place: str, name: str) -> InputError:
    """Return the error for an operator that makes one row of several."""
    return InputError(
        f"{place}: {name} merges or groups rows; this stage only keeps, drops or edits them: "
        "use a filter, mapper, deduplicator or selector"
    )


def with_types(process: object) -> object:
    """Return the `process` list with whole numbers as their arguments take them: YAML's 1 is an int, and 3.0 a float.

    Args:
        process: of any shape; `check_operators` judges it.
    """
    return _map_arguments(process, as_typed)


def with_home(process: object) -> object:
    """Return the `process` list with `~` replaced in folders that it names."""
    return _map_arguments(process, lambda kind, value: os.path.expanduser(value) if _is_folder(kind, value) else value)


def files_named(recipe: dict | list | None) -> list[str]:
    """Return the files that a recipe reads in addition to its data: those of the folders that its arguments name.

    Args:
        recipe: a checked recipe, its `process` list, or None.
    """
    process = recipe.get("process") if isinstance(recipe, dict) else recipe
    steps = [(name, arguments or {}) for step in process or () for name, arguments in step.items()]
    return [file for name, arguments in steps for file in _files_of_step(name, arguments)]


def naming_files(name: str, arguments: dict) -> dict:
    """Return the arguments of an operator that may name files: not those that the list of operators calls text.

    Args:
        name: of the operator; of one that is not in the list, any argument may.
        arguments: as the recipe and the stage give them.
    """
    operator = allowed_operators().get(name)
    kinds = operator.arguments if operator else {}
    return {
        key: value
        for key, value in arguments.items()
        if key not in NO_INPUTS and (key == CAPTIONER or key not in kinds or _is_folder(kinds[key], value))
    }


def _files_of_step(name: str, arguments: dict) -> list[str]:
    files = []
    for key, value in naming_files(name, arguments).items():
        files += files_named([value]) if key == CAPTIONER and isinstance(value, dict) else _files_in(value)
    return files


def _files_in(value: object) -> list[str]:
    """Return the files that a value names, at any depth, and those of folders that it names."""
    if isinstance(value, str):
        path = re.sub("/+", "/", value)  # Snakemake would look for a path with `//` and not find it
        if os.path.isdir(path):
            names = sorted(name for name in os.listdir(path) if name.endswith(FOLDER_FILES))
            return [file for name in names if os.path.isfile(file := os.path.join(path, name))]
        return [path] if os.path.isfile(path) else []
    if isinstance(value, dict):
        value = list(value.values())
    items = value if isinstance(value, list) else ()
    return [file for item in items for file in _files_in(item)]


def _step(place: str, step: object, is_captioner: bool = False) -> RecipeStep:
    _check_plain(place, step)
    name, arguments = next(iter(step.items())) if isinstance(step, dict) and len(step) == 1 else ("", "")
    if not name or not isinstance(arguments, dict | None):
        raise InputError(f"{place}: expected 'operator: {{argument: value}}', found {shown(step)}")
    for key in (name, *(arguments or ())):
        if len(key) > LONGEST_NAME:
            raise InputError(f"{place}: {shown(key)} is longer than any name of an operator or argument; correct it")
    return RecipeStep(place, name, arguments or {}, is_captioner)


def _check_plain(place: str, value: object) -> None:
    """Refuse what JSON has no word for: such a value would reach the operator as another one."""
    waiting, seen = [value], 0
    while waiting:
        value, seen = waiting.pop(), seen + 1
        if seen > MAX_VALUES:
            raise InputError(f"{place}: it holds more than {MAX_VALUES} values, or itself; use fewer")
        if isinstance(value, dict):
            if odd := [key for key in value if not isinstance(key, str)]:
                raise InputError(f"{place}: the key {odd[0]!r} is not a text; put it in quotes")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{place}: {value} is no number to compare with; leave the argument out for no limit")
        elif not isinstance(value, str | int | float | None):
            raise InputError(f"{place}: {shown(value)} is a {type(value).__name__}; a text needs quotes")


def _check_never_allowed(step: RecipeStep) -> None:
    for key, value in _walk(step.arguments):
        if key in REFUSED_ARGUMENTS and value:
            reason = REFUSED_ARGUMENTS[key]
            raise InputError(f"{step.place}: {step.name}: {key!r} is not allowed, since {reason}; leave it out")
        if key in FORMATS and isinstance(value, str) and not FORMATS[key][0](value):
            raise InputError(f"{step.place}: {step.name}: {key!r} must {FORMATS[key][1]}")


def _walk(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value in a tree, with the name of the argument that it stands under."""
    yield key, value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, key)


def _not_allowed(step: RecipeStep) -> InputError:
    reason = refused_operators().get(step.name)
    if reason == MERGES_ROWS:
        return merges_rows(step.place, step.name)
    if reason:
        return InputError(f"{step.place}: {step.name} is not allowed in a recipe: it {reason}. Take it out. {TRUST}")
    known = nearest(step.name, allowed_operators().keys() | refused_operators().keys())
    return InputError(
        f"{step.place}: unknown operator {step.name!r}; the nearest known one is {known!r}. An operator of your own "
        "needs an entry in config/schemas/operators.yaml"
    )


def _check_names(step: RecipeStep, operator: AllowedOperator, allowed: Collection[str]) -> None:
    for argument in step.arguments:
        if argument in allowed:
            continue
        if argument in operator.defaults:
            usable = ", ".join(sorted(allowed))
            raise InputError(
                f"{step.place}: {step.name}: {argument!r} is not allowed in a recipe, which may give {usable}. Leave "
                f"it out. {TRUST}"
            )
        raise InputError(
            f"{step.place}: {step.name} has no argument {argument!r}; the nearest that it has is "
            f"{nearest(argument, allowed)!r}"
        )


def _check_values(step: RecipeStep, operator: AllowedOperator, folders: Collection[str] | None) -> None:
    for argument, value in step.arguments.items():
        kind = operator.arguments[argument]
        problem = problem_with(kind, value)
        if problem is None and _is_folder(kind, value):
            problem = problem_with_folder(kind.split(" or ")[0], value, folders)
        if problem:
            raise InputError(f"{step.place}: {step.name}: {argument!r} {problem}")


def _check_limits(step: RecipeStep, operator: AllowedOperator) -> None:
    """Refuse a lower limit above the upper one, which may be a default: no row could be kept."""
    for low in (name for name in operator.arguments if name.startswith("min_")):
        high = f"max_{low.removeprefix('min_')}"
        if {low, high} & step.arguments.keys() and high in operator.arguments:
            least, most = (_number_of(step, operator, name) for name in (low, high))
            if least is not None and most is not None and least > most:
                raise InputError(
                    f"{step.place}: {step.name}: {_stated(step, operator, low)} is above "
                    f"{_stated(step, operator, high)}, so that no row could be kept. Change one of them"
                )


def _check_rules(step: RecipeStep, operator: AllowedOperator) -> None:
    place = f"{step.place}: {step.name}"
    for group in operator.rules.get("at_least_one", ()):
        if not any(step.arguments.get(name) is not None for name in group):
            raise InputError(f"{place}: without {' or '.join(group)} it does nothing that was asked for. State it")
    for rule in ("exactly_one", "at_most_one"):
        for group in operator.rules.get(rule, ()):
            given = [name for name in group if step.arguments.get(name) not in (None, operator.defaults.get(name))]
            if len(given) > 1:
                raise InputError(f"{place}: {' and '.join(given)} exclude each other. Keep one of them")
            if not given and rule == "exactly_one":
                raise InputError(f"{place}: one of {' and '.join(group)} is missing. State one of them")
    for group in operator.rules.get("same_length", ()):
        lengths = {len(step.arguments[name]) for name in group if isinstance(step.arguments.get(name), list)}
        if len(lengths) > 1:
            raise InputError(f"{place}: {' and '.join(group)} are lists of different lengths. Give one for each other")
    for low, high in operator.rules.get("below", ()):
        least, most = (_number_of(step, operator, name) for name in (low, high))
        if least is not None and most is not None and least >= most:
            stated = (_stated(step, operator, name) for name in (low, high))
            raise InputError(f"{place}: {' must be below '.join(stated)}. Change one of them")


def _number_of(step: RecipeStep, operator: AllowedOperator, argument: str) -> float | None:
    """Return what an argument is, or is by default, as a number; a size in bytes."""
    value = step.arguments.get(argument, operator.defaults.get(argument))
    if operator.arguments.get(argument) == "size" and isinstance(value, str):
        return bytes_of(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _stated(step: RecipeStep, operator: AllowedOperator, argument: str) -> str:
    if argument in step.arguments:
        return f"{argument} {step.arguments[argument]}"
    return f"{argument} (by default {operator.defaults.get(argument)})"


def _is_folder(kind: str, value: object) -> bool:
    return isinstance(value, str) and kind.split(" or ")[0] in PATHS


def _map_arguments(process: object, change: Change) -> object:
    if not isinstance(process, list):
        return process
    return [
        {name: _mapped(name, arguments, change) for name, arguments in step.items()} if isinstance(step, dict) else step
        for step in process
    ]


def _mapped(name: object, arguments: object, change: Change) -> object:
    operator = allowed_operators().get(name) if isinstance(name, str) else None
    if operator is None or not isinstance(arguments, dict):
        return arguments
    mapped = {
        key: change(operator.arguments[key], value) if key in operator.arguments else value
        for key, value in arguments.items()
    }
    if isinstance(mapped.get(CAPTIONER), dict):
        [mapped[CAPTIONER]] = _map_arguments([mapped[CAPTIONER]], change)
    return mapped
