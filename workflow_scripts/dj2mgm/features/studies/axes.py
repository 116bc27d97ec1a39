"""Axes of a space and changes of an experiment, both by dotted key.

- Axis: the values that a key may have. A mixture has an axis for each source, whose shares have a constant sum.
- Change: a key's value in a variant, as a layer of the configuration; and the value before it.
"""

import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from hashlib import sha256
from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from pydantic.fields import FieldInfo

from dj2mgm.errors import InputError
from dj2mgm.settings.base import (
    SEARCH,
    Number,
    SearchInterval,
    Section,
    UniqueItems,
    read_extra,
    refuse_contradiction,
    setting,
)
from dj2mgm.settings.configuration import Experiment, SharedKeys
from dj2mgm.settings.string_formats import has_format

Values = Annotated[list, Field(min_length=1), UniqueItems()]
SHARE_DECIMALS = 3
RECIPE_PREFIX = "recipe."  # prefix of keys that change a recipe: recipe.<operator> or recipe.<operator>.<argument>
BY_SOURCE = ("sources", "shares")  # sections whose keys are names of sources, which may contain dots
MAX_LABEL_LENGTH = 60  # characters of a variant's label; longer ones are replaced by a hash


class Interval(Section):
    """Numbers from `low` to `high`; integers if both are."""

    low: Number = setting(..., "smallest value")
    high: Number = setting(..., "largest value")
    log: bool = setting(False, "whether values are spread evenly by their logarithm")

    @property
    def has_integers(self) -> bool:
        """True if only integers lie in the interval."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Space = dict[str, Values | Interval | Literal["auto"]]


def check_space(space: Mapping[str, Any], varies_shares: bool = False) -> None:
    """Raise ValueError for axes that contradict each other, or the shares that the study varies otherwise."""
    shares_key = next((key for key in space if key.split(".")[0] == "shares"), None)
    if shares_key and varies_shares:
        refuse_contradiction("`mixture` varies the shares, too; keep one of them", "space", shares_key)
    for key, axis in space.items():
        if section_key := next((name for name in space if key.startswith(f"{name}.") and name != "recipe"), None):
            refuse_contradiction(f"{section_key} contains {key}; keep one of them", "space")
        if isinstance(axis, Interval) and not axis.low < axis.high:
            refuse_contradiction(f"low, {axis.low:g}, must be below high, {axis.high:g}", "space", key)
        if isinstance(axis, Interval) and axis.log and axis.low <= 0:
            refuse_contradiction(f"log needs a low above 0, found {axis.low:g}", "space", key)


def find_search_range(key: str) -> SearchInterval | None:
    """Return the interval in which a search tries a setting; None if its type declares none."""
    field = _find_field(key)
    return None if field is None else read_extra(field, SEARCH)


def _find_field(key: str) -> FieldInfo | None:
    """Return the definition of a setting; None for a key that is not a setting, such as an argument of a recipe."""
    kind, field = Experiment, None
    for part in key.split("."):
        field = kind.model_fields.get(part) if kind else None
        if field is None:
            return None
        kinds = getattr(field.annotation, "__args__", None) or (field.annotation,)
        kind = next(
            (annotation for annotation in kinds if isinstance(annotation, type) and issubclass(annotation, Section)),
            None,
        )
    return field


def _accepts_fractions(key: str) -> bool:
    """Return whether the values of a key may have decimals: shares of sources, and settings that are numbers."""
    field = _find_field(key)
    of_source = key.split(".")[0] in BY_SOURCE or key.startswith("jsonl.fraction.")
    return of_source or field is not None and _includes_float(field.annotation)


def _includes_float(annotation: Any) -> bool:
    return annotation is float or any(map(_includes_float, get_args(annotation)))


def list_searchable_axes(parent: Experiment) -> dict[str, Any]:
    """Return {key: "auto"} for each setting with a declared search range, in the stages that this model trains."""
    stages = ["finetune"] + (["pretrain"] if parent.model.has_stage_1 else [])
    kinds = {stage: type(getattr(parent, stage)) for stage in stages}
    keys = [f"{stage}.{key}" for stage, kind in kinds.items() for key in kind.model_fields]
    keys += [f"finetune.lora.{key}" for key in type(parent.finetune.lora).model_fields] if parent.finetune.lora else []
    return {key: "auto" for key in keys if find_search_range(key)}


def read_axis(source: str, key: str, axis: Any, parent: Experiment) -> list | Interval:
    """Return the values of a key; `auto` is replaced by the interval that its setting declares."""
    if isinstance(axis, Interval) and axis.has_integers and _accepts_fractions(key):
        return axis.model_copy(update={"low": float(axis.low), "high": float(axis.high)})
    if axis != "auto":
        return axis
    declared = find_search_range(key)
    if declared is None:
        raise InputError(f"{source}: design.space.{key}: the setting declares no range; state {{low, high}}")
    kind = int if isinstance(read_setting(parent, {}, key), int) else float
    return Interval(low=kind(declared.low), high=kind(declared.high), log=declared.log)


def compute_axis_value(axis: list | Interval, share: float) -> Any:
    """Return the value at a relative place on an axis, from 0 (low) to 1 (high)."""
    if isinstance(axis, list):
        return axis[min(int(share * len(axis)), len(axis) - 1)]
    margin = 0.5 if axis.has_integers else 0  # so that the ends are as likely as other integers
    low, high = (math.log(end) if axis.log else end for end in (axis.low - margin, axis.high + margin))
    value = low + share * (high - low)
    value = math.exp(value) if axis.log else value
    return min(max(round(value), axis.low), axis.high) if axis.has_integers else round_number(value)


def round_number(value: int | float) -> int | float:
    """Return an integer unchanged, and a float rounded to six significant digits, so that all file formats agree."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def count_points(axes: Iterable[list | Interval]) -> float:
    """Return the number of points of a space; infinite with an interval of numbers."""
    sizes = [
        len(axis) if isinstance(axis, list) else axis.high - axis.low + 1 if axis.has_integers else math.inf
        for axis in axes
    ]
    return math.prod(sizes)


class MixtureSpace(Section):
    """Shares of sources that vary while their sum stays the same."""

    sources: Annotated[list[str], UniqueItems(), Field(min_length=2)] = setting(
        ..., "sources of one split whose shares of the stage's samples vary"
    )
    total: Annotated[Number, Field(gt=0, le=1)] = setting(
        1.0, "sum of these shares; the split's other sources divide the rest"
    )


def build_share_axes(mixture: MixtureSpace | None) -> dict[str, Interval]:
    """Return the interval of each source's share, by dotted key."""
    sources = mixture.sources if mixture else ()
    return {f"shares.{source}": Interval(low=0.0, high=float(mixture.total)) for source in sources}


def list_quantile_keys(mixture: MixtureSpace | None) -> list[str]:
    """Return the names of the numbers that determine a mixture: one for each source but the last."""
    return [f"quantile of {key}" for key in list(build_share_axes(mixture))[:-1]]


def compute_shares(mixture: MixtureSpace | None, quantiles: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each source, by dotted key.

    Each number is the conditional quantile of its share, given the earlier shares. So independent uniform numbers make
    all mixtures equally likely (stick-breaking of a Dirichlet distribution whose parameters are 1).

    Args:
        mixture: the sources.
        quantiles: a number from 0 to 1 for each of `list_quantile_keys`.
    """
    keys = list(build_share_axes(mixture))
    shares = _break_stick(mixture.total, [quantiles[key] for key in list_quantile_keys(mixture)]) if mixture else ()
    return dict(zip(keys, shares, strict=True))


def compute_quantiles(mixture: MixtureSpace | None, shares: Mapping[str, float]) -> dict[str, float]:
    """Return numbers for which `compute_shares` returns these shares, by `list_quantile_keys`."""
    names, quantiles = list_quantile_keys(mixture), []
    rest = float(mixture.total) if mixture else 0.0
    for later, key in zip(range(len(names), 0, -1), build_share_axes(mixture), strict=False):
        part = min(1.0, shares[key] / rest) if rest > 0 else 0.0
        quantiles.append(1 - (1 - part) ** later)
        rest = round(rest - shares[key], SHARE_DECIMALS)
    return dict(zip(names, quantiles, strict=True))


def _break_stick(total: float, quantiles: list[float]) -> Iterator[float]:
    """Break parts off a total; the last part is the rest.

    Each part is a Beta(1, m) fraction of the rest, with m sources still to come.
    """
    rest = round(float(total), SHARE_DECIMALS)
    for later, quantile in zip(range(len(quantiles), 0, -1), quantiles, strict=True):
        part = round(rest * (1 - (1 - quantile) ** (1 / later)), SHARE_DECIMALS)
        yield part
        rest = round(rest - part, SHARE_DECIMALS)
    yield rest


def list_single_source_changes(mixture: MixtureSpace) -> dict[str, dict[str, float]]:
    """Return the changes of the variants that train on one source of a mixture alone, by label."""
    variants = {}
    for source in mixture.sources:
        changes = {f"shares.{name}": float(mixture.total) * (name == source) for name in mixture.sources}
        label = f"only-{source}"
        variants[label if has_format("name", label) else hash_changes(changes)] = changes
    return variants


def draw_mixtures(mixture: MixtureSpace, count: int, seed: int) -> list[dict[str, float]]:
    """Return the shares of at most `count` different random mixtures; all mixtures are equally likely."""
    numbers, keys = random.Random(f"{seed} merged"), list_quantile_keys(mixture)
    draws = [tuple(compute_shares(mixture, {key: numbers.random() for key in keys}).values()) for _ in range(count)]
    return [dict(zip(mixture.sources, shares, strict=True)) for shares in dict.fromkeys(draws)]


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
