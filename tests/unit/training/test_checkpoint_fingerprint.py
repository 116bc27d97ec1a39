"""The fingerprint that must be equal for a checkpoint to be resumed."""

import sys

import pytest

from dj2mgm.training.fingerprint import compute_fingerprint, compute_input_digest
from dj2mgm.training.settings import TrainingSettings

BATCH = {"global_batch_size": 8, "micro_batch_size": 1, "gradient_accumulation_steps": 8, "gpus": 1}
STAGE = {"cpu_threads": None, "template": "gemma", "deepspeed": None}
SETTINGS = {"seed": 0, "learning_rate": 1e-3, "loader_workers": 4} | BATCH | STAGE


@pytest.fixture
def fingerprint(tmp_path, monkeypatch):
    """Return the fingerprint of a training script, its data and settings, some of which are changed."""
    script, data = tmp_path / "train.py", tmp_path / "data.jsonl"
    monkeypatch.setattr(sys, "argv", [str(script)])

    def compute(code: str = "1", rows: str = "{}", **changed) -> str:
        script.write_text(code)
        data.write_text(rows)
        return compute_fingerprint(TrainingSettings(**SETTINGS | changed), compute_input_digest({"data": data}))

    return compute


@pytest.mark.parametrize("changed", [{"seed": 1}, {"learning_rate": 2e-3}, {"rows": "{} "}, {"code": "2"}])
def test_other_settings_data_or_code_are_another_training(fingerprint, changed):
    assert fingerprint(**changed) != fingerprint()


@pytest.mark.parametrize("changed", [{"loader_workers": 0}, {"gpus": 2, "gradient_accumulation_steps": 4}])
def test_what_does_not_change_the_weights_does_not_matter(fingerprint, changed):
    assert fingerprint(**changed) == fingerprint()
