"""Changes of an experiment by dotted key: their layer of the configuration, and the values before them."""

import itertools
import json
from collections.abc import Mapping
from copy import deepcopy
from hashlib import sha256
from typing import Any

from dj2mgm.errors import InputError
from dj2mgm.settings.base import Section
from dj2mgm.settings.configuration import Experiment, SharedKeys
from dj2mgm.settings.string_formats import has_format

RECIPE_PREFIX = "recipe."  # prefix of keys that change a recipe: recipe.<operator> or recipe.<operator>.<argument>
BY_SOURCE = ("sources", "shares")  # sections whose keys are names of sources, which may contain dots
MAX_LABEL_LENGTH = 60  # characters of a variant's label; longer ones are replaced by a hash


def read_setting(config: Experiment | Section, recipes: dict[str, dict | None], key: str) -> Any:
    """Return the value of a dotted key, as in the changes of variants; None if it is not set.

    Args:
        config: a merged configuration.
        recipes: its recipes by stage, without the operators in `without`.
        key: key of the configuration or of a recipe.
    """
    if key.startswith(RECIPE_PREFIX):
        operator, _, argument = key.removeprefix(RECIPE_PREFIX).partition(".")
        steps = [step for recipe in recipes.values() if recipe for step in recipe["process"] if operator in step]
        if not argument:
            return bool(steps)
        return (steps[0][operator] or {}).get(argument) if steps else None
    section_name, _, source = key.partition(".")
    if section_name in BY_SOURCE and source:
        return getattr(config, section_name).get(source, 1 if section_name == "sources" else None)
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value.model_dump() if isinstance(value, Section) else value


def nest_changes(source: str, changes: Mapping[str, Any], parent: Experiment) -> dict:
    """Return changes by dotted key as a layer of the configuration; `finetune.lora` applies before `finetune.lora.r`.

    Args:
        source: origin of the changes, for messages.
        changes: keys of the configuration; `recipe.<operator>` with true or false, and `recipe.<operator>.<argument>`.
        parent: the configuration that they change.
    """
    layer: dict[str, Any] = {}
    for key in sorted(changes, key=lambda key: (key.startswith(RECIPE_PREFIX), key.count("."))):
        value = deepcopy(changes[key])
        if key.split(".")[0] in SharedKeys.model_fields:
            raise InputError(f"{source}: {key}: the setting applies to all experiments; a variant cannot change it")
        operator, _, argument = key.removeprefix(RECIPE_PREFIX).partition(".")
        if key.startswith(RECIPE_PREFIX) and argument:
            path = ["arguments", operator, argument]
        elif key.startswith(RECIPE_PREFIX):
            if not isinstance(value, bool):
                raise InputError(f"{source}: {key}: expected true or false, which switches the operator on or off")
            before = layer.get("without", parent.without)
            other_operators = [name for name in before if name != operator]
            value = other_operators if value else before if operator in before else [*before, operator]
            path = ["without"]
        else:
            path = key.split(".", maxsplit=1 if key.split(".")[0] in BY_SOURCE else -1)
        section = layer
        for part in path[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise InputError(f"{source}: {key}: another change replaces {part} as a whole; keep one of them")
        section[path[-1]] = value
    return layer


def with_row_fraction(
    parent: Experiment, changes: dict[str, Any], fraction: float | dict[str, float]
) -> dict[str, Any]:
    """Return the changes with `jsonl.fraction`: a fraction of the rows, or of the rows of each source.

    The number of epochs stays the same. With one fraction for all sources, `min_steps` and `max_steps` are scaled by
    it, so that the schedule keeps its shape.
    """
    shorter = changes | {"jsonl.fraction": fraction}
    for stage, key in itertools.product(("pretrain", "finetune"), ("min_steps", "max_steps")):
        steps = changes.get(f"{stage}.{key}", read_setting(parent, {}, f"{stage}.{key}"))
        if steps and not isinstance(fraction, dict):
            shorter[f"{stage}.{key}"] = max(1, round(fraction * steps))
    return shorter


def scale_proportional(
    proportional: Mapping[str, str], changes: Mapping[str, Any], parent: Experiment, source: str
) -> dict[str, Any]:
    """Return the values of keys that keep their ratio to a changed key.

    Args:
        proportional: the other key of each key.
        changes: the changes, by dotted key.
        parent: the configuration that they change.
        source: origin of the changes, for messages.
    """
    scaled: dict[str, Any] = {}
    for key, other_key in proportional.items():
        if other_key not in changes:
            continue
        values = [read_setting(parent, {}, key), changes[other_key], read_setting(parent, {}, other_key)]
        if not all(isinstance(value, int | float) for value in values) or not values[2]:
            raise InputError(
                f"{source}: proportional.{key}: the experiment's {key} and {other_key} must be numbers; remove this "
                "entry"
            )
        scaled[key] = values[0] * values[1] / values[2]
        if isinstance(values[0], int):
            scaled[key] = max(1, round(scaled[key]))
    return scaled


def hash_changes(changes: Mapping[str, Any]) -> str:
    """Return a short hash of changes, which names their variant."""
    return sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:10]


def label_changes(changes: Mapping[str, Any]) -> str:
    """Return a label such as lora-r8; a hash if the label would be too long or an invalid name."""
    label = "-".join(f"{'-'.join(key.split('.')[-2:])}{value}" for key, value in changes.items())
    return label if len(label) <= MAX_LABEL_LENGTH and has_format("name", label) else hash_changes(changes)
