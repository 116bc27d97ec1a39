"""Validation of configurations, with messages that name the source, the key and the remedy."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from dj2mgm.errors import InputError, quote_value
from dj2mgm.settings.base import Section, build_schema, describe_accepted_values
from dj2mgm.settings.config_files import FLOAT, INTEGER
from dj2mgm.settings.string_formats import FORMATS
from dj2mgm.storage.files import read_yaml

S = TypeVar("S", bound=Section)
MISSING = "the key is missing"

RENAMED_KEYS = {"anyway": "allow_unlearned", "clip_score": "clip"}  # in publish, and in a model's file


@dataclass(frozen=True)
class Layer:
    """Values of one source of the configuration; a message calls it `source`."""

    source: str
    values: dict


def validate_settings(model: type[S], values: Mapping, source: str, layers: Sequence[Layer] = ()) -> S:
    """Return typed settings.

    Args:
        model: the section.
        values: keys and values, such as those of a file.
        source: origin of the values, for messages.
        layers: layers from which `values` were merged. A message names the last one that states the key.

    Raises:
        InputError: names the source, the key, and what is expected.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = list(_list_problems(model, values, error))
        path, sentence = min(_drop_enclosing(problems), key=_sort_key)
    sources = [layer.source for layer in layers if _has_key(layer.values, path)]
    raise InputError(f"{sources[-1] if sources else source}: {sentence}")


def refuse_keys(layer: Layer, keys: Iterable[str], remedy: str) -> None:
    """Raise InputError if the layer states one of the keys."""
    for key in keys:
        if key in layer.values:
            raise InputError(f"{layer.source}: {key!r} {remedy}")


def load_settings(model: type[S], path: str | Path) -> S:
    """Return the settings in the config.yaml of a stage; raises as `validate_settings` does."""
    return validate_settings(model, read_yaml(path), str(path))


def format_key(path: Sequence[str | int]) -> str:
    """Return the dotted name of a key, escaped if it would not be legible."""
    name = ".".join(map(str, path))
    return name if name.isprintable() and len(name) <= 100 else quote_value(name)


def _drop_enclosing(problems: list[tuple[tuple, str]]) -> list[tuple[tuple, str]]:
    """Drop problems of values that contain another wrong value; the other kinds of a union report them."""
    enclosing = {path[:length] for path, _ in problems for length in range(len(path))}
    return [problem for problem in problems if problem[0] not in enclosing]


def _sort_key(problem: tuple[tuple, str]) -> tuple:
    """Return a sort key: missing keys come last, because a misspelt key also causes a less helpful “missing”."""
    path, sentence = problem
    return MISSING in sentence, [str(part) for part in path]


def _has_key(values: object, path: Sequence[str | int]) -> bool:
    """Return whether the file sets the key at `path`, or a list that contains it."""
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return isinstance(part, int)
        values = values[part]
    return True


def _list_problems(model: type[Section], values: Mapping, error: ValidationError) -> Iterator[tuple[tuple, str]]:
    """Yield the path of each wrong key, and the sentence about it."""
    for problem in error.errors(include_url=False):
        loc, is_key = problem["loc"], problem["loc"][-1:] == ("[key]",)
        error_type, (path, node) = problem["type"], _locate(build_schema(model), loc[:-1] if is_key else loc)
        if is_key:
            key_schema = {"type": "string", "format": problem["ctx"]["kind"]}
            yield path, _describe_problem(error_type, path, key_schema, path[-1])
            continue
        if error_type == "contradiction":
            path = (*path, *problem["ctx"]["path"])
            yield path, f"{format_key(path)}: {problem['ctx']['problem']}"
            continue
        if error_type.startswith("union_tag"):  # the key that decides the kind of the object
            words = [word for member in node["oneOf"] for word in _read_words(member, node)]
            path, node = (*path, node["kind"]), {"enum": words}
            error_type = "missing" if error_type == "union_tag_not_found" else error_type
        value = values
        for index, part in enumerate(path[:-1] if error_type in ("missing", "extra_forbidden") else path):
            if isinstance(value, str):  # one name instead of a list
                path = path[:index]
                break
            value = value[part]
        yield path, _describe_problem(error_type, path, node, value)


def _read_words(schema: dict, union: dict) -> list[str]:
    """Return the discriminator values of one member of a union."""
    return schema["properties"][union["kind"]]["enum"]


def _locate(schema: dict, parts: Sequence[str | int]) -> tuple[tuple, dict]:
    """Return the path of an error, without pydantic's tags of unions, and the schema of its value."""
    path: list[str | int] = []
    for index, part in enumerate(parts):
        if "anyOf" in schema and parts[index + 1 :]:  # the part is pydantic's name of a kind of value
            schema = next((member for member in schema["anyOf"] if "properties" in member), schema)
            continue
        properties, other_schema = schema.get("properties", {}), schema.get("additionalProperties")
        if "kind" in schema:
            schema = next(member for member in schema["oneOf"] if part in _read_words(member, schema))
            continue
        if part in properties:
            schema = properties[part]
        elif isinstance(part, int) and "items" in schema:
            schema = schema["items"]
        elif isinstance(other_schema, dict):
            schema = other_schema
        elif other_schema is False:  # the key is unknown
            return (*path, part), schema
        else:
            break
        path.append(part)
    return tuple(path), schema


def _describe_problem(problem: str, path: tuple, node: dict, value: object) -> str:
    """Return a sentence about an invalid value; a secret value is not quoted."""
    name = format_key(path)
    if problem == "extra_forbidden":
        return _describe_unknown_key(path, value, sorted(node["properties"]))
    if problem == "missing":
        return f"{name}: {MISSING}; expected {describe_accepted_values(node)}"
    if problem == "repeated":
        return f"{name}: an item is repeated; keep one, found {quote_value(value)}"
    kind = FORMATS.get(node.get("format"))
    secret = kind is not None and kind.secret
    if problem == "format" and value == "":
        return f"{name}: the value is empty; give one, or leave the key out"
    if problem == "format":
        return f"{name}: must {kind.rule}" + ("" if secret else f"; found {quote_value(value)}")
    is_number = "enum" in node and isinstance(value, str) and (INTEGER.fullmatch(value) or FLOAT.fullmatch(value))
    text = value if is_number else quote_value(value)  # the YAML reader returns such numbers as strings
    sentence = f"{name}: expected {describe_accepted_values(node)}" + ("" if secret else f", found {text}")
    if node.get("type") == "array" and re.fullmatch(r"[\w.,+-]+", str(value)) and not secret:
        return f"{sentence}; put the items in brackets, as in [{value}]"
    example = next(iter(node.get("properties", {})), None)
    if example:
        return f"{sentence}; put them in braces, as in {{{example}: …}}"
    near = [] if secret else difflib.get_close_matches(str(value).lower(), _list_words(node), n=1)
    return f"{sentence}; did you mean {near[0]!r}?" if near else sentence


def _list_words(node: dict) -> list[str]:
    """Return the strings that a value may be, of all kinds of a union."""
    words = [word for kind in (node, *node.get("anyOf", ())) for word in kind.get("enum", ())]
    return [word for word in words if isinstance(word, str)]


def _describe_unknown_key(path: tuple, values: Mapping, known_keys: list[str]) -> str:
    unknown = path[-1]
    first, *inner = str(unknown).split(".")
    if inner and first in known_keys:
        value = "".join(f"{{{part}: " for part in inner) + quote_value(values[unknown]).strip("'") + "}" * len(inner)
        return f"{format_key(path)}: unknown key; write nested keys in braces: {first}: {value}"
    first, colon, rest = str(unknown).partition(":")
    if colon and first in known_keys:  # YAML reads {margin:1} as a key without a value
        return f"{format_key(path)}: unknown key; put a blank after the colon: {quote_value(f'{first}: {rest}')}"
    new_name = RENAMED_KEYS.get(str(unknown))
    near = [new_name] if new_name in known_keys else difflib.get_close_matches(str(unknown), known_keys, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known_keys)}"
    return f"{format_key(path)}: unknown key; {hint}"
