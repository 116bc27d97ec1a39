"""The attention benchmark on a tiny model: real passes, configurations skipped on a CPU, and the page."""

import csv
import os
import re
import signal
import sys

import pytest
import torch

import benchmark_attention
from benchmark_attention import write_attention_page
from dj2mgm.planning.attention_benchmark import Measurement, measure_all
from dj2mgm.settings.targets import AttentionSettings
from dj2mgm.storage.files import write_yaml
from tiny_models import tiny_mgm

LENGTH = 1024
SETTINGS = {
    "sequence_lengths": [LENGTH, 2048],
    "longest_on_cpu": LENGTH,
    "batch_size": 1,
    "passes": 1,
    "cpu_threads": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model ä")
    tiny_mgm().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="about what a machine without a GPU leaves out")
def test_a_cpu_measures_eager_and_sdpa_and_lists_the_rest(monkeypatch, model, tmp_path):
    write_yaml(tmp_path / "config.yaml", SETTINGS)
    arguments = ["--config", tmp_path / "config.yaml", "--model", model, "--output-dir", tmp_path]
    monkeypatch.setattr(sys, "argv", ["benchmark_attention.py", *map(str, arguments)])
    benchmark_attention.main()
    with open(tmp_path / "attention.csv", encoding="utf-8") as file:
        rows = {(row["implementation"], int(row["sequence_length"])): row for row in csv.DictReader(file)}
    eager, sdpa = (rows[implementation, LENGTH] for implementation in ("eager", "sdpa"))
    assert float(eager["seconds"]) > 0 and float(sdpa["seconds"]) > 0
    scores = 2 * 4 * LENGTH**2 * 4 / 2**30  # GiB: layers × heads × pairs of tokens × float32
    assert float(eager["memory_gib"]) > scores and float(sdpa["memory_gib"]) < float(eager["memory_gib"]) / 2
    for implementation in ("eager", "sdpa"):
        assert rows[implementation, 2048]["skipped"] == f"longer than {LENGTH}, the limit for a CPU"
    assert {rows["flash_attention_2", length]["skipped"] for length in (LENGTH, 2048)} == {"needs a GPU"}
    assert "skipped: needs a GPU" in (tmp_path / "attention.html").read_text()


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_measurement_is_a_row_with_its_reason(model, monkeypatch):
    monkeypatch.setattr("dj2mgm.planning.attention_benchmark.measure", die)
    row = next(measure_all(model, AttentionSettings(**SETTINGS)))
    assert row.seconds is None and "killed" in row.skipped


def test_the_page_shows_measured_and_skipped_configurations(tmp_path):
    rows = [Measurement("eager", length, length / 1e4, length**2 / 1e6) for length in (512, 1024, 2048)]
    rows += [Measurement("eager", 4096, skipped="out of GPU memory"), Measurement("sdpa", 512, 0.01, 0.1)]
    write_attention_page(rows, tmp_path / "attention.html")
    html = (tmp_path / "attention.html").read_text()
    paths = re.findall(r'class="mean e(\d)" d="([^"]+)"', html)
    assert [index for index, _ in paths] == ["0", "1", "0", "1"]
    points = [tuple(map(float, point.split())) for point in paths[2][1][1:].split("L")]
    assert points[-1][0] == 100 and points[0][0] == 25
    assert points[-1][1] == pytest.approx(100 - 100 / 1.05, abs=0.01)
    assert "skipped: out of GPU memory" in html and "FlashAttention" not in re.sub(r"<style.*?</style>", "", html)


def test_a_page_without_measurements_states_the_reason(tmp_path):
    write_attention_page([Measurement("flash_attention_2", 512, skipped="needs a GPU")], tmp_path / "attention.html")
    html = (tmp_path / "attention.html").read_text()
    assert "<svg" not in html and "skipped: needs a GPU" in html
