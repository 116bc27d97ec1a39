"""Losses of training steps on a GPU, compiled and under each DeepSpeed configuration, equal the plain model's.

python -m pytest tests/gpu    # takes minutes, mostly for imports and compilation; skipped without a GPU
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from paths import PROJECT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


TRAINED = ("plain", "lora_zero3", "lora_zero2", "stage_1", "lora_lengths_fp8", "full")
COMPARED = ("golden", "golden_plain", "golden_fp8", "golden_bf16", "golden_full", "golden_full_fp32")

ENVIRONMENT = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of compiler processes


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return rows of benchmarks/train_step.py by configuration, at a tiny shape."""
    folder, script = tmp_path_factory.mktemp("train_step"), PROJECT / "benchmarks" / "train_step.py"
    files = {name: folder / f"{name}.json" for name in TRAINED + COMPARED}
    running = [  # at the same time, because each needs little of the GPU and mostly one CPU core
        subprocess.Popen([sys.executable, script, name, "--shape", "tiny", "--output", file], env=ENVIRONMENT)
        for name, file in files.items()
    ]
    assert not any(process.wait() for process in running)
    return {name: json.loads(file.read_text())[0] for name, file in files.items()}


@pytest.mark.parametrize("name", TRAINED)
def test_a_configuration_trains(name, measured):
    row = measured[name]
    assert "failed" not in row, "\n".join(row["log"])
    assert all(loss == pytest.approx(row["losses"][0], rel=0.1) for loss in row["losses"])


def losses(row: dict) -> list[float]:
    assert "failed" not in row, "\n".join(row["log"])
    return row["losses"]


def test_losses_equal_those_of_the_plain_model(measured):
    assert losses(measured["golden"]) == pytest.approx(losses(measured["golden_plain"]), rel=5e-3)


def test_fp8_losses_are_close_to_bf16_losses(measured):
    assert losses(measured["golden_fp8"]) == pytest.approx(losses(measured["golden_bf16"]), rel=0.02)


def test_8_bit_optimizer_losses_are_close_to_adamw(measured):
    assert losses(measured["golden_full"]) == pytest.approx(losses(measured["golden_full_fp32"]), rel=0.02)
