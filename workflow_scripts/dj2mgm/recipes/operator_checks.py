"""Checks of a recipe's operators against the catalogue: names, values, limits and order."""

from collections.abc import Collection, Iterator

from dj2mgm.errors import InputError
from dj2mgm.recipes.argument_kinds import find_folder_problem, find_problem, parse_argument_size
from dj2mgm.recipes.catalogue import REQUIRED_MARK, AllowedOperator, read_allowed_operators, read_refused_operators
from dj2mgm.recipes.recipe_files import is_folder_argument
from dj2mgm.recipes.recipe_step import (
    INSTRUCTION_OPERATOR,
    MEASURED_ON_INPUT_TEXT,
    READING_IMAGES,
    RECAPTION_OPERATOR,
    RecipeStep,
    find_nearest_name,
)
from dj2mgm.settings.string_formats import ADDRESS_RULE, VARIABLE_RULE, is_address, is_variable

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


def check_step(step: RecipeStep, folders: Collection[str] | None, trusted: bool) -> None:
    """Check an operator, and the values of its arguments."""
    _check_refused_arguments(step)
    operator = read_allowed_operators().get(step.name)
    if trusted:
        if operator:
            _check_names(step, operator, operator.arguments.keys() | operator.defaults.keys())
        return
    if operator is None:
        raise _make_refusal(step)
    if step.is_captioner and not operator.writes_captions:
        captioners = ", ".join(
            name for name, candidate in read_allowed_operators().items() if candidate.writes_captions
        )
        raise InputError(f"{step.location}: {step.name} writes no captions. Use one of {captioners}")
    _check_names(step, operator, operator.arguments.keys())
    _check_values(step, operator, folders)
    _check_limits(step, operator)
    _check_rules(step, operator)


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


def _check_values(step: RecipeStep, operator: AllowedOperator, folders: Collection[str] | None) -> None:
    for argument, value in step.arguments.items():
        kind = operator.arguments[argument]
        problem = find_problem(kind, value)
        if problem is None and is_folder_argument(kind, value):
            problem = find_folder_problem(kind.split(" or ")[0], value, folders)
        if problem:
            raise InputError(f"{step.location}: {step.name}: {argument!r} {problem}")


def _check_limits(step: RecipeStep, operator: AllowedOperator) -> None:
    """Raise InputError for a lower limit above the upper one, which may be a default."""
    for low in (name for name in operator.arguments if name.startswith("min_")):
        high = f"max_{low.removeprefix('min_')}"
        if {low, high} & step.arguments.keys() and high in operator.arguments:
            lower, upper = (_read_number(step, operator, name) for name in (low, high))
            if lower is not None and upper is not None and lower > upper:
                raise InputError(
                    f"{step.location}: {step.name}: {_describe_argument(step, operator, low)} is above "
                    f"{_describe_argument(step, operator, high)}, so that no row could be kept. Change one of them"
                )


def _check_rules(step: RecipeStep, operator: AllowedOperator) -> None:
    """Raise InputError for arguments that are valid alone but not together."""
    location = f"{step.location}: {step.name}"
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
        lower, upper = (_read_number(step, operator, name) for name in (low, high))
        if lower is not None and upper is not None and lower >= upper:
            bounds = (_describe_argument(step, operator, name) for name in (low, high))
            raise InputError(f"{location}: {' must be below '.join(bounds)}. Change one of them")


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
