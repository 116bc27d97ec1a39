"""Training steps on a GPU, compiled and under each DeepSpeed configuration, with the losses of the plain model.

python -m pytest tests/gpu          # eight minutes on an H200, mostly compilation; skipped without a GPU
"""

import json
import subprocess
import sys

import pytest
import torch

from places import PROJECT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return rows of benchmarks/train_step.py by configuration, at a tiny shape."""
    rows = tmp_path_factory.mktemp("train_step") / "rows.json"
    script = PROJECT / "benchmarks" / "train_step.py"
    subprocess.run([sys.executable, script, "--shape", "tiny", "--output", rows], check=True)
    return {row["configuration"]: row for row in json.loads(rows.read_text())}


@pytest.mark.parametrize("name", ["plain", "lora_zero3", "lora_zero2", "stage_1", "lora_lengths_fp8", "full"])
def test_a_configuration_trains(name, measured):
    row = measured[name]
    assert "failed" not in row, "\n".join(row["log"])
    assert all(loss == pytest.approx(row["losses"][0], rel=0.1) for loss in row["losses"])


def test_losses_are_those_of_the_plain_model(measured):
    assert measured["golden"]["losses"] == pytest.approx(measured["golden_plain"]["losses"], rel=5e-3)


def test_losses_in_fp8_are_those_in_bf16(measured):
    assert measured["golden_fp8"]["losses"] == pytest.approx(measured["golden_bf16"]["losses"], rel=0.02)


def test_losses_of_the_8_bit_optimizer_are_those_of_adamw(measured):
    assert measured["golden_full"]["losses"] == pytest.approx(measured["golden_full_fp32"]["losses"], rel=0.02)
