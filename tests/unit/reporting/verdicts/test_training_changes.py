"""Table of the changes by fine-tuning, with intervals by SciPy."""

import numpy as np
import pytest
from scipy import stats

from dj2mgm.reporting.comparison import find_headline
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.reporting.verdicts.learning_faults import judge_training_changes
from dj2mgm.storage.files import read_jsonl, write_jsonl, write_yaml
from evaluated_runs import build_entry, write_dataset, write_run
from report_pages import read_page_text, write_report
from report_results import write_results

IMAGES = [f"e{number:03d}" for number in range(60)]
LEVELS = {  # {metric: level before and after training}
    "answer_probability": (0.3, 0.5),
    "vqa_accuracy": (0.5, 0.5),
    "vqa_accuracy_color": (0.4, 0.6),
    "vqa_accuracy_count": (0.6, 0.45),
    "pope/pope_accuracy": (0.6, 0.5),
}
WORDS = ["gained", "no change shown", "gained", "forgot", "fell"]


@pytest.fixture
def drawn():
    """Draw one value per image for each metric and model."""
    rng = np.random.default_rng(3)
    shape = 2, len(IMAGES)
    return {metric: np.array(levels)[:, None] + 0.1 * rng.standard_normal(shape) for metric, levels in LEVELS.items()}


@pytest.fixture
def experiments(tmp_path, drawn):
    values: dict = {}
    for metric, measured in drawn.items():
        for model, own in zip(("base", "finetune"), measured, strict=True):
            for images, scale in (("own", 1.0), ("shuffled", 0.5)):
                by_image = {name: (float(scale * value), 1) for name, value in zip(IMAGES, own, strict=True)}
                values.setdefault(f"{model}/{images}", {})[metric] = by_image
    runs = {0: write_run(tmp_path / "baseline/0", {}, values)}
    write_yaml(
        tmp_path / "config.yaml", {"experiments": [build_entry("baseline", write_dataset(tmp_path / "data"), runs)]}
    )
    return load_experiments(tmp_path / "config.yaml")


def test_differences_equal_a_paired_t_test(experiments, drawn):
    rows = [*judge_training_changes(experiments[0], find_headline(experiments)).values()]
    assert [row.word for row in rows] == WORDS
    assert [row.title for row in rows][::4] == ["Probability of the right answer", "pope/pope accuracy"]
    paired = [stats.ttest_rel(tuned, base) for base, tuned in drawn.values()]
    for metric, row, test in zip(drawn, rows, paired, strict=True):
        scale, digits = (1, 3) if "/" in metric else (100, 1)
        ends = test.confidence_interval(0.95)
        middle, half = (ends.low + ends.high) / 2, np.sqrt(2) * (ends.high - ends.low) / 2
        low, high = (f"{scale * end:+.{digits}f}".replace("-", "−") for end in (middle - half, middle + half))
        assert row.interval == f"{low} to {high}"
    # here, Bonferroni's correction finds the same rows as Holm's
    p_values = [2 * stats.t.sf(abs(test.statistic) / np.sqrt(2), test.df) for test in paired]
    assert [row.word != "no change shown" for row in rows] == [len(rows) * p <= 0.05 for p in p_values]


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_loss_is_found_with_every_number_of_seeds(tmp_path, seeds):
    """The loss in each seed is about ten standard errors of the mean over images, and seeds vary as images do."""
    rng = np.random.default_rng(seeds)
    error = 0.2 / np.sqrt(len(IMAGES))
    images, runs = 0.2 * rng.standard_normal(len(IMAGES)), {}
    for seed in range(seeds):
        changes = images - 10 * error + error * rng.standard_normal()
        values = {}
        for metric, change in {**dict.fromkeys(LEVELS, 0 * changes), "caption_log_likelihood": changes}.items():
            for group, level in (("base/own", -1 + 0 * changes), ("finetune/own", -1 + change)):
                by_image = {name: (float(value), 1) for name, value in zip(IMAGES, level, strict=True)}
                values.setdefault(group, {})[metric] = by_image
        runs[seed] = write_run(tmp_path / f"baseline/{seed}", {}, values)
    entry = build_entry("baseline", write_dataset(tmp_path / "data"), runs)
    write_yaml(tmp_path / "config.yaml", {"experiments": [entry]})
    experiments = load_experiments(tmp_path / "config.yaml")
    [lost] = Assessment(experiments).build_records()["baseline"]["forgotten"]
    assert lost["title"] == "Log-likelihood of the caption (nats per token)"


def test_one_chance_finding_among_many_is_not_a_change(experiments):
    [run] = experiments[0].scores
    rng = np.random.default_rng(0)
    for number in range(40):
        for group in ("base/own", "finetune/own"):
            values = run.groups[group]["vqa_accuracy"]
            drawn = type(values)(values.ids, rng.standard_normal(len(values.ids)), values.counts, values.file)
            run.groups[group][f"vqa_accuracy_{number}"] = drawn
    rows = [*judge_training_changes(experiments[0], find_headline(experiments)).values()]
    added = [row for row in rows if row.title.removeprefix("VQA accuracy, ").isdigit()]
    excluding = [row for row in added if "−" not in row.interval or "+" not in row.interval]
    assert len(added) == 40 and excluding
    assert {row.word for row in added} == {"no change shown"}


def test_the_first_screen_names_forgotten_metrics(monkeypatch, tmp_path):
    config = write_results(tmp_path)
    for file in tmp_path.glob("baseline/**/evaluate_vqa/scores.jsonl"):
        rows = list(read_jsonl(file))
        before = [row | {"model": "base", "values": {"vqa_accuracy": [1.0, 1]}} for row in rows]
        write_jsonl(file, rows + before)
    records = Assessment(load_experiments(config)).build_records()
    [lost] = records["baseline"]["forgotten"]
    assert lost["title"] == "VQA accuracy" and records["dj_synth"]["forgotten"] == []
    text = read_page_text(write_report(monkeypatch, config))
    first, rest = text.split("Headline metrics", 1)
    assert "baseline forgot: training made this score worse." in first and "dj_synth forgot" not in first
    assert f"VQA accuracy: {lost['tuned']} instead of 100.0 %" in first
    assert "What training changed" in rest and "no change shown" not in rest
