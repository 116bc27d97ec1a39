"""Validation against config/schemas, with messages that name the source, the key and the remedy."""

import difflib
from functools import cache
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from errors import InputError

SCHEMAS = Path(__file__).resolve().parents[2] / "config" / "schemas"


def check_layer(source: str, values: dict, schema: str) -> None:
    """One layer of several: whatever it states must be known and of the right type; nothing is required."""
    _raise_first(source, [e for e in _validator(schema).iter_errors(values) if e.validator != "required"])


def check_merged(source: str, values: dict, schema: str) -> None:
    """Everything must be there, known and of the right type."""
    _raise_first(source, list(_validator(schema).iter_errors(values)))


@cache
def _validator(name: str) -> Draft202012Validator:
    schema = yaml.safe_load((SCHEMAS / f"{name}.schema.yaml").read_text(encoding="utf-8"))
    return Draft202012Validator(schema)


def _raise_first(source: str, errors: list[ValidationError]) -> None:
    if errors:
        error = min(errors, key=lambda e: [str(part) for part in e.absolute_path])
        raise InputError(f"{source}: {_sentence(error)}")


def _sentence(error: ValidationError) -> str:
    path = ".".join(map(str, error.absolute_path))
    if error.validator == "additionalProperties":
        known = sorted(error.schema["properties"])
        unknown = next(key for key in error.instance if key not in known)
        near = difflib.get_close_matches(str(unknown), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        return f"unknown key {'.'.join(filter(None, [path, str(unknown)]))!r}; {hint}"
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in error.instance)
        return f"key {'.'.join(filter(None, [path, missing]))!r} is missing; see the comments in config/"
    if error.validator == "type":
        kinds = error.validator_value
        wanted = " or ".join(kinds) if isinstance(kinds, list) else kinds
        hint = ""
        if isinstance(error.instance, str) and wanted in ("number", "integer") and "e" in error.instance.lower():
            hint = "; YAML reads 1e-4 as text, write 1.0e-4"
        return f"{path!r} must be of type {wanted}, found {error.instance!r}{hint}"
    if error.validator == "enum":
        return f"{path!r} must be one of {', '.join(map(str, error.validator_value))}, found {error.instance!r}"
    return f"{path!r}: {error.message}"
