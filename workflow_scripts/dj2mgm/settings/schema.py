"""JSON schemas of typed settings without references. They also tell the reader of YAML the type of each scalar."""

from functools import cache
from typing import Any

from pydantic import BaseModel

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
LEFT_OUT = ("title", "default", "search", "retrains", "discriminator")


@cache
def build_schema(model: type[BaseModel]) -> dict:
    """Return the JSON schema of a class of settings.

    References are replaced by what they refer to. A value that may be null has the type `[…, "null"]`.
    """
    schema = model.model_json_schema()
    return _plain(schema, schema.get("$defs", {}))


def _plain(schema: Any, definitions: dict) -> Any:
    if isinstance(schema, list):
        return [_plain(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        return _plain(target | {key: value for key, value in schema.items() if key != "$ref"}, definitions)
    properties = {key: _plain(value, definitions) for key, value in schema.get("properties", {}).items()}
    plain = {
        LIMITS.get(key, key): _plain(value, definitions)
        for key, value in schema.items()
        if key not in (*LEFT_OUT, "$defs", "properties")
    }
    if properties:
        plain["properties"] = properties
    if "const" in plain:
        plain["enum"] = [plain.pop("const")]
    if "discriminator" in schema:  # a union of classes: one key names the class
        return plain | {"type": "object", "kind": schema["discriminator"]["propertyName"]}
    choices = plain.get("anyOf") or plain.get("oneOf")
    return _joined(plain, choices) if choices else plain


def _joined(schema: dict, choices: list[dict]) -> dict:
    """Return a schema with one type for "a type or null", and for "integer or number"."""
    around = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
    others = [choice for choice in choices if choice != {"type": "null"}]
    if others[:2] == [{"type": "integer"}, {"type": "number"}]:
        others = [{"type": "number"}]
    if len(others) > 1:
        return schema
    [one] = others
    nullable = len(choices) > 1 and {"type": "null"} in choices
    kind = {"type": [one["type"], "null"]} if nullable else {}
    return one | kind | around
