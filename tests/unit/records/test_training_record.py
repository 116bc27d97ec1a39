"""Reading the record of a training."""

from dataclasses import replace

from dj2mgm.records.training_record import ScoringRecord, read_training_record
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
