"""Records of stages for later stages and pages: their summary.json and metrics.json."""

from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from dj2mgm.storage.files import read_json

T = TypeVar("T")
SIZE_REASONS = ("sampled", "over_max_samples", "over_size", "over_budget")  # of good rows


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
