"""Records of trainings, as a training stage writes them."""

from pathlib import Path

from dj2mgm.records import TrainingRecord
from dj2mgm.storage.files import write_json

RECORD = TrainingRecord(
    engine={"zero_stage": 3},
    steps=40,
    rows=40,
    planned_steps=40,
    samples=40,
    train_seconds=60.0,
    seed=0,
    versions={},
)


def write_training_record(stage: Path, **changes) -> None:
    """Write metrics.json into a stage's folder, with other values than RECORD's where they are given."""
    write_json(stage / "metrics.json", RECORD.as_dict() | changes)
