"""Reading the record of a training."""

import re
from dataclasses import replace

import pytest

from dj2mgm.errors import InputError
from dj2mgm.records.stage_records import ScoringRecord, read_training_record
from dj2mgm.storage.files import write_json
from training_records import RECORD, write_training_record


def test_a_record_is_read_as_it_was_written(tmp_path):
    scores = ScoringRecord("questions", 12, 1.5, 0.02)
    write_training_record(tmp_path, scores=scores.as_dict(), resumed_from="checkpoint-7")
    assert read_training_record(tmp_path / "metrics.json") == replace(
        RECORD, scores=scores, resumed_from="checkpoint-7"
    )


def test_an_older_record_lacks_values(tmp_path):
    values = RECORD.as_dict()
    for key in ("rows", "planned_steps", "versions", "scores", "trained_parameters"):
        del values[key]
    write_json(tmp_path / "metrics.json", values | {"later": 1})
    assert read_training_record(tmp_path / "metrics.json") == RECORD


@pytest.mark.parametrize("key", ["train_seconds", "samples", "asked"])
def test_a_missing_value_is_named(tmp_path, key):
    values = RECORD.as_dict() | {"scores": ScoringRecord("questions", 12, 1.5, 0.02).as_dict()}
    (values["scores"] if key == "asked" else values).pop(key)
    write_json(tmp_path / "metrics.json", values)
    with pytest.raises(InputError, match=re.escape(f"metrics.json is damaged (it lacks '{key}'): ")):
        read_training_record(tmp_path / "metrics.json")
