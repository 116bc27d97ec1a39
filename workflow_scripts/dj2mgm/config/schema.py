"""Validation against config/schemas, with messages that name the source, the key and the remedy."""

import difflib
import re
from functools import cache

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from dj2mgm.code import SCRIPTS
from dj2mgm.config.benchmarks import with_benchmarks
from dj2mgm.config.endpoints import ADDRESS, VARIABLE, is_address, is_variable
from dj2mgm.config.reading import read_config, shown
from dj2mgm.control_tokens import CONTROL
from dj2mgm.errors import InputError

SCHEMAS = SCRIPTS.parent / "config" / "schemas"
# what a text of a `format` must be, and how a message says so
FORMATS = {
    # folders, targets and words of a shell are named so; without umlauts, which file systems spell in two ways
    "name": (
        re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,98}[A-Za-z0-9_])?").fullmatch,
        "be a name of up to 100 ASCII letters, digits and _, with - and . inside it; rename it",
    ),
    # a dataset is called as its folder is, which its owner has named. On a cluster, Snakemake hands names to its jobs
    # between quotes, and several of them separated by commas
    "folder": (
        lambda text: text.isprintable() and re.fullmatch(r"(?!\s*$|\.\.?$)[^{}'\"\\,/]+", text),
        "have no braces, quotes, commas, backslashes, tabs, line breaks and other control characters in its name; "
        "rename it, or describe the data in a config/datasets/<name>.yaml",
    ),
    "path": (
        # a byte that is not UTF-8 is half a surrogate pair in Python, which no file of results can hold
        re.compile(r"[^{}\x00-\x1f\x7f\ud800-\udfff]+").fullmatch,
        "be a path without braces, tabs, line breaks and other control characters, in UTF-8; rename the file or folder",
    ),
    "repository": (
        re.compile(r"(?!.*(--|\.\.))[\w](?:[\w.-]{0,94}\w)?/[\w](?:[\w.-]{0,94}\w)?", re.ASCII).fullmatch,
        "be a repository of the hub, <owner>/<name>, of ASCII letters, digits, _, - and .",
    ),
    "question": (lambda text: not CONTROL.search(text), "hold no control token: the template has its own"),
    "question_prompt": (
        lambda text: re.fullmatch(r"[^{}]*\{question\}[^{}]*", text) and not CONTROL.search(text),
        "hold {question} once, and no other braces or control token",
    ),
    "address": (is_address, ADDRESS),
    "variable": (is_variable, VARIABLE),
}
NEVER_SHOWN = {"address", "variable"}  # formats of texts in whose place somebody may have written a secret
# to JSON Schema 1.0 is an integer; to Python's range() it is not
Validator = extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    ),
)


def is_of(kind: str, text: str) -> bool:
    """Whether a text has one of the `FORMATS`."""
    return bool(FORMATS[kind][0](text))


def check_format(what: str, kind: str, text: str) -> None:
    """
    Raises:
        InputError: begins with `what` the text is, and says what it must be.
    """
    if not is_of(kind, text):
        raise InputError(f"{what} must {FORMATS[kind][1]}")


def check_layer(source: str, values: dict, schema: str) -> None:
    """One layer of several: whatever it states must be known and of the right type; nothing is required."""
    _raise_first(source, [e for e in _validator(schema).iter_errors(values) if e.validator != "required"])


def check_merged(source: str, values: dict, schema: str) -> None:
    """Everything must be there, known and of the right type."""
    _raise_first(source, list(_validator(schema).iter_errors(values)))


@cache
def schema_of(name: str) -> dict:
    schema = read_config(SCHEMAS / f"{name}.schema.yaml")
    return with_benchmarks(schema) if name == "config" else schema


@cache
def _validator(name: str) -> Draft202012Validator:
    checker = FormatChecker(formats=())
    for kind in FORMATS:
        checker.checkers[kind] = lambda text, kind=kind: not isinstance(text, str) or is_of(kind, text), ()
    return Validator(schema_of(name), format_checker=checker)


def _raise_first(source: str, errors: list[ValidationError]) -> None:
    if errors:
        error = min(errors, key=lambda e: [str(part) for part in e.absolute_path])
        raise InputError(f"{source}: {_sentence(error)}")


def _sentence(error: ValidationError) -> str:
    path, value = ".".join(map(str, error.absolute_path)), shown(error.instance)
    match error.validator:
        case "additionalProperties":
            return _unknown_key(path, error.instance, sorted(error.schema["properties"]))
        case "required":
            missing = next(key for key in error.validator_value if key not in error.instance)
            return f"key {'.'.join(filter(None, [path, missing]))!r} is missing; see the comments in config/"
        case "type":
            kinds = error.validator_value
            return f"{path!r} must be of type {' or '.join(kinds) if isinstance(kinds, list) else kinds}, found {value}"
        case "enum":
            return f"{path!r} must be one of {', '.join(map(str, error.validator_value))}, found {value}"
        case "format":
            found = "" if error.validator_value in NEVER_SHOWN else f"; found {value}"
            return f"{path!r} must {FORMATS[error.validator_value][1]}{found}"
        case "oneOf":
            kinds = [_kind(choice) for choice in error.validator_value if "type" in choice]
            words = [word for choice in error.validator_value for word in choice.get("enum", ())]
            words = ["null" if word is None else word for word in words]
            return f"{path!r} must be {' or '.join([f'of type {kinds[0]}', *kinds[1:], *words])}, found {value}"
        case "minimum" | "maximum":
            least = "at least" if error.validator == "minimum" else "at most"
            return f"{path!r} must be {least} {error.validator_value:.15g}, found {value}"
        case "uniqueItems":
            return f"{path!r} states something twice; keep one, found {value}"
        case _:
            return f"{path!r}: {error.message[:200]}"


def _kind(choice: dict) -> str:
    bounds = [f" {word} {choice[key]}" for word, key in (("from", "minimum"), ("to", "maximum")) if key in choice]
    return choice["type"] + "".join(bounds)


def _unknown_key(path: str, values: dict, known: list[str]) -> str:
    unknown = next(key for key in values if key not in known)
    first, *inner = unknown.split(".")
    if inner and first in known:
        value = "".join(f"{{{part}: " for part in inner) + shown(values[unknown]).strip("'") + "}" * len(inner)
        where = shown(".".join(filter(None, [path, unknown])))
        return f"unknown key {where}; keys within a key stand in braces: {first}: {value}"
    near = difflib.get_close_matches(unknown, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return f"unknown key {shown('.'.join(filter(None, [path, unknown])))}; {hint}"
