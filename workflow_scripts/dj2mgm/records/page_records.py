"""Settings of pages that compare experiments (their config.yaml), and how settings of experiments differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from dj2mgm.errors import InputError
from dj2mgm.settings.base import RETRAINS, Section, read_extra, setting
from dj2mgm.settings.configuration import TARGETS_BY_KEY, Configuration
from dj2mgm.settings.targets import Control
from dj2mgm.storage.files import read_json, read_yaml, write_json
from dj2mgm.storage.image_files import IMAGE_FOLDERS_FILE

VERDICT_FILE = "verdict.json"  # next to a page: verdicts, and signs that a model has learned nothing
VERDICT_VERSION = 1  # of the file's format
DECISION_FILE = "decision.json"  # next to the looks of `decide`: verdict and statement of the last one
ABSENT = object()


def write_verdicts(path: Path, records: dict[str, dict]) -> None:
    """Write the assessment of a page's experiments, by experiment."""
    write_json(path, {"version": VERDICT_VERSION, "experiments": records})


def read_verdicts(path: str | Path) -> dict[str, dict]:
    """Return what `write_verdicts` wrote; raise InputError if it was another version of this project."""
    content = read_json(path)
    if content.get("version") != VERDICT_VERSION:
        raise InputError(f"{path} is from another version of dj2mgm; delete it, and run the same command again")
    return content["experiments"]


class RecipeContents(Section):
    """Checked recipes by stage; null: the experiment names none."""

    filter: dict = setting()
    synthesize: dict | None = setting()


class ShownModel(Section):
    """A model on a page; its other keys depend on its kind."""

    model_config = ConfigDict(extra="allow")

    name: str = setting()


class ShownConfiguration(Configuration):
    """The merged configuration of an experiment."""

    model: ShownModel = setting()

    @model_validator(mode="before")
    @classmethod
    def _select_known_keys(cls, values: Any) -> Any:
        """Return the values without keys of other targets, and without removed keys of earlier versions."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key in cls.model_fields and key not in TARGETS_BY_KEY}


class ShownRun(Section):
    """Seed and stage folders of a run."""

    seed: int = setting()
    stages: dict[str, str] = setting(..., "folder of each stage")


class ShownControl(Section):
    """Relation of a control to its experiment."""

    kind: Control = setting()
    experiment: str = setting()
    compared: Annotated[list[str], Field(min_length=2, max_length=2)] | None = setting(
        ..., "experiment and reference that the control's verdict compares; null: the control has no verdict"
    )


class ShownExperiment(Section):
    """Settings, recipes and runs of an experiment, as its page needs them."""

    name: str = setting()
    description: str = setting()
    dataset: str = setting(..., "folder of the dataset")
    leaks: str | None = setting(..., "folder of the search for leaks; null: no search was made")
    licenses: dict[str, str | None] = setting(..., "license of each source or split; null: not stated")
    config: ShownConfiguration = setting()
    recipes: RecipeContents = setting()
    runs: Annotated[list[ShownRun], Field(min_length=1)] = setting()
    control: ShownControl | None = setting(None, "null: it is not a control")
    changes: dict[str, Any] = setting({}, "on a study's page: this variant's values of what the variants change")


class PageSettings(Section):
    """The experiments of a page; the first is the reference for all others."""

    model_config = ConfigDict(extra="ignore")  # features have pages with more keys

    experiments: Annotated[list[ShownExperiment], Field(min_length=1)] = setting()


def describe_clip_doubt(clip: str | None, image_root: str | Path) -> str:
    """Return a sentence if the embedded default's CLIP rated other images than its scenes; else ""."""
    root = Path(image_root)
    has_scenes = root.parts[:2] == ("results", "datasets") and root.name != IMAGE_FOLDERS_FILE
    if has_scenes or not (clip or "").startswith("results/foundation/"):
        return ""
    return (
        "CLIP similarities are those of the embedded default's tiny CLIP, which knows only rendered scenes; on photos "
        "they mean nothing. Another `model` has another CLIP."
    )


def read_image_root(stage: Path) -> Path:
    """Return the folder of a stage's images, as the config.yaml in the stage's folder states it."""
    return Path(read_yaml(stage / "config.yaml")["image_root"])


@dataclass(frozen=True)
class SettingDifference:
    """A setting with different values in two experiments. `ABSENT` is the value if an experiment lacks the setting."""

    name: str  # dotted
    values: tuple[Any, Any]  # values of the reference and of the other experiment
    default: Any = ABSENT
    retrains: bool = True  # whether the setting affects the trained weights


def find_differences(reference: Section, other: Section) -> Iterator[SettingDifference]:
    """Yield the settings that differ, in the order of the configuration."""
    settings = [dict(_flatten(section)) for section in (reference, other)]
    for name in dict.fromkeys(name for values in settings for name in values):
        pairs = [section_settings.get(name, (ABSENT, None)) for section_settings in settings]
        values, field = tuple(value for value, _ in pairs), next(filter(None, (field for _, field in pairs)), None)
        if values[0] is ABSENT or values[1] is ABSENT or values[0] != values[1]:
            has_default = field is not None and not field.is_required() and field.default_factory is None
            default = field.default if has_default else ABSENT
            yield SettingDifference(name, values, default, field is None or read_extra(field, RETRAINS, True))


def list_settings(settings: Section) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting."""
    yield from ((name, value) for name, (value, _) in _flatten(settings))


def _flatten(values: Section | dict, prefix: str = "") -> Iterator[tuple[str, tuple[Any, FieldInfo | None]]]:
    """Yield the dotted name of each setting, its value, and its field if it has one. Lists are not divided."""
    fields = type(values).model_fields if isinstance(values, Section) else {}
    for key, value in values if isinstance(values, Section) else values.items():
        if isinstance(value, Section | dict) and (isinstance(value, Section) or value):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", (value, fields.get(key))
