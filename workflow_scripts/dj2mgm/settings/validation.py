"""Validation of configurations, with messages that name the source, the key and the remedy."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from dj2mgm.errors import InputError
from dj2mgm.settings.base import Section
from dj2mgm.settings.config_files import quote_value
from dj2mgm.settings.schema import build_schema
from dj2mgm.settings.string_formats import FORMATS
from dj2mgm.storage.files import read_yaml

S = TypeVar("S", bound=Section)
MISSING = "the key is missing"
WORDS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "object": "keys and values",
    "string": "a string",
}
STRINGS = {"address": "an address", "name": "a name", "path": "a path", "repository": "<owner>/<name>"}  # by format

RENAMED_KEYS = {"anyway": "allow_unlearned", "clip_score": "clip"}  # in publish, and in a model's file


@dataclass(frozen=True)
class Layer:
    """Values of one source of the configuration; a message calls it `source`."""

    source: str
    values: dict


def validated(model: type[S], values: Mapping, source: str, layers: Sequence[Layer] = ()) -> S:
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
        path, sentence = min(_problems(model, values, error), key=_sort_key)
    stating = [layer.source for layer in layers if _states(layer.values, path)]
    raise InputError(f"{stating[-1] if stating else source}: {sentence}")


def load_settings(model: type[S], path: str | Path) -> S:
    """Return the settings in the config.yaml of a stage; raises as `validated` does."""
    return validated(model, read_yaml(path), str(path))


def key_name(path: Sequence[str | int]) -> str:
    """Return the dotted name of a key, escaped if it would not be legible."""
    name = ".".join(map(str, path))
    return name if name.isprintable() and len(name) <= 100 else quote_value(name)


def _sort_key(problem: tuple[tuple, str]) -> tuple:
    """Return a sort key: missing keys come last, because a misspelt key also causes a less helpful “missing”."""
    path, sentence = problem
    return MISSING in sentence, [str(part) for part in path]


def _states(values: object, path: Sequence[str | int]) -> bool:
    """Return whether the file sets the key at `path`, or a list of which it is an item."""
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return isinstance(part, int)
        values = values[part]
    return True


def _problems(model: type[Section], values: Mapping, error: ValidationError) -> Iterator[tuple[tuple, str]]:
    """Yield the path of each wrong key, and the sentence about it."""
    for problem in error.errors(include_url=False):
        loc, is_key = problem["loc"], problem["loc"][-1:] == ("[key]",)
        error_type, (path, node) = problem["type"], _locate(build_schema(model), loc[:-1] if is_key else loc)
        if is_key:
            yield path, _sentence(error_type, path, {"type": "string", "format": problem["ctx"]["kind"]}, path[-1])
            continue
        if error_type.startswith("union_tag"):  # the key that decides the kind of the object
            path, node = (*path, node["kind"]), {"enum": [word for one in node["oneOf"] for word in _words(one, node)]}
            error_type = "missing" if error_type == "union_tag_not_found" else error_type
        found = values
        for part in path[:-1] if error_type in ("missing", "extra_forbidden") else path:
            found = found[part]
        yield path, _sentence(error_type, path, node, found)


def _words(schema: dict, union: dict) -> list[str]:
    """Return the discriminator values of one member of a union."""
    return schema["properties"][union["kind"]]["enum"]


def _locate(schema: dict, places: Sequence[str | int]) -> tuple[tuple, dict]:
    """Return the path of an error, without pydantic's tags of unions, and the schema at this place."""
    path: list[str | int] = []
    for part in places:
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        if "kind" in schema:
            schema = next(one for one in schema["oneOf"] if part in _words(one, schema))
            continue
        if part in known:
            schema = known[part]
        elif isinstance(part, int) and "items" in schema:
            schema = schema["items"]
        elif isinstance(others, dict):
            schema = others
        elif others is False:  # the key is unknown
            return (*path, part), schema
        else:
            break
        path.append(part)
    return tuple(path), schema


def _sentence(problem: str, path: tuple, node: dict, found: object) -> str:
    name = key_name(path)
    if problem == "extra_forbidden":
        return _unknown_key(path, found, sorted(node["properties"]))
    if problem == "missing":
        return f"{name}: {MISSING}; see the comments in config/"
    if problem == "repeated":
        return f"{name}: an item is repeated; keep one, found {quote_value(found)}"
    kind = FORMATS.get(node.get("format"))
    secret = kind is not None and kind.secret
    if problem == "format":
        return f"{name}: must {kind.rule}" + ("" if secret else f"; found {quote_value(found)}")
    sentence = f"{name}: expected {expected(node)}" + ("" if secret else f", found {quote_value(found)}")
    example = next(iter(node.get("properties", {})), None)
    return f"{sentence}; put them in braces, as in {{{example}: …}}" if example else sentence


def expected(node: dict) -> str:
    """Describe the values that a JSON schema accepts."""
    if choices := node.get("anyOf"):
        return " or ".join(map(expected, choices))
    if words := node.get("enum"):
        *others, last = map(str, words)
        return f"{', '.join(others)} or {last}" if others else last
    kind, *others = node["type"] if isinstance(node["type"], list) else [node["type"]]
    word = STRINGS.get(node.get("format"), WORDS[kind])
    return " or ".join([word + _limits(node), *(WORDS[other] for other in others)])


def _limits(node: dict) -> str:
    if "minLength" in node:
        return " that is not empty"
    if "minItems" in node or "minProperties" in node:
        most = f" and at most {node['maxItems']}" if "maxItems" in node else ""
        return f" with at least one entry{most}"
    lower = f"from {node['minimum']:.15g}" if "minimum" in node else ""
    lower = f"above {node['exclusiveMinimum']:.15g}" if "exclusiveMinimum" in node else lower
    upper = f"to {node['maximum']:.15g}" if "maximum" in node else ""
    upper = f"below {node['exclusiveMaximum']:.15g}" if "exclusiveMaximum" in node else upper
    if lower.startswith("above") and upper:
        return f" {lower} and {upper.replace('to ', 'up to ')}"
    return "".join(f" {limit}" for limit in (lower, upper) if limit)


def _unknown_key(path: tuple, values: Mapping, known: list[str]) -> str:
    unknown = path[-1]
    first, *inner = str(unknown).split(".")
    if inner and first in known:
        value = "".join(f"{{{part}: " for part in inner) + quote_value(values[unknown]).strip("'") + "}" * len(inner)
        return f"{key_name(path)}: unknown key; write nested keys in braces: {first}: {value}"
    first, colon, rest = str(unknown).partition(":")
    if colon and first in known:  # YAML reads {margin:1} as a key without a value
        return f"{key_name(path)}: unknown key; put a blank after the colon: {quote_value(f'{first}: {rest}')}"
    renamed = RENAMED_KEYS.get(str(unknown))
    near = [renamed] if renamed in known else difflib.get_close_matches(str(unknown), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return f"{key_name(path)}: unknown key; {hint}"
