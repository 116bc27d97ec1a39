"""Records that stages and pages write for later commands."""

import re
from dataclasses import asdict, replace

import pytest

from dj2mgm.errors import InputError
from dj2mgm.records import ScoringRecord, read_training_record, read_verdicts, write_verdicts
from dj2mgm.storage.files import write_json
from training_records import RECORD, write_training_record


def test_verdicts_of_another_version_are_refused(tmp_path):
    write_verdicts(tmp_path / "verdict.json", {"baseline": {"forgotten": []}})
    assert read_verdicts(tmp_path / "verdict.json") == {"baseline": {"forgotten": []}}
    write_json(tmp_path / "verdict.json", {"baseline": {"forgotten": []}})
    with pytest.raises(InputError, match="verdict.json is from another version .* delete it"):
        read_verdicts(tmp_path / "verdict.json")


def test_a_record_is_read_as_it_was_written(tmp_path):
    scores = ScoringRecord("questions", 12, 1.5, 0.02)
    write_training_record(tmp_path, scores=asdict(scores), resumed_from="checkpoint-7")
    assert read_training_record(tmp_path / "metrics.json") == replace(
        RECORD, scores=scores, resumed_from="checkpoint-7"
    )


@pytest.mark.parametrize("key", ["train_seconds", "samples", "asked"])
def test_a_missing_value_is_named(tmp_path, key):
    values = RECORD.as_dict() | {"scores": asdict(ScoringRecord("questions", 12, 1.5, 0.02))}
    (values["scores"] if key == "asked" else values).pop(key)
    write_json(tmp_path / "metrics.json", values)
    with pytest.raises(InputError, match=re.escape(f"metrics.json is damaged (it lacks '{key}'): ")):
        read_training_record(tmp_path / "metrics.json")
