"""Wrong arguments of the scripts in benchmarks/ are refused before inputs are made."""

import sys

import pytest

from paths import PROJECT
from run_main import run_main

sys.path.append(str(PROJECT / "benchmarks"))
import loop
import peers
import trainer_steps
import vlm_step

ROWS = ("auto", "auto_fp8", "auto_nf4", "peer_4", "peer_8_recomputed", "peer_8_grouped", "peer_16_recomputed_grouped")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (vlm_step, ("tiny", "--rows", "auto", "nonsense"), "or peer_N, to which _recomputed and _grouped may be added"),
        (vlm_step, ("tiny", "--rows", "auto_fp4"), "found auto_fp4"),
        (vlm_step, ("tiny", "--steps", "1"), "expected a whole number of at least 2, found 1"),
        (vlm_step, (), "name a shape: "),
        (loop, ("--gpus", "-1"), "expected a whole number of at least 1, found -1"),
        (loop, ("--max-steps", "1"), "expected a whole number of at least 2, found 1"),
        (peers, ("tiny", "--llamafactory", "/nonexistent"), "there is no program /nonexistent"),
        (peers, ("tiny", "--rows", "nonsense"), "found nonsense"),
        (trainer_steps, (), "usage: trainer_steps.py [-h] {llamafactory,ms-swift} folder rows"),
    ],
)
def test_wrong_arguments_are_refused_before_inputs_are_made(script, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(script, "make_inputs", lambda *inputs: pytest.fail("inputs were made"), raising=False)
    done = run_main(script, *arguments, capture=capsys)
    assert done.status == 2 and message in done.stderr


def test_help_of_trainer_steps_names_its_arguments(capsys):
    done = run_main(trainer_steps, "--help", capture=capsys)
    assert done.status == 0 and "{llamafactory,ms-swift} folder rows" in done.stdout


def test_documented_rows_are_known():
    assert all(vlm_step.parse_row(row) == row for row in ROWS + vlm_step.ROWS)
    assert all(peers.parse_row(row) == row for row in ROWS + peers.ROWS)
