"""Comparison of fine-tuning methods, on results with chosen scores and costs."""

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import compare_variants
from dj2mgm.files import read_json, write_json, write_yaml
from dj2mgm.reporting.experiment import load_experiments
from dj2mgm.reporting.tuning import variants
from evaluated_runs import entry, write_dataset, write_memory, write_run

IMAGES = [f"e{number}" for number in range(60)]


def values(level: float, noise: float, seed: int = 0) -> tuple[dict, dict]:
    """Return scores around `level` on every image."""
    rng = np.random.default_rng(seed)
    scores = {name: (float(level + noise * rng.standard_normal()), 1) for name in IMAGES}
    return {"finetune/own": {"clip_score": scores}}, {"finetune/own": {"vqa_accuracy": scores}}


def write_tuning(root: Path, name: str, level: float, noise: float = 0.01, **costs) -> dict:
    """Write an experiment and return its entry; costs: parameters, seconds, host and gpu (GiB)."""
    folder = root / name
    stages = write_run(folder, *values(level, noise, seed=len(name)))
    record = {"trained_parameters": costs["parameters"], "train_seconds": costs["seconds"], "seed": 0}
    write_json(folder / "finetune/metrics.json", record)
    gpu = [1.0, costs["gpu"], 1.0] if "gpu" in costs else None
    write_memory(folder / "finetune/memory.csv", [1.0, costs["host"], 1.0], gpu)
    config = {"finetune": {"lora": {"r": 16}}}
    return entry(name, root / "dataset", {0: stages}, **config)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes entries as a page's configuration and returns its path."""
    write_dataset(tmp_path / "dataset")

    def write(*entries):
        config = tmp_path / "lora_vs_full/config.yaml"
        write_yaml(config, {"experiments": list(entries)})
        return config

    return write


def page_and_table(monkeypatch, config: Path) -> tuple[str, pd.DataFrame]:
    arguments = ["--config", config, "--output-dir", config.parent]
    monkeypatch.setattr(sys, "argv", ["compare_variants.py", *map(str, arguments)])
    compare_variants.main()
    return (config.parent / "lora_vs_full.html").read_text(), pd.read_csv(config.parent / "lora_vs_full.csv")


FULL = {"parameters": 2_500_000_000, "seconds": 7200, "host": 45.0, "gpu": 23.0}
LORA = {"parameters": 7_000_000, "seconds": 3600, "host": 8.5, "gpu": 11.5}


def test_costs_and_scores_are_tabulated(monkeypatch, tmp_path, write):
    full, lora = write_tuning(tmp_path, "full", 0.8, **FULL), write_tuning(tmp_path, "lora", 0.78, **LORA)
    html, table = page_and_table(monkeypatch, write(full, lora))
    lines = table.set_index("name")
    assert lines.loc["lora", ["trained_parameters", "train_seconds"]].tolist() == [7_000_000, 3600]
    assert lines.loc["lora", ["host_gib", "gpu_gib"]].tolist() == [8.5, 11.5]
    assert lines.loc["lora", "vqa_accuracy_kept"] == pytest.approx(0.78 / 0.8, abs=0.01)
    assert np.isnan(lines.loc["full", "vqa_accuracy_kept"])
    text = re.sub(r"<[^>]+>", " ", html)
    for expected in ("2\u202f500\u202f000\u202f000", "2 h 00 min", "11.50 GiB", "at least 90 %: yes"):
        assert expected in text
    widths = [float(width) for width in re.findall(r'class="bar" style="width: ([\d.]+)%', html)]
    assert widths == [100, 100, 100, 100, 0.28, 50, 50, 18.89]
    assert not re.search(r"<(script|link|img)|url\(|http", html)


@pytest.mark.parametrize(
    ("level", "noise", "enough"), [(0.79, 0.01, True), (0.6, 0.01, False), (0.72, 0.3, None), (0.9, 0.01, True)]
)
def test_kept_share_is_decided_by_the_interval(tmp_path, write, level, noise, enough):
    full = write_tuning(tmp_path, "full", 0.8, **FULL)
    config = write(full, write_tuning(tmp_path, "lora", level, noise, **LORA))
    reference, lora = variants(load_experiments(config))
    assert reference.kept == {}
    assert {score: one.enough for score, one in lora.kept.items()} == dict.fromkeys(
        ["clip_score", "vqa_accuracy"], enough
    )


@pytest.mark.parametrize(("level", "share", "enough"), [(0.48, 0.96, True), (0.4, 0.8, False)])
def test_kept_share_uses_the_shared_seeds(tmp_path, write, level, share, enough):
    """The reference's other seeds score higher; over all seeds, a share of 0.48 / 0.7 would contradict "yes"."""
    full, lora = write_tuning(tmp_path, "full", 0.5, **FULL), write_tuning(tmp_path, "lora", level, **LORA)
    for seed in (1, 2):
        stages = write_tuning(tmp_path / str(seed), "full", 0.8, **FULL)["runs"][0]["stages"]
        full["runs"].append({"seed": seed, "stages": stages})
    for one in variants(load_experiments(write(full, lora)))[1].kept.values():
        assert (one.share, one.enough) == (pytest.approx(share, abs=0.01), enough)


def test_scores_with_another_prompt_are_not_compared(monkeypatch, tmp_path, write):
    full, lora = write_tuning(tmp_path, "full", 0.8, **FULL), write_tuning(tmp_path, "lora", 0.78, **LORA)
    file = tmp_path / "lora/evaluate_clip/metrics.json"
    write_json(file, read_json(file) | {"prompt": "A photo depicts "})
    html, table = page_and_table(monkeypatch, write(full, lora))
    kept = table.set_index("name").loc["lora", ["clip_score_kept", "vqa_accuracy_kept"]]
    assert kept.notna().tolist() == [False, True]
    assert "Captions of lora and full were judged with different prompts" in html and html.count("% kept") == 1


def test_one_image_decides_nothing(monkeypatch, tmp_path, write):
    monkeypatch.setattr(sys.modules[__name__], "IMAGES", IMAGES[:1])
    html, _ = page_and_table(
        monkeypatch, write(write_tuning(tmp_path, "full", 0.8, **FULL), write_tuning(tmp_path, "lora", 0.8, **LORA))
    )
    assert "at least 90 %: not shown" in html and "no interval, one image" in html and "yes" not in html
    assert "With one seed, the 95 % intervals cover the choice of images but not training noise" in html


def test_without_a_gpu_the_column_is_left_out(monkeypatch, tmp_path, write):
    costs = [{key: value for key, value in one.items() if key != "gpu"} for one in (FULL, LORA)]
    full, lora = write_tuning(tmp_path, "full", 0.8, **costs[0]), write_tuning(tmp_path, "lora", 0.8, **costs[1])
    html, table = page_and_table(monkeypatch, write(full, lora))
    assert "GPU" not in html and "Peak host memory" in html
    assert table["gpu_gib"].isna().all()
