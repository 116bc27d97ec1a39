"""Pages of studies: an ablation of two operators counted by hand, and fine-tunings with given scores and costs."""

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import compare_study
from dj2mgm.features.studies.study_records import StudyPageSettings
from dj2mgm.features.studies.study_table import ComparedVariant, compare_variants, count_remaining_faults, format_count
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_json, read_yaml, write_json, write_jsonl, write_text, write_yaml
from evaluated_runs import JUDGE, build_entry, write_dataset, write_memory, write_run
from report_pages import Elements
from training_records import write_training_record

IMAGES = [f"e{number}" for number in range(40)]
TRUE = "a red circle at the top left and a blue star at the bottom right"
FAULTS = [
    ("p0", "clean", TRUE),
    ("p1", "mismatched", TRUE),
    ("p2", "mismatched", TRUE),
    ("p3", "mismatched", TRUE),
    ("p4", "junk_text", TRUE),
    ("p5", "junk_text", TRUE),
    ("p6", "clean", TRUE),
]


def study(title: str, keeps: float | None = None) -> dict:
    return {"experiment": "all", "description": "What it is for.", "page": {"title": title, "keeps": keeps}}


def values(better: float, attributes: bool = True) -> tuple[dict, dict]:
    """Return all tabulated scores, which exceed chance by `better` on every image."""
    rng = np.random.default_rng(0)
    clip = {
        f"{model}/{images}": {"clip_score": {name: (better + rng.random(), 1) for name in IMAGES}}
        | ({"attribute_accuracy": {name: (6 * (better + rng.random()), 6) for name in IMAGES}} if attributes else {})
        for model in ("pretrain", "finetune")
        for images in ("own", "shuffled")
    }
    return clip, {"finetune/own": {"vqa_accuracy": {name: (float(rng.integers(6)), 5) for name in IMAGES}}}


def train_on(stages: dict, ids: list[str], recaptions: dict[str, str]) -> None:
    """Write the training rows of a run, and the rows with a new caption."""
    write_jsonl(Path(stages["jsonl"]) / "pretrain.jsonl", [{"id": identifier} for identifier in ids])
    rows = [{"id": i, "text": recaptions.get(i, "as it was")} for i in dict.fromkeys(i.split("#")[0] for i in ids)]
    rows = [row | ({"recaption": {"caption": row["text"]}} if row["id"] in recaptions else {}) for row in rows]
    if "synthesize" in stages:
        write_jsonl(Path(stages["synthesize"]) / "synthesized.jsonl", rows)


@pytest.fixture
def results(tmp_path):
    """Write runs of the complete recipe (two seeds), without <b>filter, and without the mapper, which scores higher."""
    dataset = write_dataset(tmp_path / "datasets/shapes", FAULTS)
    root = tmp_path / "results"
    complete = {seed: write_run(root / f"complete/{seed}", *values(0.5), 50, 30 + seed) for seed in (0, 1)}
    for stages in complete.values():
        train_on(stages, ["p0", "p1", "p2", "p0#2", "p2#2"], {"p1": TRUE, "p2": "a red circle at the top right"})
    no_filter = {seed: write_run(root / f"no-filter/{seed}", *values(0.45), 70, 40) for seed in (0, 1)}
    for stages in no_filter.values():
        train_on(stages, ["p0", "p1", "p2", "p4", "p5"], {"p1": TRUE, "p2": TRUE})
    no_mapper = {seed: write_run(root / f"no-mapper/{seed}", *values(0.2), 50, None) for seed in (0, 1)}
    for stages in no_mapper.values():
        train_on(stages, ["p0", "p1", "p2", "p3", "p6"], {})
    entries = [
        build_entry("all", dataset, complete) | {"changes": {"recipe.<b>filter": True, "recipe.mapper": True}},
        build_entry("all-without-<b>filter", dataset, no_filter)
        | {"changes": {"recipe.<b>filter": False, "recipe.mapper": True}},
        build_entry("all-without-mapper", dataset, no_mapper)
        | {"changes": {"recipe.<b>filter": True, "recipe.mapper": False}},
    ]
    write_yaml(tmp_path / "config.yaml", {"experiments": entries, "study": study("Operator ablation")})
    return tmp_path


def run(monkeypatch, folder) -> tuple[pd.DataFrame, str]:
    arguments = ["--config", folder / "config.yaml", "--output-dir", folder / "ablation"]
    monkeypatch.setattr(sys, "argv", ["compare_study.py", *map(str, arguments)])
    compare_study.main()
    table = pd.read_csv(folder / "ablation/ablation.csv", keep_default_na=False, na_values=[""])
    return table, (folder / "ablation/ablation.html").read_text(encoding="utf-8")


def test_variants_are_sorted_by_score_and_counted_by_hand(monkeypatch, results):
    table, _ = run(monkeypatch, results)
    assert table["experiment"].tolist() == ["all", "all-without-<b>filter", "all-without-mapper"]
    complete, filtering, mapper = (row for _, row in table.iterrows())
    assert (complete["rows_filtered"], complete["rows_synthesized"], complete["seeds"]) == (50, 30.5, 2)
    assert (filtering["rows_filtered"], filtering["rows_synthesized"]) == (70, 40)
    assert np.isnan(mapper["rows_synthesized"]) and mapper["rows_filtered"] == 50
    # the complete recipe corrected p1; p2 got an untrue caption and is repeated
    assert (complete["faults_mismatched"], complete["faults_junk_text"], complete["faults_left"]) == (1, 0, 1)
    assert (filtering["faults_mismatched"], filtering["faults_junk_text"], filtering["faults_left"]) == (0, 2, 2)
    assert (mapper["faults_mismatched"], mapper["faults_junk_text"], mapper["faults_left"]) == (3, 0, 3)
    assert (complete["recipe.mapper"], mapper["recipe.mapper"], mapper["recipe.<b>filter"]) == (True, False, True)
    for score in ("pretrain_clip_score", "finetune_attribute_accuracy"):
        ends = [mapper[f"{score}_difference{end}"] for end in ("", "_low", "_high")]
        assert ends == pytest.approx([-0.3] * 3), "the same on every image"
        assert mapper[score] == pytest.approx(complete[score] - 0.3, abs=2e-6)
    assert mapper["finetune_vqa_accuracy_difference"] == 0


def test_a_random_subset_has_a_separate_row(monkeypatch, results):
    config = read_yaml(results / "config.yaml")
    config["experiments"][2] |= {"control": {"kind": "random", "experiment": "all", "compared": None}, "changes": {}}
    write_yaml(results / "config.yaml", config)
    assert "is trained on as many rows as all, drawn at random" in Elements(run(monkeypatch, results)[1]).text()


def test_variants_that_learned_nothing_share_a_next_step(monkeypatch, results):
    for folder in ("no-filter", "no-mapper"):
        for seed in (0, 1):
            write_training_record(results / f"results/{folder}/{seed}/finetune", steps=6, seed=seed)
    text = Elements(run(monkeypatch, results)[1]).text()
    names = "all-without-<b>filter and all-without-mapper"
    assert text.count(f"Nothing measurable learned: {names}") == text.count("Verdict withheld") == 1
    assert "learned nothing" not in text
    reason = "The stage finetune changed weights in 6 optimizer steps only"
    for sentence in ("Raise finetune.min_steps or finetune.epochs", reason):
        assert text.count(sentence) == 1


def test_a_judge_that_selected_is_named(monkeypatch, results):
    assert "The judge also" not in run(monkeypatch, results)[1]
    for folder in ("complete", "no-mapper"):
        for seed in (0, 1):
            file = results / f"results/{folder}/{seed}/evaluate_clip/metrics.json"
            write_json(file, read_json(file) | {"judges": [JUDGE | {"selects": [JUDGE["name"]]}]})
    note = "The judge also selected the data of all and all-without-mapper, so captions with its mistakes may get"
    assert note in Elements(run(monkeypatch, results)[1]).text()


def test_scores_of_another_judge_are_not_compared(monkeypatch, results):
    for seed in (0, 1):
        file = results / f"results/no-mapper/{seed}/evaluate_clip/metrics.json"
        write_json(file, read_json(file) | {"judges": [JUDGE | {"name": "models/other"}]})
    table, html = run(monkeypatch, results)
    columns = ["finetune_clip_score_difference", "finetune_attribute_accuracy_difference"]
    measured = table.set_index("experiment")[columns].notna()
    assert measured.loc["all-without-mapper"].tolist() == [False, True]
    assert measured.loc["all-without-<b>filter"].tolist() == [True, True]
    sentence = (
        "Captions of all-without-mapper and all were judged by different models, models/other (CLIP) and models/clip"
    )
    assert Elements(html).text().count(sentence) == 1 and "The 8 intervals are not corrected" in html


def test_one_image_has_a_difference_without_an_interval(monkeypatch, results):
    monkeypatch.setattr(sys.modules[__name__], "IMAGES", IMAGES[:1])
    for folder, better in (("complete", 0.5), ("no-filter", 0.45), ("no-mapper", 0.2)):
        for seed in (0, 1):
            stages = write_run(results / "results" / folder / str(seed), *values(better), 50, 30)
            train_on(stages, ["p0"], {})
    table, html = run(monkeypatch, results)
    mapper = table.set_index("experiment").loc["all-without-mapper"]
    assert mapper["finetune_clip_score_difference"] == pytest.approx(-0.3)
    assert np.isnan(mapper["finetune_clip_score_difference_low"])
    assert "no interval, one image" in html and "no difference shown: −0.300" in html


def test_page_is_self_contained_and_shows_the_table(monkeypatch, results):
    _, html = run(monkeypatch, results)
    assert run(monkeypatch, results)[1] == html, "the page is deterministic"
    page = Elements(html)
    text = page.text()
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe"}
    assert not [*page.attributes("src"), *page.attributes("href"), *page.attributes("srcset")]
    assert "url(" not in html and "@import" not in html
    assert "<b>filter" not in html and "<b>filter" in text
    assert text.count("Compared with all: ") == 1
    expected = ("with 2 seeds", "What it is for.", "−0.300", "−30.0 points", "mismatched +2", "junk text +2", "+20")
    for part in (*expected, "recipe.mapper off"):
        assert part in text
    assert len(re.findall(r'class="dot"', html)) == 2 * 5
    # after the values of the style sheet
    positions = [float(position) for position in re.findall(r"left: ([-0-9.]+)%", html)[1:]]
    assert positions and all(0 <= position <= 100 for position in positions)


def test_table_without_ground_truth_and_objects(monkeypatch, results):
    (results / "datasets/shapes/ground_truth.jsonl").unlink()
    for folder, better in (("complete", 0.5), ("no-filter", 0.1), ("no-mapper", 0.4)):
        for seed in (0, 1):
            write_run(results / "results" / folder / str(seed), *values(better, attributes=False))
    table, html = run(monkeypatch, results)
    assert table["experiment"].tolist() == ["all", "all-without-mapper", "all-without-<b>filter"]  # sorted by CLIPScore
    assert table["faults_left"].isna().all() and not [name for name in table if name.startswith("faults_m")]
    assert not [name for name in table if "attribute" in name]
    assert "Planted faults" not in html and "Attribute accuracy" not in html


class Trained:
    """The folders of a run."""

    def __init__(self, folder: Path, ids: list[str], recaptions: dict[str, str]):
        self.stages = {"jsonl": folder / "jsonl", "synthesize": folder / "synthesize"}
        train_on(self.stages, ids, recaptions)


def test_a_true_caption_corrects_only_caption_faults(tmp_path):
    faults = ("mismatched", "junk_text", "short_text", "tiny_image", "duplicate", "clean")
    truth = {f"p{number}": {"fault": fault, "caption": TRUE} for number, fault in enumerate(faults)}
    run = Trained(tmp_path, list(truth), dict.fromkeys(truth, TRUE))
    assert count_remaining_faults(run, truth) == {"tiny_image": 1, "duplicate": 1}
    assert count_remaining_faults(Trained(tmp_path, list(truth), {}), truth).total() == 5


def test_only_a_number_after_the_sign_marks_a_repeat(tmp_path):
    truth = {"p4#x": {"fault": "junk_text", "caption": ""}, "p4": {"fault": "tiny_image", "caption": ""}}
    assert count_remaining_faults(Trained(tmp_path, ["p4#x", "p4#12"], {}), truth) == {"junk_text": 1, "tiny_image": 1}


@pytest.mark.parametrize(("value", "text"), [(12345.0, "12,345"), (30.5, "30.5"), (-1810.7, "−1,811")])
def test_counts_as_text(value, text):
    assert format_count(value) == text


def levels(level: float, noise: float, seed: int = 0) -> tuple[dict, dict]:
    """Return scores around `level` on every image."""
    rng = np.random.default_rng(seed)
    scores = {name: (float(level + noise * rng.standard_normal()), 1) for name in IMAGES}
    return {"finetune/own": {"clip_score": scores}}, {"finetune/own": {"vqa_accuracy": scores}}


def write_tuning(root: Path, name: str, level: float, noise: float = 0.01, **costs) -> dict:
    """Write an experiment and return its entry; costs: parameters, seconds, host and gpu (GiB)."""
    folder = root / name
    stages = write_run(folder, *levels(level, noise, seed=len(name)))
    times = {"trained_parameters": costs["parameters"], "train_seconds": costs["seconds"]}
    write_training_record(folder / "finetune", **times)
    gpu = [1.0, costs["gpu"], 1.0] if "gpu" in costs else None
    write_memory(folder / "finetune/memory.csv", [1.0, costs["host"], 1.0], gpu)
    return build_entry(name, root / "dataset", {0: stages})


@pytest.fixture
def write(tmp_path):
    """Return a function that writes entries as a page's configuration and returns its path."""
    write_dataset(tmp_path / "dataset")

    def write(*entries):
        config = tmp_path / "lora_vs_full/config.yaml"
        write_yaml(config, {"experiments": list(entries), "study": study("Fine-tuning", keeps=0.9)})
        return config

    return write


def page_and_table(monkeypatch, config: Path) -> tuple[str, pd.DataFrame]:
    arguments = ["--config", config, "--output-dir", config.parent]
    monkeypatch.setattr(sys, "argv", ["compare_study.py", *map(str, arguments)])
    compare_study.main()
    return (config.parent / "lora_vs_full.html").read_text(), pd.read_csv(config.parent / "lora_vs_full.csv")


def read_variants(config: Path) -> list[ComparedVariant]:
    experiments = load_experiments(config)
    return compare_variants(Assessment(experiments), load_settings(StudyPageSettings, config).study)


FULL = {"parameters": 2_500_000_000, "seconds": 7200, "host": 45.0, "gpu": 23.0}
LORA = {"parameters": 7_000_000, "seconds": 3600, "host": 8.5, "gpu": 11.5}


def test_costs_and_scores_are_tabulated(monkeypatch, tmp_path, write):
    full, lora = write_tuning(tmp_path, "full", 0.8, **FULL), write_tuning(tmp_path, "lora", 0.78, **LORA)
    html, table = page_and_table(monkeypatch, write(full, lora))
    lines = table.set_index("experiment")
    assert lines.loc["lora", ["trained_parameters"]].tolist() == [7_000_000]
    assert lines.loc["lora", ["host_gib", "gpu_gib"]].tolist() == [8.5, 11.5]
    assert lines.loc["lora", "finetune_vqa_accuracy_kept"] == pytest.approx(0.78 / 0.8, abs=0.01)
    assert np.isnan(lines.loc["full", "finetune_vqa_accuracy_kept"])
    text = re.sub(r"<[^>]+>", " ", html)
    for expected in ("2,500,000,000", "11.50 GiB", "at least 90 %: yes"):
        assert expected in text
    assert not re.search(r"<(script|link|img)|url\(|http", html)


@pytest.mark.parametrize(("level", "noise", "enough"), [(0.79, 0.01, True), (0.6, 0.01, False), (0.72, 0.3, None)])
def test_kept_share_is_decided_by_the_interval(tmp_path, write, level, noise, enough):
    full = write_tuning(tmp_path, "full", 0.8, **FULL)
    config = write(full, write_tuning(tmp_path, "lora", level, noise, **LORA))
    reference, lora = read_variants(config)
    assert reference.kept_scores == {}
    assert {score: kept_score.enough for score, kept_score in lora.kept_scores.items()} == dict.fromkeys(
        ["clip_score", "vqa_accuracy"], enough
    )


@pytest.mark.parametrize(("level", "share", "enough"), [(0.48, 0.96, True), (0.4, 0.8, False)])
def test_kept_share_uses_the_shared_seeds(tmp_path, write, level, share, enough):
    """The reference's other seeds score higher; over all seeds, the share of 0.48 / 0.7 would contradict "yes"."""
    full, lora = write_tuning(tmp_path, "full", 0.5, **FULL), write_tuning(tmp_path, "lora", level, **LORA)
    for seed in (1, 2):
        stages = write_tuning(tmp_path / str(seed), "full", 0.8, **FULL)["runs"][0]["stages"]
        full["runs"].append({"seed": seed, "stages": stages})
    for kept_score in read_variants(write(full, lora))[1].kept_scores.values():
        assert (kept_score.share, kept_score.enough) == (pytest.approx(share, abs=0.01), enough)


def test_one_image_gives_no_verdict(monkeypatch, tmp_path, write):
    monkeypatch.setattr(sys.modules[__name__], "IMAGES", IMAGES[:1])
    html, _ = page_and_table(
        monkeypatch, write(write_tuning(tmp_path, "full", 0.8, **FULL), write_tuning(tmp_path, "lora", 0.8, **LORA))
    )
    assert "at least 90 %: not shown" in html and "no interval, one image" in html
    assert "at least 90 %: yes" not in html
    assert "allow for other held-out images only" in html


def test_scores_are_shown_against_costs(monkeypatch, tmp_path, write):
    entries = [write_tuning(tmp_path, name, level, **FULL) for name, level in (("full", 0.8), ("a", 0.85), ("b", 0.9))]
    for name, seconds in (("full", 3600), ("a", 1800), ("b", 7200)):
        write_text(tmp_path / name / "finetune/finetune.benchmark.tsv", f"s\th:m:s\n{seconds}\t1:00:00\n")
    config = read_yaml(write(*entries))
    config["experiments"] = [
        experiment | {"config": experiment["config"] | {"report": {"headline": "vqa_accuracy"}}}
        for experiment in config["experiments"]
    ]
    write_yaml(tmp_path / "lora_vs_full/config.yaml", config)
    html, table = page_and_table(monkeypatch, tmp_path / "lora_vs_full/config.yaml")
    points = re.findall(r'class="point( filled)?(?: front)?" style="left: ([\d.]+)%; bottom: ([\d.]+)%"', html)
    drawn_points = [(float(time), bool(filled)) for filled, time, _ in points]
    assert drawn_points == [(47.62, True), (95.24, False), (23.81, False)]  # the reference, then the best variant
    assert html.count('class="point front"') == 2 and 'class="point filled front"' not in html
    heights = [float(bottom) for _, _, bottom in points]
    assert heights[0] < heights[2] < heights[1] and table["seconds"].tolist() == [3600, 7200, 1800]


def test_without_a_gpu_the_column_is_left_out(monkeypatch, tmp_path, write):
    without_gpu = [{key: value for key, value in costs.items() if key != "gpu"} for costs in (FULL, LORA)]
    full, lora = (
        write_tuning(tmp_path, "full", 0.8, **without_gpu[0]),
        write_tuning(tmp_path, "lora", 0.8, **without_gpu[1]),
    )
    html, table = page_and_table(monkeypatch, write(full, lora))
    assert "GPU" not in html and "Peak host memory" in html
    assert table["gpu_gib"].isna().all()
