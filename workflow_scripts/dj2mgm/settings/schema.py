"""JSON schemas of typed settings without references, and their description in messages and documentation.

The schemas also tell the reader of YAML the type of each scalar.
"""

from functools import cache
from typing import Any

from pydantic import BaseModel

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
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
LEFT_OUT = ("title", "default", "search", "retrains", "discriminator")


@cache
def build_schema(model: type[BaseModel]) -> dict:
    """Return the JSON schema of a class of settings.

    References are replaced by the schemas that they refer to. A value that may be null has the type `[…, "null"]`.
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


def describe_accepted_values(node: dict) -> str:
    """Describe the values that a JSON schema accepts."""
    if choices := node.get("anyOf"):
        return " or ".join(map(describe_accepted_values, choices))
    if words := node.get("enum"):
        *others, last = map(str, words)
        return f"{', '.join(others)} or {last}" if others else last
    kind, *others = node["type"] if isinstance(node["type"], list) else [node["type"]]
    word = STRINGS.get(node.get("format"), WORDS[kind])
    return " or ".join([word + _describe_limits(node), *(WORDS[other] for other in others)])


def _describe_limits(node: dict) -> str:
    """Return the limits of a value in words, with a space before them; empty without limits."""
    if "minLength" in node:
        return " that is not empty"
    if "minItems" in node or "minProperties" in node:
        minimum = node.get("minItems", node.get("minProperties"))
        if minimum == node.get("maxItems"):
            return f" with {minimum} entries"
        maximum = f" and at most {node['maxItems']}" if "maxItems" in node else ""
        return f" with at least {'one entry' if minimum == 1 else f'{minimum} entries'}{maximum}"
    lower = f"from {node['minimum']:.15g}" if "minimum" in node else ""
    lower = f"above {node['exclusiveMinimum']:.15g}" if "exclusiveMinimum" in node else lower
    upper = f"to {node['maximum']:.15g}" if "maximum" in node else ""
    upper = f"below {node['exclusiveMaximum']:.15g}" if "exclusiveMaximum" in node else upper
    if lower.startswith("above") and upper:
        return f" {lower} and {upper.replace('to ', 'up to ')}"
    return "".join(f" {limit}" for limit in (lower, upper) if limit)
