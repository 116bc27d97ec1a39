"""Recipes: parsed into typed steps and checked, before anything runs and again by the stage.

A recipe is data, possibly from a stranger. It may use the operators and arguments that config/schemas/operators.yaml
allows, with values of their kinds. `trusted_recipes: true` in config/config.yaml allows the rest of Data-Juicer.
"""

import difflib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from dj2mgm.errors import InputError
from dj2mgm.recipes.argument_kinds import convert_number, shorten_value
from dj2mgm.recipes.catalogue import read_allowed_operators
from dj2mgm.recipes.operator_checks import check_order, check_step
from dj2mgm.recipes.recipe_files import is_folder_argument
from dj2mgm.recipes.recipe_step import CAPTIONER_ARGUMENT, MAX_NAME_LENGTH, PAIRS, ROW_KINDS, RecipeStep, parse_steps

RECIPE_KEYS = {"process", "executor", "ray_address", "rows"}
EXECUTORS = ("default", "ray")  # Data-Juicer's names
LOCAL_RAY = re.compile(r"auto|(localhost|127\.0\.0\.1|\[::1\]):[0-9]{1,5}")


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
    if (executor := recipe.get("executor", EXECUTORS[0])) not in EXECUTORS:
        raise InputError(
            f"{location}: '{prefix}executor' must be {' or '.join(EXECUTORS)}, found {shorten_value(executor)}"
        )
    if recipe.get("rows", PAIRS) not in ROW_KINDS:
        raise InputError(
            f"{location}: '{prefix}rows' must be {' or '.join(ROW_KINDS)}, found {shorten_value(recipe['rows'])}"
        )
    address = recipe.get("ray_address")
    if address is not None and not isinstance(address, str):
        raise InputError(f"{location}: '{prefix}ray_address' must be a string, found {shorten_value(address)}")
    if address is not None and executor != "ray":
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
