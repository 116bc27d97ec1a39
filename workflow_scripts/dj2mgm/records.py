"""Contents of files that the workflow writes for later stages: summaries, metrics, and the settings of pages."""

from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from dj2mgm.errors import InputError
from dj2mgm.settings.base import RETRAINS, Section, read_extra, setting
from dj2mgm.settings.configuration import TARGETS_BY_KEY, Configuration
from dj2mgm.settings.targets import Control
from dj2mgm.storage.files import read_json, read_yaml, write_json
from dj2mgm.storage.image_files import IMAGE_FOLDERS_FILE

T = TypeVar("T")
SIZE_REASONS = ("sampled", "over_max_samples", "over_size", "over_budget")  # of good rows
VERDICT_FILE = "verdict.json"  # next to a page: verdicts, and signs that a model has learned nothing
VERDICT_VERSION = 1  # of the file's format
DECISION_FILE = "decision.json"  # next to the looks of `decide`: verdict and statement of the last one
INSTRUCTIONS_FILE = "instructions.jsonl"  # rows of data/instruction_rows.py in the folder of the synthesize stage
ABSENT = object()


@dataclass(frozen=True)
class SourceSamples:
    """Numbers of a source in a training file."""

    usable: int = 0  # rows that can be trained on
    used: int = 0  # different rows among the samples
    rows_out: int = 0  # samples, including repeated rows
    words: int = 0  # words of the samples


@dataclass(frozen=True)
class TrainingFileCounts:
    """Numbers of rows of a training file, which add up."""

    rows_in: int
    rows_out: int  # samples, including repeated rows
    dropped: dict[str, int]  # rows by reason
    repeated: int = 0
    sources: dict[str, SourceSamples] = field(default_factory=dict)  # empty for a dataset without sources

    @property
    def losses(self) -> dict[str, int]:
        """Rows that cannot or must not be trained on by reason, without good rows that are left out to fit a size."""
        return {reason: count for reason, count in self.dropped.items() if reason not in SIZE_REASONS}

    @property
    def different_rows(self) -> int:
        return self.rows_out - self.repeated

    def as_dict(self) -> dict:
        return {key: value for key, value in asdict(self).items() if key != "sources" or value}


@dataclass(frozen=True)
class JsonlSummary:
    """Content of the file."""

    files: dict[str, TrainingFileCounts]  # of `pretrain` and `finetune`
    inputs: dict[str, str]  # digests of the files that were read

    def as_dict(self) -> dict:
        return {split: counts.as_dict() for split, counts in self.files.items()} | {"inputs": self.inputs}


def read_jsonl_summary(path: Path) -> JsonlSummary:
    values = read_json(path)
    files = {}
    for split in ("pretrain", "finetune"):
        counts = values[split].get("sources", {})
        sources = {name: _read_fields(SourceSamples, numbers) for name, numbers in counts.items()}
        files[split] = _read_fields(TrainingFileCounts, values[split], sources=sources)
    return JsonlSummary(files, values.get("inputs", {}))


@dataclass(frozen=True)
class OperatorSummary:
    """Numbers of rows before and after an operator.

    Attributes:
        step: position of the operator in the recipe, from 1.
        operator: name.
        dropped: number of rows that it dropped.
        changed: number of rows that it changed.
        seconds: time in the operator, summed over processes.
        reports: the operator's own counts by name, such as `broken_images`; most operators have none.
    """

    step: int
    operator: str
    rows_in: int
    rows_out: int
    dropped: int
    changed: int
    seconds: float
    reports: dict[str, dict[str, Any]]

    def as_dict(self) -> dict:
        values = asdict(self)
        return values | values.pop("reports")


@dataclass(frozen=True)
class RecipeSummary:
    """Content of the file.

    Attributes:
        broken_images: numbers of images that cannot be read, by reason.
        data_juicer: version of Data-Juicer.
        input: path and digest of the input file.
        rows: the kind of rows, if it is not image–caption pairs.
    """

    rows_in: int
    rows_kept: int
    broken_images: dict[str, int]
    operators: list[OperatorSummary]
    data_juicer: str
    input: dict[str, str]
    rows: str | None = None

    def as_dict(self) -> dict:
        counts = {
            "rows_in": self.rows_in,
            "rows_kept": self.rows_kept,
            "rows_dropped": self.rows_in - self.rows_kept,
            "errors": 0,
            "broken_images": self.broken_images,
            "operators": [operator.as_dict() for operator in self.operators],
            "data_juicer": self.data_juicer,
            "input": self.input,
        }
        return counts | ({"rows": self.rows} if self.rows else {})


def read_recipe_summary(path: Path) -> RecipeSummary:
    values = read_json(path)
    names = [field.name for field in fields(OperatorSummary)]
    operators = [
        _read_fields(OperatorSummary, numbers, reports={key: numbers[key] for key in numbers if key not in names})
        for numbers in values["operators"]
    ]
    return _read_fields(RecipeSummary, values, operators=operators, rows=values.get("rows"))


@dataclass(frozen=True)
class Judge:
    """A model that judges captions.

    Attributes:
        name: folder or hub id.
        kind: CLIP or SigLIP.
        selects: CLIPs with the same image tower that selected the training data.
        sees: whether the trained model has the same image tower.
    """

    name: str
    kind: str
    selects: list[str]
    sees: bool

    @property
    def title(self) -> str:
        return f"{self.name} ({self.kind})"


@dataclass(frozen=True)
class ScoringRecord:
    """Scores of checkpoints during a training.

    Attributes:
        asked: kind of the rows that were scored, `questions` or `captions`.
        questions: number of these rows.
        seconds: time of all scores.
        share: this time as a share of the training's.
    """

    asked: str
    questions: int
    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """Content of the file. Sizes are in GiB, times in seconds.

    Attributes:
        engine: properties of DeepSpeed's engine.
        loss_first: loss of the first logged step.
        loss_last: loss of the last logged step.
        rows: rows of the training file.
        planned_steps: steps of the epochs in the settings; fewer than `steps` if `min_steps` adds epochs.
        without_answer: number of samples whose answer lies beyond `max_length`.
        samples: samples that were trained on, counted again in each epoch.
        trained_parameters: number of trained weights.
        resumed_from: name of the last checkpoint from which the training was resumed.
        memory: limits of the machine's memory.
        memory_plan: planned memory by part.
        activation_checkpointing: whether all layers are recomputed, or every how many layers one is.
        train_seconds: time of all attempts.
        scores: None if no checkpoint was scored.
        versions: versions by package.
    """

    engine: dict[str, Any]
    steps: int
    loss_first: float | None = None
    loss_last: float | None = None
    rows: int
    planned_steps: int
    without_answer: int | None = None
    samples: int
    trained_parameters: int | None = None
    resumed_from: str | None = None
    memory: dict[str, Any] | None = None
    memory_plan: dict[str, Any] | None = None
    activation_checkpointing: bool | int | None = None
    train_seconds: float
    scores: ScoringRecord | None = None
    peak_host_rss_gib: float | None = None
    peak_gpu_gib: float | None = None
    peak_gpu_reserved_gib: float | None = None
    seed: int
    versions: dict[str, str]

    def as_dict(self) -> dict:
        return asdict(self)


def read_training_record(path: Path) -> TrainingRecord:
    values = read_json(path)
    return _read_fields(
        TrainingRecord, values, scores=values.get("scores") and _read_fields(ScoringRecord, values["scores"])
    )


def _read_fields(kind: type[T], values: dict, **others: Any) -> T:
    """Return a record of a class with `others`, and with the values of a file; those with a default may be missing."""
    names = [field.name for field in fields(kind) if field.name in values or field.default is MISSING]
    return kind(**{name: values[name] for name in names if name not in others}, **others)


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


def list_settings(settings: Section | dict) -> Iterator[tuple[str, Any]]:
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
