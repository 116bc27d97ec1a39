"""Building blocks of typed settings: sections, their fields and common types."""

from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

SEARCH, RETRAINS = "search", "retrains"  # keys of a field's extras
Number = int | float  # strict: no booleans, and 1 stays 1
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Template = str | dict  # name or content of a chat template (settings/chat_templates.py)
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
