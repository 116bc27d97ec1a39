"""Studies: the files in config/studies, and the variants of an experiment that their designs make."""

import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from dj2mgm.errors import InputError
from dj2mgm.runs.studies.mixtures import compute_shares, list_quantile_keys
from dj2mgm.runs.variants import Variant
from dj2mgm.settings.base import SEARCH, SearchInterval, Section, read_extra
from dj2mgm.settings.config_files import list_config_names, locate_existing_file, read_config
from dj2mgm.settings.configuration import Experiment, SharedKeys
from dj2mgm.settings.schema import build_schema
from dj2mgm.settings.string_formats import has_format
from dj2mgm.settings.study_files import (
    AblationDesign,
    CurveDesign,
    GridDesign,
    Interval,
    ListDesign,
    MixtureSpace,
    SampleDesign,
    StudyFile,
)
from dj2mgm.settings.validation import validate_settings

STUDIES_FOLDER = "studies"
RECIPE_PREFIX = "recipe."  # prefix of keys that change a recipe: recipe.<operator> or recipe.<operator>.<argument>
BY_SOURCE = ("sources", "shares")  # sections whose keys are names of sources, which may contain dots
MAX_LABEL_LENGTH = 60  # characters of a variant's label; longer ones are replaced by a hash


def list_study_names() -> list[str]:
    """Return the names of the files in config/studies; each is a target of `snakemake`."""
    return list_config_names(STUDIES_FOLDER)


def locate_study_file(name: str) -> str:
    """Return the path of a study's file."""
    return str(locate_existing_file(STUDIES_FOLDER, name, "study"))


def read_study_file(path: Path) -> StudyFile:
    """Return the content of a study's file.

    Raises:
        InputError: a key is unknown or of the wrong type, or two parts of the file contradict each other.
    """
    return validate_settings(StudyFile, read_config(path, build_schema(StudyFile)), str(path))


def read_study(name: str) -> StudyFile:
    return read_study_file(locate_existing_file(STUDIES_FOLDER, name, "study"))


def list_study_variants(name: str, study: StudyFile, parent: Experiment) -> list[Variant]:
    """Return the variants of a study.

    Args:
        name: name of the study.
        study: its file.
        parent: the merged configuration of `study.experiment`.
    """
    return [
        make_variant(name, study, parent, label, changes)
        for label, changes in _list_variant_changes(name, study, parent)
    ]


def make_variant(name: str, study: StudyFile, parent: Experiment, label: str, changes: dict[str, Any]) -> Variant:
    """Return a variant with these changes, by dotted key, and with the keys that are proportional to them."""
    file = locate_study_file(name)
    scaled = {
        key: _scale(parent, key, other_key, changes[other_key], file)
        for key, other_key in study.proportional.items()
        if other_key in changes
    }
    changes = changes | scaled
    layer = nest_changes(file, changes, parent)
    return Variant(f"{study.experiment}-{label}", study.experiment, file, layer, settings=changes)


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


def hash_changes(changes: Mapping[str, Any]) -> str:
    """Return a short hash of changes, which names their variant."""
    return sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:10]


def _list_variant_changes(name: str, study: StudyFile, parent: Experiment) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the label of each variant, and its changes."""
    design = study.design
    if isinstance(design, AblationDesign):
        yield from ((f"without-{operator}", {f"{RECIPE_PREFIX}{operator}": False}) for operator in design.operators)
    elif isinstance(design, CurveDesign):
        for source, fraction in itertools.product([None, *design.sources], design.fractions):
            changes = with_row_fraction(parent, {}, fraction if source is None else {source: fraction})
            label = f"rows-{fraction:g}" if source is None else f"{source}-rows-{fraction:g}"
            yield label if has_format("name", label) else hash_changes(changes), changes
    elif isinstance(design, ListDesign):
        yield from design.variants.items()
    elif isinstance(design, GridDesign):
        for values in itertools.product(*design.space.values()):
            changes = dict(zip(design.space, values, strict=True))
            yield _label(changes), changes
    elif isinstance(design, SampleDesign):
        axes = {key: read_axis(locate_study_file(name), key, axis, parent) for key, axis in design.space.items()}
        keys = [*axes, *list_quantile_keys(design.mixture)]
        points: dict[str, dict[str, Any]] = {}
        strata = {key: _shuffle(design.points, f"{design.seed} {key}") for key in keys}
        for point in range(design.points):
            positions = {key: (strata[key][point] + 0.5) / design.points for key in keys}
            changes = {key: compute_axis_value(axis, positions[key]) for key, axis in axes.items()}
            changes |= compute_shares(design.mixture, positions)
            points[hash_changes(changes)] = changes
        if (number := _count_points(axes.values())) < design.points and not design.mixture:
            raise InputError(
                f"{locate_study_file(name)}: design.points: the space has {number} points, fewer than {design.points}; "
                f"state {number}, or use the design `grid`"
            )
        yield from points.items()
        if design.merged:
            yield from list_single_source_changes(design.mixture).items()


def _count_points(axes: Iterable[list | Interval]) -> float:
    """Return the number of points of a space; infinite with an interval of numbers."""
    sizes = [
        len(axis) if isinstance(axis, list) else axis.high - axis.low + 1 if axis.has_integers else math.inf
        for axis in axes
    ]
    return math.prod(sizes)


def list_single_source_changes(mixture: MixtureSpace) -> dict[str, dict[str, float]]:
    """Return the changes of the variants that train on one source of a mixture alone, by label."""
    variants = {}
    for source in mixture.sources:
        changes = {f"shares.{name}": float(mixture.total) * (name == source) for name in mixture.sources}
        label = f"only-{source}"
        variants[label if has_format("name", label) else hash_changes(changes)] = changes
    return variants


def _shuffle(count: int, seed: str) -> list[int]:
    return random.Random(seed).sample(range(count), count)


def _scale(parent: Experiment, key: str, other_key: str, new_other_value: Any, source: str) -> Any:
    """Return a value for `key` that keeps its ratio to the key `other_key`, which becomes `new_other_value`."""
    key_value, other_value = read_setting(parent, {}, key), read_setting(parent, {}, other_key)
    numbers = [number for number in (key_value, other_value, new_other_value) if isinstance(number, int | float)]
    if len(numbers) < 3 or not other_value:
        raise InputError(
            f"{source}: proportional.{key}: the experiment's {key} and {other_key} must be numbers; remove this entry"
        )
    scaled = key_value * new_other_value / other_value
    return max(1, round(scaled)) if isinstance(key_value, int) else scaled


def _label(changes: Mapping[str, Any]) -> str:
    """Return a label such as lora-r8; a hash if the label would be too long or an invalid name."""
    label = "-".join(f"{'-'.join(key.split('.')[-2:])}{value}" for key, value in changes.items())
    return label if len(label) <= MAX_LABEL_LENGTH and has_format("name", label) else hash_changes(changes)
