"""Building blocks of typed settings: sections, their fields and common types, and JSON schemas without references.

The schemas also tell the reader of YAML the type of each scalar, and messages and documentation describe them.
"""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

SEARCH, RETRAINS = "search", "retrains"  # keys of a field's extras
Number = int | float  # strict: no booleans, and 1 stays 1
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Template = str | dict  # name or content of a chat template (settings/models.py)
Processes = Annotated[int, Field(ge=1, le=4096)]


class Section(BaseModel):
    """Keys that stand together in the configuration.

    An unknown key is an error, and no value is converted to another type: YAML has types.
    """

    # defer_build: Snakemake imports all classes at every start, and most of them stay unused
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    @classmethod
    def from_sections(cls, *sections: "Section", **values: Any) -> Self:
        """Build an instance without validation, from matching fields of validated sections and from `values`."""
        if unknown := values.keys() - cls.model_fields.keys():
            raise TypeError(f"{cls.__name__} has no {min(unknown)}")
        section_values = {key: value for section in sections for key, value in section if key in cls.model_fields}
        return cls.model_construct(**section_values | values)

    def select_weight_settings(self) -> dict[str, Any]:
        """Return the values that affect the trained weights."""
        fields = type(self).model_fields
        return {key: value for key, value in self if read_extra(fields[key], RETRAINS, True)}


class StageSettings(Section):
    """Content of a stage's config.yaml, from sections of the configuration and the run.

    The fields have the order of the file. Keys that do not affect the stage's output are omitted, so that
    changing them does not run the stage again.
    """

    def file_content(self) -> dict[str, Any]:
        """Return the content of the file. Lists are not copied, so that YAML can write repeated ones as an alias."""
        return {key: _to_plain(getattr(self, key)) for key in type(self).model_fields if key in self.model_fields_set}


def _to_plain(value: Any) -> Any:
    if isinstance(value, StageSettings):
        return value.file_content()
    if isinstance(value, dict) and any(isinstance(item, Section) for item in value.values()):
        return {key: _to_plain(item) for key, item in value.items()}
    return value.model_dump() if isinstance(value, Section) else value


@dataclass(frozen=True)
class SearchInterval:
    """The interval in which a search tries a setting."""

    low: float
    high: float
    log: bool = False  # whether values are spread evenly by their logarithm


class UniqueItems:
    """Mark of a list whose items must differ."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(_refuse_repeated, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict:
        return handler(schema) | {"uniqueItems": True}


def refuse_contradiction(problem: str, *path: str) -> NoReturn:
    """Raise a validator's error about the key at `path`, relative to the validated section."""
    raise PydanticCustomError("contradiction", "{problem}", {"problem": problem, "path": path})


def setting(
    default: Any = ...,
    description: str = "",
    *,
    retrains: bool = True,
    search: SearchInterval | None = None,
    **limits: Any,
) -> Any:
    """Return a field of a section.

    Args:
        default: the value in config/config.yaml; without one, the key must be stated.
        description: the comment in config/config.yaml and the text in JSON schemas.
        retrains: whether a training with another value gives other weights. Otherwise a checkpoint may be resumed
            after a change.
        search: the interval in which a search tries it.
        limits: constraints of pydantic, such as `ge` and `le`.
    """
    extras = {RETRAINS: retrains, SEARCH: search}
    return Field(default, description=description, json_schema_extra=extras, **limits)


def section(section_type: type[Section], description: str = "") -> Any:
    """Return a field with keys of its own; see `setting`."""
    return Field(default_factory=section_type, description=description)


def read_extra(field: Any, key: str, default: Any = None) -> Any:
    """Return `retrains` or `search` of a field; `default` if `setting` did not make the field."""
    return (field.json_schema_extra or {}).get(key, default)


def _refuse_repeated(items: list) -> list:
    if any(item in items[:index] for index, item in enumerate(items)):
        raise PydanticCustomError("repeated", "an item is repeated")
    return items


class ThreadSettings(StageSettings):
    """Settings of a stage that computes in threads."""

    cpu_threads: Processes | None = setting(..., "null: one for each core of this process", retrains=False)


class SeedSettings(StageSettings):
    """Settings of a stage with random choices."""

    seed: Seed = setting()
    cpu_threads: Processes | None = setting(..., "null: one for each core of this process", retrains=False)


class ImageRootSettings(StageSettings):
    """Settings of a stage that reads images."""

    image_root: str = setting(..., "the folder that image paths are relative to")


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
