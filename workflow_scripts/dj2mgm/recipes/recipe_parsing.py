"""Recipes: parsed into typed steps and checked, before anything runs and again by the stage.

A recipe is data, possibly from a stranger. It may use the operators and arguments that config/schemas/operators.yaml
allows, with values of their kinds. `trusted_recipes: true` in config/config.yaml allows the rest of Data-Juicer.
"""

import difflib
import math
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from dj2mgm.errors import InputError
from dj2mgm.recipes.argument_kinds import (
    FOLDER_KINDS,
    as_typed,
    find_folder_problem,
    find_problem,
    parse_argument_size,
    shorten_value,
)
from dj2mgm.recipes.recipe_operators import (
    REQUIRED,
    AllowedOperator,
    allowed_operators,
    refused_operators,
)
from dj2mgm.settings.endpoints import ADDRESS_RULE, VARIABLE_RULE, is_address, is_variable

KEYS = {"process", "executor", "ray_address", "rows"}
PAIRS, INSTRUCTIONS = "pairs", "instructions"
ROW_KINDS = (PAIRS, INSTRUCTIONS)
EXECUTORS = ("default", "ray")  # Data-Juicer's names
LOCAL_RAY = re.compile(r"auto|(localhost|127\.0\.0\.1|\[::1\]):[0-9]{1,5}")
MAX_VALUES = 10_000
MAX_NAME_LENGTH = 100  # characters of a name that are compared and shown; names of operators are shorter
FOLDER_FILES = (".json", ".txt", ".safetensors")  # in a folder of models or word lists
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
DATASET_FILES = ("question_file", "held_out_file")  # arguments that the stage adds: files of the dataset
# arguments that the stage adds; they name files and folders that are no inputs of a recipe
STAGE_PATHS = {"image_root", "captions_folder", *DATASET_FILES}
MERGES_ROWS = "merges or groups rows"  # a reason in config/schemas/operators.yaml
TRUST = "If you trust the author of the recipe, set trusted_recipes: true in config/config.yaml"
# operators to which a stage adds the CLIP of the model's file, unless the recipe names one
WITH_CLIP = (
    "batched_image_text_similarity_filter",
    "image_text_similarity_filter",
    "image_embedding_deduplicator",
    "cluster_balance_filter",
)
LIKELIHOOD_GAIN = "likelihood_gain_filter"
RECAPTION = "low_similarity_recaption_mapper"
INSTRUCT = "instruction_synthesis_mapper"
RATE = "vlm_rating_filter"
REPAIR = "answer_repair_mapper"
# operators whose captioner answers questions
ANSWERING = (INSTRUCT, RATE, REPAIR)
# operators that measure texts with a trained model
MEASURING = (LIKELIHOOD_GAIN, "blind_answer_filter", "round_trip_filter")
# operators that measure a text once, and not again after a mapper has changed it
MEASURED_ON_INPUT_TEXT = (*MEASURING, RATE, "caption_agreement_filter")
# operators that read images only
READING_IMAGES = (
    "image_aspect_ratio_filter",
    "image_integrity_filter",
    "image_nsfw_filter",
    "image_shape_filter",
    "image_size_filter",
    "image_watermark_filter",
)
# operators that read questions
WITH_QUESTIONS = (INSTRUCT, REPAIR, "blind_answer_filter", "round_trip_filter", "caption_agreement_filter")
CAPTIONER = "captioner"  # an argument that is an operator itself
# operators to which a stage adds a captioner, by the argument with which a recipe names its own model instead: an
# operator (`captioner`), or the folder of a finished training stage (`stage`)
WITH_CAPTIONER = dict.fromkeys((RECAPTION, *ANSWERING), CAPTIONER) | dict.fromkeys(MEASURING, "stage")


@dataclass(frozen=True)
class RecipeStep:
    """An operator of a recipe, or the captioner of another operator.

    Attributes:
        place: file and step, for messages.
        name: name of the operator.
        arguments: arguments that the recipe gives.
        captioner: the captioning operator in this step's argument `captioner`.
        is_captioner: whether it is the argument of another operator.
    """

    place: str
    name: str
    arguments: dict
    captioner: "RecipeStep | None" = None
    is_captioner: bool = False

    def self_and_captioner(self) -> list["RecipeStep"]:
        return [self, self.captioner] if self.captioner else [self]

    def with_defaults(self, arguments: dict) -> "RecipeStep":
        """Return the step with further arguments; those of the recipe take precedence."""
        return _make_step(self.place, self.name, arguments | self.arguments)

    def as_dict(self) -> dict:
        """Return the step as Data-Juicer writes it, {operator: {argument: value}}."""
        return {self.name: self.arguments or None}


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


def nearest(name: object, known: Collection[str]) -> str:
    """Return the known name that is most similar to another."""
    return difflib.get_close_matches(str(name)[:MAX_NAME_LENGTH], sorted(known), n=1, cutoff=0)[0]


def parse_recipe(
    where: object, recipe: dict, prefix: str = "", folders: Collection[str] | None = None, trusted: bool = False
) -> Recipe:
    """Check a recipe and return it with typed steps.

    Args:
        where: name of the file, for messages.
        recipe: contents of a recipe's file.
        prefix: prefix of the recipe's keys in the file.
        folders: folders that may contain the recipe's models (None: this has been checked before).
        trusted: whether the recipe may use operators and arguments that are not in config/schemas/operators.yaml, and
            a Ray cluster on another machine.

    Raises:
        InputError: If something is not allowed; the message has the step, the operator, the argument and the remedy.
    """
    _check_top_level_keys(where, recipe, prefix, trusted)
    place = f"{where}: {prefix.removesuffix('.')}" if prefix else where
    steps = parse_steps(place, recipe.get("process"))
    for step in (each for top in steps for each in top.self_and_captioner()):
        _check_step(step, folders, trusted)
    _check_order(steps)
    stated = {key: recipe[key] for key in ("executor", "ray_address", "rows") if recipe.get(key) is not None}
    return Recipe(tuple(_with_types(step) for step in steps), **stated)


def parse_steps(where: object, process: object) -> list[RecipeStep]:
    """Return the steps of a `process` list after a check of their form only.

    Raises:
        InputError: If a step is not well-formed.
    """
    if not isinstance(process, list) or not process:
        raise InputError(
            f"{where}: 'process' must be a list of at least one operator, as in config/recipes/baseline.yaml"
        )
    return [_parse_step(f"{where}, step {number}", step) for number, step in enumerate(process, start=1)]


def _check_top_level_keys(where: object, recipe: dict, prefix: str, trusted: bool) -> None:
    """Check the keys of a recipe, and all of its values except `process`."""
    for key in recipe:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key)[:MAX_NAME_LENGTH], KEYS, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "data, outputs and processes are set in config/"
            keys = ", ".join(sorted(KEYS))
            raise InputError(
                f"{where}: a recipe has no key '{prefix}{str(key)[:MAX_NAME_LENGTH]}', only {keys}; {remedy}"
            )
    if (executor := recipe.get("executor", EXECUTORS[0])) not in EXECUTORS:
        raise InputError(
            f"{where}: '{prefix}executor' must be {' or '.join(EXECUTORS)}, found {shorten_value(executor)}"
        )
    if recipe.get("rows", PAIRS) not in ROW_KINDS:
        raise InputError(
            f"{where}: '{prefix}rows' must be {' or '.join(ROW_KINDS)}, found {shorten_value(recipe['rows'])}"
        )
    address = recipe.get("ray_address")
    if address is not None and not isinstance(address, str):
        raise InputError(f"{where}: '{prefix}ray_address' must be a string, found {shorten_value(address)}")
    if address is not None and executor != "ray":
        raise InputError(f"{where}: '{prefix}ray_address' needs 'executor: ray'")
    if address is not None and not trusted and not LOCAL_RAY.fullmatch(address):
        raise InputError(
            f"{where}: '{prefix}ray_address' must be auto, or a port of this machine such as 127.0.0.1:6379, found "
            f"{shorten_value(address)}: another machine would receive data and code. For your own cluster, write auto "
            "and set RAY_ADDRESS in your environment"
        )


def _check_step(step: RecipeStep, folders: Collection[str] | None, trusted: bool) -> None:
    """Check an operator, and the values of its arguments."""
    _check_refused_arguments(step)
    operator = allowed_operators().get(step.name)
    if trusted:
        if operator:
            _check_names(step, operator, operator.arguments.keys() | operator.defaults.keys())
        return
    if operator is None:
        raise _not_allowed(step)
    if step.is_captioner and not operator.writes_captions:
        captioners = ", ".join(name for name, known in allowed_operators().items() if known.writes_captions)
        raise InputError(f"{step.place}: {step.name} writes no captions. Use one of {captioners}")
    _check_names(step, operator, operator.arguments.keys())
    _check_values(step, operator, folders)
    _check_limits(step, operator)
    _check_rules(step, operator)


def _check_order(steps: Collection[RecipeStep]) -> None:
    """Raise InputError for a step that would measure texts which a later mapper writes."""
    names = [step.name for step in steps]
    for number, step in enumerate(steps):
        before, after = names[:number], names[number + 1 :]
        if step.name == INSTRUCT and INSTRUCT in before:
            raise InputError(
                f"{step.place}: {INSTRUCT} would write the same rows again. Remove it, or raise per_image of the first"
            )
        if step.name == INSTRUCT:
            reading = [name for name in before if name in allowed_operators() and name not in READING_IMAGES]
            if reading:
                raise InputError(
                    f"{step.place}: new rows have no text yet when {reading[0]} reads them. Put {INSTRUCT} before it"
                )
        if step.name in (RECAPTION, REPAIR):
            twice = [name for name in before if name in MEASURED_ON_INPUT_TEXT and name in after]
            if twice:
                raise InputError(
                    f"{step.place}: {twice[0]} measures each row once, so the {twice[0]} before {step.name} would keep "
                    f"it from measuring the new texts. Remove the first {twice[0]}"
                )


def check_models_named(steps: Collection[RecipeStep]) -> None:
    """Raise InputError for an operator whose model is its default, a hub id; only named models are downloaded.

    Args:
        steps: steps with the arguments of the stage.
    """
    for step in (each for top in steps for each in top.self_and_captioner()):
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
        f"{place}: {name} merges or groups rows; this stage only keeps, drops or edits them. "
        "Use a filter, mapper, deduplicator or selector"
    )


def find_recipe_files(recipe: dict | list | None) -> list[str]:
    """Return the files that a recipe reads in addition to its data, in the folders that its arguments name.

    Args:
        recipe: a checked recipe, its `process` list, or None.
    """
    process = recipe.get("process") if isinstance(recipe, dict) else recipe
    steps = [(name, arguments or {}) for step in process or () for name, arguments in step.items()]
    return [file for name, arguments in steps for file in _files_of_step(name, arguments)]


def select_file_arguments(name: str, arguments: dict) -> dict:
    """Return the arguments of an operator that may name files.

    Args:
        name: name of the operator. If it is not in the list of allowed operators, any argument may name a file.
        arguments: arguments of the recipe and the stage.
    """
    operator = allowed_operators().get(name)
    kinds = operator.arguments if operator else {}
    return {
        key: value
        for key, value in arguments.items()
        if key not in STAGE_PATHS and (key == CAPTIONER or key not in kinds or _is_folder(kinds[key], value))
    }


def _files_of_step(name: str, arguments: dict) -> list[str]:
    files = []
    for key, value in select_file_arguments(name, arguments).items():
        files += find_recipe_files([value]) if key == CAPTIONER and isinstance(value, dict) else _files_in(value)
    return files


def _files_in(value: object) -> list[str]:
    """Return the files that a value names at any depth, and the files of folders that it names."""
    if isinstance(value, str):
        path = re.sub("/+", "/", value)  # Snakemake does not find paths with `//`
        if os.path.isdir(path):
            names = sorted(name for name in os.listdir(path) if name.endswith(FOLDER_FILES))
            return [file for name in names if os.path.isfile(file := os.path.join(path, name))]
        return [path] if os.path.isfile(path) else []
    if isinstance(value, dict):
        value = list(value.values())
    items = value if isinstance(value, list) else ()
    return [file for item in items for file in _files_in(item)]


def _parse_step(place: str, step: object, is_captioner: bool = False) -> RecipeStep:
    _check_plain(place, step)
    name, arguments = next(iter(step.items())) if isinstance(step, dict) and len(step) == 1 else ("", "")
    if not name or not isinstance(arguments, dict | None):
        raise InputError(f"{place}: expected 'operator: {{argument: value}}', found {shorten_value(step)}")
    for key in (name, *(arguments or ())):
        if len(key) > MAX_NAME_LENGTH:
            raise InputError(
                f"{place}: {shorten_value(key)} is longer than any name of an operator or argument. Correct it"
            )
    return _make_step(place, name, arguments or {}, is_captioner)


def _make_step(place: str, name: str, arguments: dict, is_captioner: bool = False) -> RecipeStep:
    captioner = None
    if not is_captioner and arguments.get(CAPTIONER) is not None:
        captioner = _parse_step(f"{place}, {CAPTIONER}", arguments[CAPTIONER], is_captioner=True)
    return RecipeStep(place, name, arguments, captioner, is_captioner)


def _with_types(step: RecipeStep) -> RecipeStep:
    """Return a step with numbers of the type that its arguments take, and with `~` replaced in folders."""
    operator = allowed_operators().get(step.name)
    captioner = step.captioner and _with_types(step.captioner)
    arguments = dict(step.arguments)
    for key in arguments.keys() & operator.arguments.keys() if operator else ():
        kind, value = operator.arguments[key], arguments[key]
        arguments[key] = os.path.expanduser(value) if _is_folder(kind, value) else as_typed(kind, value)
    if captioner:
        arguments[CAPTIONER] = captioner.as_dict()
    return replace(step, arguments=arguments, captioner=captioner)


def _check_plain(place: str, value: object) -> None:
    """Raise InputError for values that JSON cannot hold, because they would be converted on the way to the operator."""
    waiting, seen = [value], 0
    while waiting:
        value, seen = waiting.pop(), seen + 1
        if seen > MAX_VALUES:
            raise InputError(
                f"{place}: the step has more than {MAX_VALUES} values, or contains itself. Use fewer values"
            )
        if isinstance(value, dict):
            if odd := [key for key in value if not isinstance(key, str)]:
                raise InputError(f"{place}: the key {odd[0]!r} is not a string. Put it in quotes")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{place}: {value} is not a finite number. Omit the argument for no limit")
        elif not isinstance(value, str | int | float | None):
            raise InputError(f"{place}: {shorten_value(value)} is a {type(value).__name__}. Put strings in quotes")


def _check_refused_arguments(step: RecipeStep) -> None:
    for key, value in _walk(step.arguments):
        if key in REFUSED_ARGUMENTS and value:
            reason = REFUSED_ARGUMENTS[key]
            raise InputError(f"{step.place}: {step.name}: {key!r} is not allowed, since {reason}. Omit it")
        if key in ARGUMENT_FORMATS and isinstance(value, str) and not ARGUMENT_FORMATS[key][0](value):
            raise InputError(f"{step.place}: {step.name}: {key!r} must {ARGUMENT_FORMATS[key][1]}")


def _walk(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value in a tree with the name of its argument."""
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
        return InputError(
            f"{step.place}: {step.name} is not allowed in a recipe, because it {reason}. Remove the step. {TRUST}"
        )
    known = nearest(step.name, allowed_operators().keys() | refused_operators().keys())
    return InputError(
        f"{step.place}: unknown operator {step.name!r}; the nearest known one is {known!r}. Your own operators need an "
        "entry in config/schemas/operators.yaml"
    )


def _check_names(step: RecipeStep, operator: AllowedOperator, allowed: Collection[str]) -> None:
    for argument in step.arguments:
        if argument in allowed:
            continue
        if argument in operator.defaults:
            usable = ", ".join(sorted(allowed))
            raise InputError(
                f"{step.place}: {step.name}: {argument!r} is not allowed in a recipe. Allowed are {usable}. Remove "
                f"{argument}. {TRUST}"
            )
        raise InputError(
            f"{step.place}: {step.name} has no argument {argument!r}; the nearest one is {nearest(argument, allowed)!r}"
        )


def _check_values(step: RecipeStep, operator: AllowedOperator, folders: Collection[str] | None) -> None:
    for argument, value in step.arguments.items():
        kind = operator.arguments[argument]
        problem = find_problem(kind, value)
        if problem is None and _is_folder(kind, value):
            problem = find_folder_problem(kind.split(" or ")[0], value, folders)
        if problem:
            raise InputError(f"{step.place}: {step.name}: {argument!r} {problem}")


def _check_limits(step: RecipeStep, operator: AllowedOperator) -> None:
    """Raise InputError for a lower limit above the upper one, which may be a default."""
    for low in (name for name in operator.arguments if name.startswith("min_")):
        high = f"max_{low.removeprefix('min_')}"
        if {low, high} & step.arguments.keys() and high in operator.arguments:
            least, most = (_read_number(step, operator, name) for name in (low, high))
            if least is not None and most is not None and least > most:
                raise InputError(
                    f"{step.place}: {step.name}: {_stated(step, operator, low)} is above "
                    f"{_stated(step, operator, high)}, so that no row could be kept. Change one of them"
                )


def _check_rules(step: RecipeStep, operator: AllowedOperator) -> None:
    place = f"{step.place}: {step.name}"
    for group in operator.rules.get("at_least_one", ()):
        if not any(step.arguments.get(name) is not None for name in group):
            raise InputError(f"{place}: the operator has no effect without {' or '.join(group)}. Give one")
    for rule in ("exactly_one", "at_most_one"):
        for group in operator.rules.get(rule, ()):
            given = [name for name in group if step.arguments.get(name) not in (None, operator.defaults.get(name))]
            if len(given) > 1:
                raise InputError(f"{place}: {' and '.join(given)} exclude each other. Keep one of them")
            if not given and rule == "exactly_one":
                raise InputError(f"{place}: neither {' nor '.join(group)} is given. Give exactly one")
    for group in operator.rules.get("same_length", ()):
        lengths = {len(step.arguments[name]) for name in group if isinstance(step.arguments.get(name), list)}
        if len(lengths) > 1:
            raise InputError(f"{place}: {' and '.join(group)} are lists of different lengths. Give equally many items")
    for low, high in operator.rules.get("below", ()):
        least, most = (_read_number(step, operator, name) for name in (low, high))
        if least is not None and most is not None and least >= most:
            stated = (_stated(step, operator, name) for name in (low, high))
            raise InputError(f"{place}: {' must be below '.join(stated)}. Change one of them")


def _read_number(step: RecipeStep, operator: AllowedOperator, argument: str) -> float | None:
    """Return an argument or its default as a number; a size in bytes."""
    value = step.arguments.get(argument, operator.defaults.get(argument))
    if operator.arguments.get(argument) == "size" and isinstance(value, str):
        return parse_argument_size(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _stated(step: RecipeStep, operator: AllowedOperator, argument: str) -> str:
    if argument in step.arguments:
        return f"{argument} {step.arguments[argument]}"
    return f"{argument} (by default {operator.defaults.get(argument)})"


def _is_folder(kind: str, value: object) -> bool:
    return isinstance(value, str) and kind.split(" or ")[0] in FOLDER_KINDS
