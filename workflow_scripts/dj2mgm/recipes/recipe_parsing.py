"""Recipes: parsed into typed steps and checked, before anything runs and again by the stage.

A recipe is data, possibly from a stranger. It may use the operators and arguments that config/schemas/operators.yaml
allows, with values of their kinds. `trusted_recipes: true` in config/config.yaml allows the rest of Data-Juicer.
"""

import difflib
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from dj2mgm.errors import InputError
from dj2mgm.recipes.argument_kinds import (
    convert_number,
    find_folder_problem,
    find_problem,
    parse_argument_size,
    shorten_value,
)
from dj2mgm.recipes.catalogue import (
    CAPTIONER_ARGUMENT,
    INSTRUCTION_OPERATOR,
    MEASURED_ON_INPUT_TEXT,
    PAIRS,
    READING_IMAGES,
    RECAPTION_OPERATOR,
    REQUIRED_MARK,
    ROW_KINDS,
    AllowedOperator,
    is_folder_argument,
    read_allowed_operators,
    read_refused_operators,
)
from dj2mgm.settings.string_formats import ADDRESS_RULE, VARIABLE_RULE, is_address, is_variable

MAX_NAME_LENGTH = 100  # characters of a name that are compared and shown; names of operators are shorter
RECIPE_KEYS = {"process", "executor", "ray_address", "rows"}
EXECUTORS = ("default", "ray")  # Data-Juicer's names
LOCAL_RAY = re.compile(r"auto|(localhost|127\.0\.0\.1|\[::1\]):[0-9]{1,5}")
# names of arguments, at any depth, that no recipe may give
REFUSED_ARGUMENTS = {
    "trust_remote_code": "a model's folder could run code of its own",
    "skip_op_error": "rows on which an operator fails would be lost; an operator that fails stops the stage",
    "runtime_env": "Ray would install packages while it runs",
    "captions_folder": "the stage sets it",
    "question_file": "the stage sets it",
    "held_out_file": "the stage sets it",
    "writer": "the stage sets it",
}
ARGUMENT_FORMATS = {"base_url": (is_address, ADDRESS_RULE), "key_variable": (is_variable, VARIABLE_RULE)}
MERGES_ROWS = "merges or groups rows"  # a reason in config/schemas/operators.yaml
TRUST_REMEDY = "If you trust the author of the recipe, set trusted_recipes: true in config/config.yaml"


@dataclass(frozen=True)
class RecipeStep:
    """An operator of a recipe, or the captioner of another operator.

    Attributes:
        location: file and step, for messages.
        name: name of the operator.
        arguments: arguments that the recipe gives.
        captioner: the captioning operator in this step's argument `captioner`.
        is_captioner: whether it is the argument of another operator.
    """

    location: str
    name: str
    arguments: dict
    captioner: "RecipeStep | None" = None
    is_captioner: bool = False

    def list_with_captioner(self) -> list["RecipeStep"]:
        return [self, self.captioner] if self.captioner else [self]

    def with_defaults(self, arguments: dict) -> "RecipeStep":
        """Return the step with further arguments; those of the recipe take precedence."""
        return _make_step(self.location, self.name, arguments | self.arguments)

    def as_dict(self) -> dict:
        """Return the step as Data-Juicer writes it, {operator: {argument: value}}."""
        return {self.name: self.arguments or None}


def find_nearest_name(name: object, candidates: Collection[str]) -> str:
    """Return the candidate that is most similar to a name."""
    return difflib.get_close_matches(str(name)[:MAX_NAME_LENGTH], sorted(candidates), n=1, cutoff=0)[0]


def parse_steps(location: object, process: object) -> list[RecipeStep]:
    """Return the steps of a `process` list after a check of their form only.

    Raises:
        InputError: a step is not well-formed.
    """
    if not isinstance(process, list) or not process:
        raise InputError(
            f"{location}: 'process' must be a list of at least one operator, as in config/recipes/baseline.yaml"
        )
    return [_parse_step(f"{location}, step {number}", step) for number, step in enumerate(process, start=1)]


def _parse_step(location: str, step: object, is_captioner: bool = False) -> RecipeStep:
    name, arguments = next(iter(step.items())) if isinstance(step, dict) and len(step) == 1 else ("", "")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        raise InputError(f"{location}: expected 'operator: {{argument: value}}', found {shorten_value(step)}")
    for key in (name, *(arguments or ())):
        if len(str(key)) > MAX_NAME_LENGTH:
            raise InputError(
                f"{location}: {shorten_value(key)} is longer than any name of an operator or argument. Correct it"
            )
    return _make_step(location, name, arguments or {}, is_captioner)


def _make_step(location: str, name: str, arguments: dict, is_captioner: bool = False) -> RecipeStep:
    captioner = None
    if not is_captioner and arguments.get(CAPTIONER_ARGUMENT) is not None:
        captioner = _parse_step(f"{location}, {CAPTIONER_ARGUMENT}", arguments[CAPTIONER_ARGUMENT], is_captioner=True)
    return RecipeStep(location, name, arguments, captioner, is_captioner)


@dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    Attributes:
        steps: operators in order.
        executor: one of `EXECUTORS`.
        ray_address: address of a Ray cluster (None: Ray starts one on this machine).
        rows: one of `ROW_KINDS`.
    """

    steps: tuple[RecipeStep, ...]
    executor: str = EXECUTORS[0]
    ray_address: str | None = None
    rows: str = PAIRS


def parse_recipe(
    location: object, recipe: dict, prefix: str = "", folders: Collection[str] | None = None, trusted: bool = False
) -> Recipe:
    """Check a recipe and return it with typed steps.

    Args:
        location: name of the file, for messages.
        recipe: contents of a recipe's file.
        prefix: prefix of the recipe's keys in the file.
        folders: folders that may contain the recipe's models (None: this has been checked before).
        trusted: whether the recipe may use operators and arguments that are not in config/schemas/operators.yaml, and
            a Ray cluster on another machine.

    Raises:
        InputError: something is not allowed; the message has the step, the operator, the argument and the remedy.
    """
    _check_top_level_keys(location, recipe, prefix, trusted)
    process_location = f"{location}: {prefix.removesuffix('.')}" if prefix else location
    steps = parse_steps(process_location, recipe.get("process"))
    for step in (nested_step for top in steps for nested_step in top.list_with_captioner()):
        check_step(step, folders, trusted)
    check_order(steps)
    options = {key: recipe[key] for key in ("executor", "ray_address", "rows") if recipe.get(key) is not None}
    return Recipe(tuple(_with_types(step) for step in steps), **options)


def _check_top_level_keys(location: object, recipe: dict, prefix: str, trusted: bool) -> None:
    """Check the keys of a recipe, and all of its values except `process`."""
    for key in recipe:
        if key not in RECIPE_KEYS:
            near = difflib.get_close_matches(str(key)[:MAX_NAME_LENGTH], RECIPE_KEYS, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "data, outputs and processes are set in config/"
            keys = ", ".join(sorted(RECIPE_KEYS))
            raise InputError(
                f"{location}: a recipe has no key '{prefix}{str(key)[:MAX_NAME_LENGTH]}', only {keys}; {remedy}"
            )
    for key, choices in (("executor", EXECUTORS), ("rows", ROW_KINDS)):
        if (value := recipe.get(key, choices[0])) not in choices:
            raise InputError(
                f"{location}: '{prefix}{key}' must be {' or '.join(choices)}, found {shorten_value(value)}"
            )
    address = recipe.get("ray_address")
    if address is not None and not isinstance(address, str):
        raise InputError(f"{location}: '{prefix}ray_address' must be a string, found {shorten_value(address)}")
    if address is not None and recipe.get("executor") != "ray":
        raise InputError(f"{location}: '{prefix}ray_address' needs 'executor: ray'")
    if address is not None and not trusted and not LOCAL_RAY.fullmatch(address):
        raise InputError(
            f"{location}: '{prefix}ray_address' must be auto, or a port of this machine such as 127.0.0.1:6379, found "
            f"{shorten_value(address)}: another machine would receive data and code. For your own cluster, write auto "
            "and set RAY_ADDRESS in your environment"
        )


def _with_types(step: RecipeStep) -> RecipeStep:
    """Return a step with numbers of the type that its arguments take, and with `~` replaced in folders."""
    operator = read_allowed_operators().get(step.name)
    captioner = None if step.captioner is None else _with_types(step.captioner)
    arguments = dict(step.arguments)
    for key in arguments.keys() & operator.arguments.keys() if operator else ():
        kind, value = operator.arguments[key], arguments[key]
        arguments[key] = os.path.expanduser(value) if is_folder_argument(kind, value) else convert_number(kind, value)
    if captioner:
        arguments[CAPTIONER_ARGUMENT] = captioner.as_dict()
    return replace(step, arguments=arguments, captioner=captioner)


def check_step(step: RecipeStep, folders: Collection[str] | None, trusted: bool) -> None:
    """Check an operator, and the values of its arguments.

    A trusted recipe may give Data-Juicer's operators any value, and this workflow's own operators any folder.
    """
    _check_refused_arguments(step)
    operator = read_allowed_operators().get(step.name)
    if trusted:
        if operator:
            _check_names(step, operator, operator.arguments.keys() | operator.defaults.keys())
        if operator and operator.is_own:
            _check_values(step, operator, folders, trusted)
        return
    if operator is None:
        raise _make_refusal(step)
    if step.is_captioner and not operator.writes_captions:
        captioners = ", ".join(
            name for name, candidate in read_allowed_operators().items() if candidate.writes_captions
        )
        raise InputError(f"{step.location}: {step.name} writes no captions. Use one of {captioners}")
    _check_names(step, operator, operator.arguments.keys())
    _check_values(step, operator, folders, trusted)


def check_order(steps: Collection[RecipeStep]) -> None:
    """Raise InputError for an order in which a step cannot work as intended.

    Such a step reads texts that do not exist yet, writes the same rows again, or measures texts that are rewritten
    later.
    """
    names = [step.name for step in steps]
    for number, step in enumerate(steps):
        before, after = names[:number], names[number + 1 :]
        if step.name == INSTRUCTION_OPERATOR and INSTRUCTION_OPERATOR in before:
            raise InputError(
                f"{step.location}: {INSTRUCTION_OPERATOR} would write the same rows again. Remove it, or raise "
                "per_image of the first"
            )
        if step.name == INSTRUCTION_OPERATOR:
            readers = [name for name in before if name in read_allowed_operators() and name not in READING_IMAGES]
            if readers:
                raise InputError(
                    f"{step.location}: new rows have no text yet when {readers[0]} reads them. Put "
                    f"{INSTRUCTION_OPERATOR} before it"
                )
        if step.name == RECAPTION_OPERATOR:
            repeated = [name for name in before if name in MEASURED_ON_INPUT_TEXT and name in after]
            if repeated:
                raise InputError(
                    f"{step.location}: each row is measured once, so the {repeated[0]} after {step.name} would not "
                    f"measure the new texts. Remove the first {repeated[0]}"
                )


def check_models_named(steps: Collection[RecipeStep]) -> None:
    """Raise InputError for an operator without a named model, whose default is on the hub.

    Only named models are downloaded.

    Args:
        steps: steps with the arguments of the stage.
    """
    for step in (nested_step for top in steps for nested_step in top.list_with_captioner()):
        operator = read_allowed_operators().get(step.name)
        for argument, kind in operator.arguments.items() if operator else ():
            default = operator.defaults.get(argument)
            if kind == "model" and step.arguments.get(argument) is None and default not in (None, REQUIRED_MARK):
                raise InputError(
                    f"{step.location}: {step.name}: {argument!r} is missing, and its default, {default}, is on the "
                    "hub. Name the folder of a model"
                )


def make_row_merge_error(location: str, name: str) -> InputError:
    """Return the error for an operator that makes one row of several."""
    return InputError(
        f"{location}: {name} {MERGES_ROWS}; this stage only keeps, drops or edits them. "
        "Use a filter, mapper, deduplicator or selector"
    )


def _check_refused_arguments(step: RecipeStep) -> None:
    for key, value in _walk(step.arguments):
        if key in REFUSED_ARGUMENTS and value:
            reason = REFUSED_ARGUMENTS[key]
            raise InputError(f"{step.location}: {step.name}: {key!r} is not allowed, since {reason}. Omit it")
        if key in ARGUMENT_FORMATS and isinstance(value, str) and not ARGUMENT_FORMATS[key][0](value):
            raise InputError(f"{step.location}: {step.name}: {key!r} must {ARGUMENT_FORMATS[key][1]}")


def _walk(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value in a tree with the name of its argument."""
    yield key, value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, key)


def _make_refusal(step: RecipeStep) -> InputError:
    reason = read_refused_operators().get(step.name)
    if reason == MERGES_ROWS:
        return make_row_merge_error(step.location, step.name)
    if reason:
        return InputError(
            f"{step.location}: {step.name} is not allowed in a recipe, because it {reason}. Remove the step. "
            f"{TRUST_REMEDY}"
        )
    nearest_name = find_nearest_name(step.name, read_allowed_operators().keys() | read_refused_operators().keys())
    return InputError(
        f"{step.location}: unknown operator {step.name!r}; the nearest known one is {nearest_name!r}. Your own "
        "operators need an entry in config/schemas/operators.yaml"
    )


def _check_names(step: RecipeStep, operator: AllowedOperator, allowed: Collection[str]) -> None:
    for argument in step.arguments:
        if argument in allowed:
            continue
        if argument in operator.defaults:
            allowed_names = ", ".join(sorted(allowed))
            raise InputError(
                f"{step.location}: {step.name}: {argument!r} is not allowed in a recipe. Allowed are {allowed_names}. "
                f"Remove {argument}. {TRUST_REMEDY}"
            )
        raise InputError(
            f"{step.location}: {step.name} has no argument {argument!r}; the nearest one is "
            f"{find_nearest_name(argument, allowed)!r}"
        )


def _check_values(step: RecipeStep, operator: AllowedOperator, folders: Collection[str] | None, trusted: bool) -> None:
    """Raise InputError for a value of another kind, or values that are not valid together."""
    for argument, value in step.arguments.items():
        if (kind := operator.arguments.get(argument)) is None:  # only in a trusted recipe
            continue
        problem = find_problem(kind, value)
        if problem is None and not trusted and is_folder_argument(kind, value):
            problem = find_folder_problem(kind.split(" or ")[0], value, folders)
        if problem:
            raise InputError(f"{step.location}: {step.name}: {argument!r} {problem}")
    _check_rules(step, operator)


def _check_rules(step: RecipeStep, operator: AllowedOperator) -> None:
    """Raise InputError for arguments that are valid alone but not together."""
    location = f"{step.location}: {step.name}"
    for low in (name for name in operator.arguments if name.startswith("min_")):
        high = f"max_{low.removeprefix('min_')}"
        if {low, high} & step.arguments.keys() and high in operator.arguments:
            _check_bounds(step, operator, low, high)
    for group in operator.rules.get("at_least_one", ()):
        if not any(step.arguments.get(name) is not None for name in group):
            raise InputError(f"{location}: the operator has no effect without {' or '.join(group)}. Give one")
    for rule in ("exactly_one", "at_most_one"):
        for group in operator.rules.get(rule, ()):
            set_arguments = [
                name for name in group if step.arguments.get(name) not in (None, operator.defaults.get(name))
            ]
            if len(set_arguments) > 1:
                raise InputError(f"{location}: {' and '.join(set_arguments)} exclude each other. Keep one of them")
            if not set_arguments and rule == "exactly_one":
                raise InputError(f"{location}: neither {' nor '.join(group)} is given. Give exactly one")
    for group in operator.rules.get("same_length", ()):
        lengths = {len(step.arguments[name]) for name in group if isinstance(step.arguments.get(name), list)}
        if len(lengths) > 1:
            raise InputError(f"{location}: {' and '.join(group)} are lists of different lengths. Give as many items")
    for low, high in operator.rules.get("below", ()):
        _check_bounds(step, operator, low, high, strictly=True)


def _check_bounds(step: RecipeStep, operator: AllowedOperator, low: str, high: str, strictly: bool = False) -> None:
    """Raise InputError if an argument, or its default, is above another one, or `strictly` if they are equal."""
    lower, upper = (_read_number(step, operator, name) for name in (low, high))
    if lower is None or upper is None or not (lower > upper or strictly and lower == upper):
        return
    low, high = (_describe_argument(step, operator, name) for name in (low, high))
    problem = f"{low} must be below {high}" if strictly else f"{low} is above {high}, so that no row could be kept"
    raise InputError(f"{step.location}: {step.name}: {problem}. Change one of them")


def _read_number(step: RecipeStep, operator: AllowedOperator, argument: str) -> float | None:
    """Return an argument or its default as a number; sizes become bytes."""
    value = step.arguments.get(argument, operator.defaults.get(argument))
    if operator.arguments.get(argument) == "size" and isinstance(value, str):
        return parse_argument_size(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _describe_argument(step: RecipeStep, operator: AllowedOperator, argument: str) -> str:
    if argument in step.arguments:
        return f"{argument} {step.arguments[argument]}"
    return f"{argument} (by default {operator.defaults.get(argument)})"
