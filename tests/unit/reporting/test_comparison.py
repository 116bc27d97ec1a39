"""Reading of experiments, and comparison.csv, with results written by hand."""

import shutil

import numpy as np
import pandas as pd
import pytest

from dj2mgm.errors import InputError
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.run_scores import estimate_paired_difference
from dj2mgm.reporting.comparison import (
    COLUMNS,
    build_difference_table,
    classify_difference,
    compare_with_first,
    describe_chance,
    describe_paired_seeds,
    format_difference,
    format_score,
    tabulate_scores,
    write_table,
)
from dj2mgm.reporting.experiment_results import FILE_RULES, load_experiments
from dj2mgm.reporting.report_page import describe_seed_coverage
from dj2mgm.reporting.verdicts.headline_panels import build_headline_panels, build_metric_verdicts
from dj2mgm.storage.files import read_yaml, write_yaml
from evaluated_runs import build_entry, write_dataset, write_run

IMAGES = [f"e{number}" for number in range(30)]


def values(better: float, seed: int, extra: bool = False) -> tuple[dict, dict]:
    """Return scores of both evaluations, which exceed chance by `better` on the right images."""
    rng = np.random.default_rng(seed)
    clip = {
        "finetune/own": {"clip_score": {name: (better + rng.random(), 1) for name in IMAGES}},
        "finetune/shuffled": {"clip_score": {name: (rng.random(), 1) for name in IMAGES}},
        "reference": {"clip_score": dict.fromkeys(IMAGES, (2.0, 1))},
    }
    if extra:
        clip["finetune/own"]["attribute_accuracy"] = dict.fromkeys(IMAGES, (2.0, 3))
    return clip, {"finetune/own": {"vqa_accuracy": {name: (float(rng.integers(6)), 5) for name in IMAGES}}}


@pytest.fixture
def results(tmp_path):
    """Write two experiments with two seeds that share a filter folder; the second has one more metric."""
    root = tmp_path / "results ünd mehr"
    dataset = write_dataset(root / "datasets/shapes")
    baseline = {seed: write_run(root / f"baseline/seed-{seed}", *values(0.0, seed)) for seed in (0, 1)}
    better = {seed: write_run(root / f"better/seed-{seed}", *values(0.5, seed, extra=True)) for seed in (0, 1)}
    for stages in better.values():
        shutil.rmtree(stages["filter"])
        stages["filter"] = baseline[0]["filter"]
    entries = [build_entry("baseline", dataset, baseline), build_entry("better", dataset, better)]
    write_yaml(root / "config.yaml", {"experiments": entries})
    return root


def changed(results, change) -> str:
    """Return the error message for a changed configuration."""
    experiments = [
        build_entry("baseline", results / "datasets/shapes", {0: write_run(results / "one", *values(0.0, 0))}),
        build_entry("other", results / "datasets/shapes", {0: write_run(results / "two", *values(0.0, 1))}),
    ]
    config = {"experiments": experiments}
    change(config)
    write_yaml(results / "changed.yaml", config)
    with pytest.raises(InputError) as error:
        load_experiments(results / "changed.yaml")
    return str(error.value)


def test_experiments_are_read_from_any_stage_folders(results):
    baseline, better = load_experiments(results / "config.yaml")
    assert (baseline.name, baseline.description, baseline.seeds) == ("baseline", "What baseline is for.", [0, 1])
    assert baseline.dataset == results / "datasets/shapes" and len(baseline.evaluation) == 1
    assert better.runs[1].filter == baseline.runs[0].filter and better.runs[0].synthesize is None
    assert better.runs[1].stages["generate"] == results / "better/seed-1/generate"
    assert better.image_root == results / "better/seed-0"
    assert better.groups is better.groups  # computed once


def test_a_page_of_an_earlier_version_is_read(results):
    settings = read_yaml(results / "config.yaml")
    for experiment in settings["experiments"]:
        experiment["config"] |= {"publish": {"experiment": "dj_synth", "anyway": True}, "overwrite": True}
    write_yaml(results / "config.yaml", settings)
    assert [experiment.name for experiment in load_experiments(results / "config.yaml")] == ["baseline", "better"]


def test_pandas_can_read_the_table(results):
    experiments = load_experiments(results / "config.yaml")
    write_table(tabulate_scores(experiments, compare_with_first(experiments)), results / "comparison.csv")
    table = pd.read_csv(results / "comparison.csv")
    assert list(table.columns) == COLUMNS
    assert not table.duplicated(["experiment", "group", "metric"]).any()
    assert len(table) == sum(len(metrics) for e in experiments for metrics in e.groups.values()) == 5 + 6
    for row in table.itertuples():
        experiment = experiments[[e.name for e in experiments].index(row.experiment)]
        estimate = experiment.groups[row.group][row.metric]
        assert [row.value, row.low, row.high] == pytest.approx([estimate.mean, *estimate.ends], abs=1e-6)
        assert (row.n, row.seeds) == (estimate.n, 2)


def test_differences_are_to_the_first_experiment(results):
    experiments = load_experiments(results / "config.yaml")
    table = tabulate_scores(experiments, compare_with_first(experiments)).set_index(["experiment", "group", "metric"])
    assert table.loc["baseline"][["difference", "difference_low", "difference_high"]].isna().all(axis=None)
    better, baseline = table.loc["better"], table.loc["baseline"]
    shared = better.index.intersection(baseline.index)
    assert better.loc[shared, "difference"].to_numpy() == pytest.approx(
        (better.loc[shared, "value"] - baseline.loc[shared, "value"]).to_numpy()
    )
    own = better.loc["finetune/own", "clip_score"]
    assert own["difference_low"] <= own["difference"] == pytest.approx(0.5) and own["difference_low"] > 0
    assert np.isnan(better.loc["finetune/own", "attribute_accuracy"]["difference"])
    assert better.loc["reference", "clip_score"]["difference"] == 0


def test_a_difference_of_fewer_seeds_names_their_number(results):
    config = read_yaml(results / "config.yaml")
    del config["experiments"][1]["runs"][1]
    write_yaml(results / "config.yaml", config)
    experiments = load_experiments(results / "config.yaml")
    table = tabulate_scores(experiments, compare_with_first(experiments))
    assert set(table["difference_seeds"][table["experiment"] == "better"].dropna()) == {1}
    assert "(1 of better)" in describe_paired_seeds(experiments)
    assert describe_paired_seeds(experiments) in describe_seed_coverage(experiments)
    assert describe_paired_seeds([experiments[0]] * 2) == ""


def test_one_image_has_no_interval_and_shows_no_difference(tmp_path):
    dataset = write_dataset(tmp_path / "dataset")
    entries = []
    for name, level in (("baseline", 1.0), ("better", 2.0)):
        clip = {"finetune/own": {"clip_score": {"e0": (level, 1)}}}
        entries.append(
            build_entry(name, dataset, {seed: write_run(tmp_path / name / str(seed), clip, {}) for seed in (0, 1)})
        )
    write_yaml(tmp_path / "config.yaml", {"experiments": entries})
    experiments = load_experiments(tmp_path / "config.yaml")
    write_table(tabulate_scores(experiments, compare_with_first(experiments)), tmp_path / "comparison.csv")
    row = pd.read_csv(tmp_path / "comparison.csv").iloc[1]
    assert (row["value"], row["difference"]) == (2, 1)
    assert row[["low", "high", "difference_low", "difference_high"]].isna().all()
    differences = {"better": estimate_paired_difference(experiments[1].scores, experiments[0].scores)}
    [shown] = build_metric_verdicts(experiments, differences)
    assert [sentence.same for sentence in shown.sentences] == [["CLIPScore"]]
    [panel] = build_headline_panels(experiments, differences)
    [difference] = panel.models[0].differences
    assert (difference.verdict, difference.mark.interval) == ("same", "no interval, one image")
    assert difference.mark.low == difference.mark.at == difference.mark.high


def test_chance_note_for_several_differences():
    assert describe_chance(1, one_seed=True) == ""
    several, single = describe_chance(6, one_seed=False), describe_chance(6, one_seed=True)
    assert (
        "The 6 intervals are not corrected" in several
        and "about one in 20 is marked better or worse by chance" in several
    )
    assert single == "The 6 intervals are not corrected for their number."


@pytest.mark.parametrize(
    ("metric", "low", "high", "expected"),
    [
        ("clip_score", None, None, "no difference shown"),
        ("clip_score", 0.1, 0.2, "better"),
        ("clip_score", 0.0, 0.2, "no difference shown"),
        ("extra_objects", 0.1, 0.2, "worse"),
        ("extra_objects", -0.2, -0.1, "better"),
    ],
)
def test_verdicts(metric, low, high, expected):
    assert classify_difference(metric, Estimate(9, 9, 1, 0.15, low, high)) == expected


@pytest.mark.parametrize(
    ("metric", "level", "points", "kind"),
    [
        ("vqa_accuracy_number", "90.0 %", "+90.0 points", "better"),
        ("vqa_accuracy_yes/no", "90.0 %", "+90.0 points", "better"),
        ("pope/pope_accuracy", "0.900", "+0.900", ""),
    ],
)
def test_question_type_with_a_slash_is_not_a_task(metric, level, points, kind):
    assert (format_score(metric, 0.9), format_difference(metric, 0.9)) == (level, points)
    [row] = build_difference_table("new", {"finetune/own": {metric: Estimate(9, 9, 1, 0.9, 0.8, 1.0)}}).rows
    assert row.cells[0].css_class == kind


def test_a_missing_file_is_named_with_its_rule(results, tmp_path):
    for name, rule in FILE_RULES.items():
        if name.startswith("synthesize/"):
            continue
        file = (results / "baseline/seed-1" / name).rename(tmp_path / "moved")
        with pytest.raises(InputError) as error:
            load_experiments(results / "config.yaml")
        expected = f"{results / 'baseline/seed-1' / name} is missing, so baseline with seed 1 cannot be reported"
        assert str(error.value) == f"{expected}; run the rule {rule} first"
        file.rename(results / "baseline/seed-1" / name)
    with pytest.raises(InputError, match="no.yaml is missing; it lists the experiments"):
        load_experiments(tmp_path / "no.yaml")


def test_a_missing_synthesis_or_dataset_is_named(results):
    def synthesized(config):
        config["experiments"][1]["runs"][0]["stages"]["synthesize"] = str(results / "nowhere")

    message = changed(results, synthesized)
    assert "nowhere/config.yaml is missing" in message and "the rule synthesize_captions" in message
    message = changed(results, lambda config: config["experiments"][0].update(dataset="no/dataset"))
    assert "no/dataset/summary.json is missing" in message and "the rule make_dataset" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c.update(experiments=[]), "changed.yaml: experiments: expected a list with at least one entry"),
        (lambda c: c["experiments"][1].pop("recipes"), "experiments.1.recipes: the key is missing"),
        (lambda c: c["experiments"][1].update(colour="x"), "experiments.1.colour: unknown key; known are changes"),
    ],
)
def test_an_invalid_configuration_is_refused_in_a_sentence(results, change, expected):
    assert expected in changed(results, change)
