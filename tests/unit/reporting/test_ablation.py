"""The ablation of a recipe with two operators, on results small enough to count by hand."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import compare_variants
from dj2mgm.files import read_json, read_yaml, write_json, write_jsonl, write_yaml
from dj2mgm.reporting.ablation import faults_left, format_mean_count, format_signed
from evaluated_runs import JUDGE, entry, write_dataset, write_run

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


def values(better: float, attributes: bool = True) -> tuple[dict, dict]:
    """Return all tabulated scores, `better` above chance on every image."""
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
    """Write the complete recipe with two seeds, without <b>filter, and without the mapper, which gains more."""
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
        entry("all", dataset, complete, without=["old"]),
        entry("all-without-<b>filter", dataset, no_filter, without=["old", "<b>filter"]),
        entry("all-without-mapper", dataset, no_mapper, without=["old", "mapper"]),
    ]
    write_yaml(tmp_path / "config.yaml", {"experiments": entries})
    return tmp_path


def run(monkeypatch, folder) -> tuple[pd.DataFrame, str]:
    arguments = ["--config", folder / "config.yaml", "--output-dir", folder / "ablation"]
    monkeypatch.setattr(sys, "argv", ["compare_variants.py", *map(str, arguments)])
    compare_variants.main()
    table = pd.read_csv(folder / "ablation/ablation.csv", keep_default_na=False, na_values=[""])
    return table, (folder / "ablation/ablation.html").read_text(encoding="utf-8")


def test_operators_are_sorted_by_their_worth_and_counted_by_hand(monkeypatch, results):
    table, _ = run(monkeypatch, results)
    assert table["without"].fillna("").tolist() == ["", "mapper", "<b>filter"]
    complete, mapper, filtering = (row for _, row in table.iterrows())
    assert (complete["rows_filtered"], complete["rows_synthesized"], complete["seeds"]) == (50, 30.5, 2)
    assert (filtering["rows_filtered"], filtering["rows_filtered_difference"]) == (70, -20)
    assert (filtering["rows_synthesized"], filtering["rows_synthesized_difference"]) == (40, -9.5)
    assert np.isnan(mapper["rows_synthesized"]) and mapper["rows_filtered_difference"] == 0
    # the complete recipe corrected p1, its p2 got an untrue caption and is repeated
    assert (complete["faults_mismatched"], complete["faults_junk_text"], complete["faults_left"]) == (1, 0, 1)
    assert (filtering["faults_mismatched"], filtering["faults_junk_text"], filtering["faults_left"]) == (0, 2, 2)
    assert (mapper["faults_mismatched"], mapper["faults_junk_text"], mapper["faults_left"]) == (3, 0, 3)
    assert mapper["faults_left_difference"] == -2 and np.isnan(complete["faults_left_difference"])


def test_a_random_subset_is_a_row_of_its_own(monkeypatch, results):
    config = read_yaml(results / "config.yaml")
    config["experiments"][2] |= {"control": {"kind": "random", "experiment": "all", "compared": None}}
    config["experiments"][2]["config"]["without"] = []
    write_yaml(results / "config.yaml", config)
    table, html = run(monkeypatch, results)
    assert table["without"].fillna("").tolist() == ["", "all (as many random rows)", "<b>filter"]
    assert "is trained on as many rows as all, drawn at random" in Elements(html).text


def test_worth_is_the_paired_difference_to_the_complete_recipe(monkeypatch, results):
    table, _ = run(monkeypatch, results)
    mapper = table.set_index("without").loc["mapper"]
    for score in ("pretrain_clip_score", "finetune_attribute_accuracy"):
        assert mapper[f"{score}_worth"] == pytest.approx(0.3)
        assert (
            mapper[f"{score}_worth_low"] == pytest.approx(0.3) == mapper[f"{score}_worth_high"]
        )  # the same everywhere
        assert mapper[score] == pytest.approx(table.loc[0, score] - 0.3, abs=2e-6)
    assert mapper["finetune_vqa_accuracy_worth"] == 0


def test_a_judge_that_has_selected_is_named(monkeypatch, results):
    assert "The judge also" not in run(monkeypatch, results)[1]
    for folder in ("complete", "no-mapper"):
        for seed in (0, 1):
            file = results / f"results/{folder}/{seed}/evaluate_clip/metrics.json"
            write_json(file, read_json(file) | {"judges": [JUDGE | {"selects": [JUDGE["name"]]}]})
    note = "The judge also selected the data of all and all-without-mapper."
    assert note in Elements(run(monkeypatch, results)[1]).text


def test_scores_of_another_judge_have_no_worth(monkeypatch, results):
    for seed in (0, 1):
        file = results / f"results/no-mapper/{seed}/evaluate_clip/metrics.json"
        write_json(file, read_json(file) | {"judges": [JUDGE | {"name": "models/other"}]})
    table, html = run(monkeypatch, results)
    worths = table.set_index("without")[["finetune_clip_score_worth", "finetune_attribute_accuracy_worth"]].notna()
    assert worths.loc["mapper"].tolist() == [False, True] and worths.loc["<b>filter"].tolist() == [True, True]
    said = "Captions of all and all-without-mapper were judged by different models, models/clip (CLIP) and models/other"
    assert Elements(html).text.count(said) == 1 and "Each of the 8 differences" in html


def test_one_image_has_a_worth_without_an_interval(monkeypatch, results):
    monkeypatch.setattr(sys.modules[__name__], "IMAGES", IMAGES[:1])
    for folder, better in (("complete", 0.5), ("no-filter", 0.45), ("no-mapper", 0.2)):
        for seed in (0, 1):
            stages = write_run(results / "results" / folder / str(seed), *values(better), 50, 30)
            train_on(stages, ["p0"], {})
    table, html = run(monkeypatch, results)
    mapper = table.set_index("without").loc["mapper"]
    assert mapper["finetune_clip_score_worth"] == pytest.approx(0.3) and np.isnan(
        mapper["finetune_clip_score_worth_low"]
    )
    assert "no interval, one image" in html and "no difference shown: +0.300" in html


class Elements(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert not {"src", "href", "srcset"} & {name for name, _ in attributes}

    def handle_data(self, data):
        self.text += data


def test_page_stands_alone_and_shows_the_table(monkeypatch, results):
    _, html = run(monkeypatch, results)
    page = Elements(html)
    assert not page.tags & {"script", "link", "img", "iframe"} and "url(" not in html and "@import" not in html
    assert "<b>filter" not in html and "<b>filter" in page.text
    for expected in ("with 2 seeds", "mapper", "+0.300", "+30.0 points", "mismatched −2", "junk text −2", "−20"):
        assert expected in page.text
    assert page.text.index("mapper") < page.text.index("<b>filter")
    assert len(re.findall(r'class="dot"', html)) == 2 * 5
    places = [float(place) for place in re.findall(r"left: ([-0-9.]+)%", html)[1:]]  # after the style sheet's
    assert places and all(0 <= place <= 100 for place in places)


def test_without_ground_truth_and_objects_the_rest_is_tabulated(monkeypatch, results):
    (results / "datasets/shapes/ground_truth.jsonl").unlink()
    for folder, better in (("complete", 0.5), ("no-filter", 0.1), ("no-mapper", 0.4)):
        for seed in (0, 1):
            write_run(results / "results" / folder / str(seed), *values(better, attributes=False))
    table, html = run(monkeypatch, results)
    assert table["without"].fillna("").tolist() == ["", "<b>filter", "mapper"]  # by CLIPScore
    assert table["faults_left"].isna().all() and not [name for name in table if name.startswith("faults_m")]
    assert table["finetune_attribute_accuracy"].isna().all()
    assert "Planted faults" not in html and "Attribute accuracy" not in html


def test_same_results_same_bytes(monkeypatch, results):
    outputs = [results / "ablation/ablation.csv", results / "ablation/ablation.html"]
    run(monkeypatch, results)
    first = [path.read_bytes() for path in outputs]
    run(monkeypatch, results)
    assert first == [path.read_bytes() for path in outputs]


def failure(monkeypatch, results, capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, results)
    assert stop.value.code == 2
    assert not (results / "ablation").exists()
    return capsys.readouterr().err


def test_an_experiment_that_leaves_out_nothing_is_refused(monkeypatch, results, capsys):
    config = read_yaml(results / "config.yaml")
    config["experiments"][2]["config"]["without"] = ["old"]
    write_yaml(results / "config.yaml", config)
    assert "all-without-mapper omits no operator of all;" in failure(monkeypatch, results, capsys)


@pytest.mark.parametrize(
    ("name", "rule"), [("jsonl/pretrain.jsonl", "write_jsonl"), ("synthesize/synthesized.jsonl", "synthesize_captions")]
)
def test_a_missing_file_is_named_with_its_rule(monkeypatch, results, capsys, name, rule):
    (results / "results/complete/1" / name).unlink()
    message = failure(monkeypatch, results, capsys)
    assert f"complete/1/{name} is missing" in message and f"run the rule {rule} first" in message


class Trained:
    """The folders of a run."""

    def __init__(self, folder: Path, ids: list[str], recaptions: dict[str, str]):
        self.stages = {"jsonl": folder / "jsonl", "synthesize": folder / "synthesize"}
        train_on(self.stages, ids, recaptions)


def test_a_true_caption_mends_captions_only(tmp_path):
    faults = ("mismatched", "junk_text", "short_text", "tiny_image", "duplicate", "clean")
    truth = {f"p{number}": {"fault": fault, "caption": TRUE} for number, fault in enumerate(faults)}
    run = Trained(tmp_path, list(truth), dict.fromkeys(truth, TRUE))
    assert faults_left(run, truth) == {"tiny_image": 1, "duplicate": 1}
    assert faults_left(Trained(tmp_path, list(truth), {}), truth).total() == 5


def test_only_a_number_after_the_sign_marks_a_repeat(tmp_path):
    truth = {"p4#x": {"fault": "junk_text", "caption": ""}, "p4": {"fault": "tiny_image", "caption": ""}}
    assert faults_left(Trained(tmp_path, ["p4#x", "p4#12"], {}), truth) == {"junk_text": 1, "tiny_image": 1}


@pytest.mark.parametrize(("value", "text"), [(12345.0, "12\u202f345"), (30.5, "30.5"), (-1810.7, "−1\u202f811")])
def test_counts_as_text(value, text):
    assert format_mean_count(value) == text


def test_signs():
    assert [format_signed(value) for value in (0.0, 12.0, -3.5)] == ["±0", "+12", "−3.5"]
