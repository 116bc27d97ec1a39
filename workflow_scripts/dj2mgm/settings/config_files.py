"""Configuration as plain JSON values: YAML and JSON files, and the command line's values.

A scalar without quotes is a string if the key's type is a string. Otherwise the core schema of YAML 1.2 applies: `1e-4`
is a number. Scalars that YAML 1.1 reads differently (`010`, `1_000`, `no`) are refused, and so are values that JSON
cannot represent (NaN, infinity). Keys are always strings.
"""

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import yaml

from dj2mgm.errors import InputError, quote_value
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.settings.base import describe_accepted_values
from dj2mgm.storage.files import MAX_NESTING

CONFIG = Path("config")  # in the current folder; missing files come from SHIPPED
SHIPPED = SCRIPTS.parent / "config"
NULL = re.compile("null|Null|NULL|~")
TRUE, FALSE = re.compile("true|True|TRUE"), re.compile("false|False|FALSE")
INTEGER = re.compile("[-+]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)", re.I)
# numbers and booleans of YAML 1.1 that have another meaning in 1.2
AMBIGUOUS = re.compile(r"[-+]?(0x[0-9a-f_]+|0o[0-7_]+|0b[01_]+|[0-9][0-9_:]*(\.[0-9_]*)?)|yes|no|on|off", re.I)
# control characters except tab and line break; separators that YAML's writers lose; halves of surrogate pairs
FORBIDDEN = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ufeff\\ud800-\\udfff]")
MAX_INTEGER = 2**63 - 1
MAX_INTEGER_LENGTH = len(str(MAX_INTEGER)) + 1  # digits and sign of an integer
TWICE = "is stated twice"
MAX_VALUES = 100_000  # values of one file or command line; each alias counts again


class UnquotedScalar(str):
    """A scalar without quotes."""


class _Loader(yaml.BaseLoader):
    """Loader that composes nodes and leaves scalars as they are written."""

    depth = node_count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        self.node_count += 1
        if self.node_count > 2 * MAX_VALUES:  # keys and values
            raise _make_error(event, f"more than {MAX_VALUES} values; use fewer")
        if getattr(event, "tag", None) is not None:
            raise _make_error(event, f"the tag {event.tag} has no meaning here")
        if self.depth > MAX_NESTING:
            raise _make_error(event, f"nested more than {MAX_NESTING} levels deep; write it flat")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def locate_config_file(*parts: str) -> Path:
    """Return the path of a file in the current folder's config/, or in the workflow's own if only that exists."""
    here, shipped = CONFIG.joinpath(*parts), SHIPPED.joinpath(*parts)
    return shipped if shipped.exists() and not here.exists() else here


def list_config_names(folder: str, suffix: str = ".yaml") -> list[str]:
    """Return the names of the files in a folder of config/, without hidden files of editors."""
    paths = chain.from_iterable((root / folder).glob(f"*{suffix}") for root in (CONFIG, SHIPPED))
    return sorted({path.stem for path in paths if not path.name.startswith(".")})


def suggest_name(name: str, valid_names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest valid name, and all valid names."""
    names = sorted(valid_names)
    near = difflib.get_close_matches(name, names, n=1)
    sentence = f"known are {', '.join(names)}"
    return f"did you mean {near[0]!r}? K{sentence[1:]}" if near else sentence


def locate_existing_file(folder: str, name: str, key: str) -> Path:
    """Return config/<folder>/<name>.yaml.

    Args:
        folder: folder in config/.
        name: name of the file without its suffix.
        key: setting that states the name, for the message.

    Raises:
        InputError: there is no such file; the message lists the existing ones.
    """
    path = locate_config_file(folder, f"{name}.yaml")
    if name not in (existing_names := list_config_names(folder)):
        raise InputError(f"{key}: there is no {path}; {suggest_name(name, existing_names)}")
    return path


def check_stated_once(arguments: Iterable[str]) -> None:
    """Check that `--config` states no key twice, because Snakemake silently takes the last value.

    Args:
        arguments: strings of the form `key=value`.

    Raises:
        InputError: a key is stated twice, in braces or by two arguments.
    """
    is_mapping_by_key: dict[str, bool] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        try:
            is_mapping = isinstance(_parse_yaml(value), dict) and value.lstrip().startswith("{")
        except yaml.YAMLError as error:  # Snakemake takes it as a string
            if (problem := getattr(error, "problem", None)) and TWICE in problem:
                raise InputError(f"the command line's --config {key}: {problem}") from None
            is_mapping = False
        if key in is_mapping_by_key and not (is_mapping and is_mapping_by_key[key]):
            raise InputError(f"the command line's --config: the key {quote_value(key)} {TWICE}; keep one")
        is_mapping_by_key[key] = is_mapping


def read_config(path: Path, schema: dict | None = None) -> dict:
    """Read the keys and values of a YAML file.

    Args:
        path: the file.
        schema: a JSON schema that says which values are strings. The values are not validated.

    Raises:
        InputError: the file cannot be read, is not YAML, states a key twice, or has values that JSON cannot represent.
    """
    return _convert_text(read_config_text(path), str(path), _parse_yaml, schema or {})


def read_arguments(arguments: Iterable[str], schema: dict, source: str) -> dict:
    """Read arguments of the form `key=value`, whose values are YAML; raises as `read_config` does."""
    lines = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise InputError(f"{source}: {quote_value(argument)}: expected <key>=<value>")
        lines.append(f"{key}: {value}")
    return _convert_text("\n".join(lines), source, _parse_yaml, schema)


def read_json_config(path: Path) -> dict:
    """Read the keys and values of a JSON file; raises as `read_config` does."""
    parse = partial(json.loads, object_pairs_hook=_refuse_duplicates)
    return _convert_text(read_config_text(path), str(path), parse, {})


def convert_values(value: Any, schema: dict, unquoted: type = str) -> Any:
    """Return `value` with typed scalars, as JSON can represent it.

    Args:
        value: a tree of mappings, lists and scalars.
        schema: a JSON schema that says which values are strings.
        unquoted: the type of strings that may stand for another type. Snakemake leaves values in braces on its command
            line as `str`, quoted or not.

    Raises:
        InputError: names the key and its value.
    """
    return _ScalarConverter(unquoted).convert(value, schema, ())


class _ScalarConverter:
    """One walk over a tree, which counts its values."""

    def __init__(self, unquoted: type):
        self.unquoted, self.value_count = unquoted, 0

    def convert(self, value: Any, schema: dict, path: tuple[str, ...]) -> Any:
        """Return a value with scalars of its schema's types; raise InputError for too many values or too deep ones."""
        self.value_count += 1
        if self.value_count > MAX_VALUES or len(path) > MAX_NESTING:
            raise InputError(
                f"{_format_path(path[:3])}more than {MAX_VALUES} values, or nested more than {MAX_NESTING} levels deep"
            )
        if isinstance(value, dict):
            properties, other_schema = schema.get("properties", {}), schema.get("additionalProperties")
            other_schema = other_schema if isinstance(other_schema, dict) else {}
            return {
                self.check_key(key, path): self.convert(item, properties.get(key, other_schema), (*path, str(key)))
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [
                self.convert(item, schema.get("items", {}), (*path, str(index))) for index, item in enumerate(value)
            ]
        return _convert_scalar(value, schema, path, self.unquoted)

    def check_key(self, key: Any, path: tuple[str, ...]) -> str:
        if not isinstance(key, str):
            raise InputError(f"{_format_path(path)}the key {key!r} must be a string; put it in quotes")
        return str(_check_text(key, path))


def _convert_scalar(value: Any, schema: dict, path: tuple[str, ...], unquoted: type) -> Any:
    """Return a scalar of a type that its schema accepts; quoted scalars stay strings, and `~` in paths is expanded."""
    types = schema.get("type", ())
    accepts_string = "string" in ([types] if isinstance(types, str) else types)
    if isinstance(value, str):
        is_unquoted = isinstance(value, unquoted)
        parsed_value = _parse_scalar(value, accepts_string, schema, path) if is_unquoted else _check_text(value, path)
        is_path = isinstance(parsed_value, str) and schema.get("format") == "path"
        # Expand `~` here, because all configured paths pass through this function.
        return os.path.expanduser(parsed_value) if is_path else parsed_value
    if isinstance(value, int | float) and accepts_string:  # `--config dataset=123`
        return str(value).lower()
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        if not math.isfinite(value):
            _refuse_infinite(str(value).replace("inf", ".inf").replace("nan", ".nan"), schema, path)
        return _check_number(value, path)
    raise InputError(f"{_format_path(path)}found a {type(value).__name__}; put it in quotes if it is a string")


def _parse_scalar(plain: str, accepts_string: bool, schema: dict, path: tuple[str, ...]) -> Any:
    """Return the value that a scalar without quotes stands for."""
    if NULL.fullmatch(plain):
        return None
    if accepts_string:
        return _check_text(plain, path)
    if plain == "":
        return None
    if TRUE.fullmatch(plain) or FALSE.fullmatch(plain):
        return bool(TRUE.fullmatch(plain))
    if INTEGER.fullmatch(plain):
        return _check_number(int(plain) if len(plain) <= MAX_INTEGER_LENGTH else math.inf, path)
    if FLOAT.fullmatch(plain):
        return _check_number(float(plain), path)
    if NOT_FINITE.fullmatch(plain):
        _refuse_infinite(plain, schema, path)
    if AMBIGUOUS.fullmatch(plain):
        remedy = "write a decimal number, true or false, or put a string in quotes"
        raise InputError(f"{_format_path(path)}YAML's versions disagree about {plain}; {remedy}")
    return _check_text(plain, path)


def _refuse_infinite(text: str, schema: dict, path: tuple[str, ...]) -> NoReturn:
    """Raise InputError for .inf or .nan; the message describes the accepted values if the schema states them."""
    problem = "must be a finite number"
    if "type" in schema or "anyOf" in schema:
        problem = f"expected {describe_accepted_values(schema)}"
    raise InputError(f"{_format_path(path)}{problem}, found {text}")


def _check_number(number: float, path: tuple[str, ...]) -> float:
    if not math.isfinite(number) or (isinstance(number, int) and abs(number) > MAX_INTEGER):
        raise InputError(f"{_format_path(path)}must be a finite number, and an integer not larger than {MAX_INTEGER}")
    return number


def _check_text(text: str, path: tuple[str, ...]) -> str:
    if FORBIDDEN.search(text):
        raise InputError(f"{_format_path(path)}{quote_value(text)} contains a character that is not allowed; remove it")
    return str(text)


def _format_path(path: tuple[str, ...]) -> str:
    return f"{quote_value('.'.join(path))}: " if path else ""


def _convert_text(text: str, source: str, parse: Callable[[str], Any], schema: dict) -> dict:
    """Return the values of a text; every error becomes an InputError with its source and, if known, the line."""
    try:
        values = convert_values(parse(text), schema, UnquotedScalar)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        tabs = "; replace tabs by spaces" if "'\\t'" in (error.problem or "") else ""
        raise InputError(f"{source}{line}: not valid YAML: {error.problem or error.context}{tabs}") from None
    except yaml.reader.ReaderError as error:
        line = f"line {text.count(chr(10), 0, error.position) + 1}"
        raise InputError(f"{source}, {line}: the character {chr(error.character)!r} is not allowed") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{source}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, OverflowError):
        # raised by Python for an escape such as "\\UFFFFFFFF" or of thousands of digits
        raise InputError(f"{source}: it holds a number or an escape that is too large; correct it") from None
    except RecursionError:
        raise InputError(f"{source}: nested more than {MAX_NESTING} levels deep; write it flat") from None
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{source}: expected keys and values, found a {type(values).__name__}")
    return values


def read_config_text(path: Path) -> str:
    """Return the text of a UTF-8 file; raises InputError if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


@lru_cache(maxsize=64)  # experiments and variants read the same few files; the result is never changed
def _parse_yaml(text: str) -> Any:
    node = _Loader(text).get_single_node()
    tree = {} if node is None else _TreeBuilder().build(node)
    return {} if tree is None else tree


class _TreeBuilder:
    """Lists, mappings and strings, made from the nodes of one YAML document."""

    def __init__(self) -> None:
        self.values_by_node: dict[int, Any] = {}  # by a node's identity; aliases of a node share one object
        self.merged_keys = 0  # keys that `<<` has copied

    def build(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return _read_leaf(node)
        if id(node) not in self.values_by_node:
            self.values_by_node[id(node)] = None  # until the node is complete
            is_mapping = isinstance(node, yaml.MappingNode)
            self.values_by_node[id(node)] = (
                self._build_mapping(node) if is_mapping else [self.build(item) for item in node.value]
            )
        elif self.values_by_node[id(node)] is None:
            raise _make_error(node, "an anchor holds an alias of itself")
        return self.values_by_node[id(node)]

    def _build_mapping(self, node: yaml.MappingNode) -> dict:
        """Return the keys and values of a mapping; its own keys override keys merged by `<<`."""
        own_values: dict[str, Any] = {}
        mappings: list[Any] = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _make_error(key_node, "a key must be a string")
            if key_node.value == "<<" and key_node.style is None:  # YAML allows several `<<` in a mapping
                value = self.build(value_node)
                mappings += value if isinstance(value, list) else [value]
            elif key_node.value in own_values:
                raise _make_error(key_node, f"the key {quote_value(key_node.value)} {TWICE}; keep one")
            else:
                own_values[key_node.value] = self.build(value_node)
        merged: dict[str, Any] = {}
        for mapping in mappings:
            if not isinstance(mapping, dict):
                raise _make_error(node, "<< must bring a mapping, or a list of them")
            self.merged_keys += len(mapping) + len(merged)
            if self.merged_keys > MAX_VALUES:
                raise _make_error(node, f"<< brings more than {MAX_VALUES} keys; use fewer")
            merged = mapping | merged
        return merged | own_values


def _read_leaf(node: yaml.ScalarNode) -> str | None:
    if node.style is not None:
        return str(node.value)
    return UnquotedScalar(node.value) if node.value else None


def _make_error(node: yaml.Node | yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise InputError(f"the key {quote_value(key)} {TWICE}; keep one")
        values[key] = value
    return values
