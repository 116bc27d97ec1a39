"""Steps, memory and time of a training: metrics.json of the training stages."""

from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dj2mgm.storage.files import read_json


@dataclass(frozen=True)
class ScoringRecord:
    """Scores of checkpoints during a training.

    Attributes:
        kind: kind of the rows that were scored, `questions` or `captions`.
        questions: number of these rows.
        seconds: time of all scores.
        share: this time as a share of the training's.
    """

    kind: str
    questions: int
    seconds: float
    share: float

    def as_dict(self) -> dict:
        values = asdict(self)
        return {"asked": values.pop("kind")} | values


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
        return asdict(self) | {"scores": self.scores and self.scores.as_dict()}


def read_training_record(path: Path) -> TrainingRecord:
    """Read the file; older ones lack some values. Raise InputError if another value is missing."""
    values = read_json(path)
    replacements = {"rows": values["samples"], "planned_steps": values["steps"], "versions": {}}
    optional = replacements.keys() | {field.name for field in fields(TrainingRecord) if field.default is not MISSING}
    names = [field.name for field in fields(TrainingRecord) if field.name in values or field.name not in optional]
    arguments = replacements | {name: values[name] for name in names}
    if scores := arguments.get("scores"):
        arguments["scores"] = ScoringRecord(scores["asked"], scores["questions"], scores["seconds"], scores["share"])
    return TrainingRecord(**arguments)
