"""The fingerprint that must match before a checkpoint is resumed."""

import sys

import pytest

from dj2mgm.training.settings import TrainingSettings, compute_fingerprint, compute_input_digest

BATCH = {"global_batch_size": 8, "micro_batch_size": 1, "gradient_accumulation_steps": 8, "gpus": 1}
STAGE = {"cpu_threads": None, "template": "gemma", "deepspeed": None}
SETTINGS = {"seed": 0, "learning_rate": 1e-3, "loader_workers": 4} | BATCH | STAGE


@pytest.fixture
def fingerprint(tmp_path, monkeypatch):
    """Return a function that computes the fingerprint of a training with some changed settings or data."""
    script, data = tmp_path / "train.py", tmp_path / "data.jsonl"
    monkeypatch.setattr(sys, "argv", [str(script)])

    def compute(code: str = "1", rows: str = "{}", **changed) -> str:
        script.write_text(code)
        data.write_text(rows)
        return compute_fingerprint(TrainingSettings(**SETTINGS | changed), compute_input_digest({"data": data}))

    return compute


@pytest.mark.parametrize("changed", [{"seed": 1}, {"learning_rate": 2e-3}, {"rows": "{} "}, {"code": "2"}])
def test_settings_data_and_code_change_the_fingerprint(fingerprint, changed):
    assert fingerprint(**changed) != fingerprint()


@pytest.mark.parametrize("changed", [{"loader_workers": 0}, {"gpus": 2, "gradient_accumulation_steps": 4}])
def test_settings_without_effect_on_weights_are_ignored(fingerprint, changed):
    assert fingerprint(**changed) == fingerprint()
