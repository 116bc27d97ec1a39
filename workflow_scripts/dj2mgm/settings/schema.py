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
    return _resolve_references(schema, schema.get("$defs", {}))


def find_maximum(model: type[BaseModel], key: str) -> int:
    """Return the greatest allowed number of a setting."""
    field = build_schema(model)["properties"][key]
    return max(choice["maximum"] for choice in (field, *field.get("anyOf", ())) if "maximum" in choice)


def _resolve_references(schema: Any, definitions: dict) -> Any:
    """Return a schema without references, with renamed limits; `kind` names the key that selects a union's class."""
    if isinstance(schema, list):
        return [_resolve_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        return _resolve_references(target | {key: value for key, value in schema.items() if key != "$ref"}, definitions)
    properties = {key: _resolve_references(value, definitions) for key, value in schema.get("properties", {}).items()}
    resolved = {
        LIMITS.get(key, key): _resolve_references(value, definitions)
        for key, value in schema.items()
        if key not in (*LEFT_OUT, "$defs", "properties")
    }
    if properties:
        resolved["properties"] = properties
    if "const" in resolved:
        resolved["enum"] = [resolved.pop("const")]
    if "discriminator" in schema:  # a union of classes: one key names the class
        return resolved | {"type": "object", "kind": schema["discriminator"]["propertyName"]}
    choices = resolved.get("anyOf") or resolved.get("oneOf")
    return _join_choices(resolved, choices) if choices else resolved


def _join_choices(schema: dict, choices: list[dict]) -> dict:
    """Return a schema with one type for "a type or null", and for "integer or number"."""
    other_keys = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
    others = [choice for choice in choices if choice != {"type": "null"}]
    if others[:2] == [{"type": "integer"}, {"type": "number"}]:
        others = [{"type": "number"}]
    if len(others) > 1:
        return schema
    [choice] = others
    nullable = len(choices) > 1 and {"type": "null"} in choices
    kind = {"type": [choice["type"], "null"]} if nullable else {}
    return choice | kind | other_keys
