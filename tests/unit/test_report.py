"""The report of small experiments made by hand: it stands alone, shows the files' figures, names what is missing."""

import csv
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import compare_experiments
from evaluation.vqa import evaluate_answers
from files import write_json, write_jsonl, write_yaml
from reporting.chain import pretrain_chain
from reporting.experiment import RULE_OF_FILE, load_experiment
from reporting.gallery import gallery
from reporting.panels import headline_panels
from reporting.plots import loss_curves, running_mean
from reporting.record import duration
from shapes.dataset import scene_of
from shapes.scenes import describe, render

IMAGES = 15


def estimate(mean: float, n: int = IMAGES) -> dict:
    return {"n": n, "mean": mean, "low": mean - 0.1, "high": mean + 0.1}


def write_dataset(root, objects: bool) -> list[dict]:
    rows = []
    for index in range(IMAGES):
        scene = scene_of(seed=0, split="evaluation", index=index)
        image = root / "images" / f"{index:02d}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        render(scene).save(image)
        row = {"id": f"{index:02d}", "image": f"images/{index:02d}.png", "captions": [describe(scene)]}
        rows.append(row | {"objects": [item.attributes() for item in scene.objects] if objects else []})
    write_jsonl(root / "evaluation.jsonl", rows)
    write_json(root / "summary.json", {"pretrain": 100, "finetune": 60, "evaluation": IMAGES})
    return rows


def write_experiment(folder, dataset, known: bool = True) -> None:
    """Results as the rules leave them; with `known` false, a dataset without objects and questions."""
    rows = write_dataset(dataset, objects=known)
    both = [(model, images) for model in ("pretrain", "finetune") for images in ("own", "shuffled")]
    captions = [
        {"id": row["id"], "image": row["image"], "model": model, "images": images}
        | {"caption": row["captions"][0] if (model, images) == ("finetune", "own") else "a <b>bold</b> & odd caption"}
        for model, images in both
        for row in rows
    ]
    answers = [
        {"id": row["id"], "model": model, "images": images, "type": "count", "question": "How many?", "answer": "one"}
        | {"prediction": "one" if images == "own" else "two"}
        for model, images in both
        for row in rows
        if known
    ]
    write_jsonl(folder / "generate/captions.jsonl", captions)
    write_jsonl(folder / "generate/answers.jsonl", answers)
    pairs = {m: {i: [a for a in answers if (a["model"], a["images"]) == (m, i)] for _, i in both} for m, _ in both}
    write_json(folder / "evaluate_vqa/metrics.json", evaluate_answers(pairs if known else {}, samples=50, seed=0))
    groups = {
        group: {"clip_score": estimate(value)} | ({"attribute_accuracy": estimate(value)} if known else {})
        for model in ("pretrain", "finetune")
        for group, value in ((f"{model}/own", 0.6), (f"{model}/shuffled", 0.25), (f"{model}/difference", 0.35))
    }
    groups["reference"] = {"clip_score": estimate(0.7)}
    clip = {"groups": groups, "clip": "models/clip", "prompt": "A photo depicts ", "bootstrap_samples": 50, "seed": 3}
    write_json(folder / "evaluate_clip/metrics.json", clip | {"seconds": 4.0})
    write_yaml(folder / "evaluate_clip/config.yaml", {"image_root": str(dataset)})
    operators = [
        {
            "operator": "integrity",
            "rows_in": 100,
            "rows_out": 90,
            "dropped": 10,
            "broken_images": {"undecodable": 7, "empty": 3},
        },
        {"operator": "length", "rows_in": 90, "rows_out": 80, "dropped": 10, "broken_images": {}},
    ]
    operators = [operator | {"seconds": 1.5} for operator in operators]
    write_json(folder / "filter/summary.json", {"rows_in": 100, "rows_out": 80, "operators": operators})
    written = {"rows_in": 80, "rows_out": 78, "dropped": {"missing": 2}}
    write_json(
        folder / "jsonl/summary.json", {"pretrain": written, "finetune": written | {"rows_in": 60, "rows_out": 58}}
    )
    for stage in ("pretrain", "finetune"):
        steps = [{"step": step, "loss": 3 / step, "learning_rate": 1e-3, "seconds": step} for step in range(1, 30)]
        write_jsonl(folder / stage / "metrics.jsonl", steps)
        engine = {"zero_stage": 3, "offload_param": "cpu", "micro_batch_size": 16}
        record = {"engine": engine, "train_seconds": 75.0, "samples": 78, "loss_first": 3.0, "loss_last": 0.1}
        record |= {"versions": {"torch": "9.8.7"}, "seed": 1234, "resumed_from": None}
        write_json(folder / stage / "metrics.json", record)


@pytest.fixture
def results(tmp_path):
    """Two experiments, the second on a dataset without objects and questions, in folders with awkward names."""
    root = tmp_path / "results ünd mehr"
    write_experiment(root / "baseline", root / "datasets/shapes")
    write_experiment(root / "dj_synth", root / "datasets/photos", known=False)
    return root


def run(monkeypatch, results, experiments: list[str], datasets: list[str]):
    arguments = ["--experiments", *(results / name for name in experiments)]
    arguments += ["--datasets", *(results / "datasets" / name for name in datasets)]
    arguments += ["--output-dir", results / "report"]
    monkeypatch.setattr(sys, "argv", ["compare_experiments.py", *map(str, arguments)])
    compare_experiments.main()
    return results / "report/report.html", results / "report/comparison.csv"


class Elements(HTMLParser):
    """Every tag with its attributes, all text, and a check that tags are closed in order."""

    VOID = {"meta", "img", "br"}

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]

    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_page_stands_alone_and_escapes_what_models_wrote(monkeypatch, results):
    page, _ = run(monkeypatch, results, ["baseline", "dj_synth"], ["shapes", "photos"])
    html = page.read_text(encoding="utf-8")
    elements = Elements(html)
    assert elements.open == []
    assert not {tag for tag, _ in elements.tags} & {"script", "link", "iframe", "object"}
    assert all(source.startswith("data:image/") for source in elements.attributes("src"))
    assert all(target.startswith("#") for target in elements.attributes("href"))
    assert set(elements.attributes("id")) >= {target[1:] for target in elements.attributes("href")}
    assert "url(" not in html and "@import" not in html
    assert "<b>bold" not in html and "a <b>bold</b> & odd caption" in elements.text()


def test_page_shows_the_figures_of_the_files(monkeypatch, results):
    page, _ = run(monkeypatch, results, ["baseline"], ["shapes"])
    text = Elements(page.read_text(encoding="utf-8")).text()
    for expected in ("100.0 %", "+100.0 points over shuffled images", "0.600", "0.250", "0.700", "baseline"):
        assert expected in text
    for expected in ("undecodable 7, empty 3", "−10", "missing 2", "zero_stage", "9.8.7", "1234", "1 min 15 s"):
        assert expected in text


def test_comparison_has_every_estimate_once(monkeypatch, results):
    _, table = run(monkeypatch, results, ["baseline", "dj_synth"], ["shapes", "photos"])
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    expected = {
        (name, group, metric): value
        for name, dataset in (("baseline", "shapes"), ("dj_synth", "photos"))
        for group, estimates in load_experiment(results / name, results / "datasets" / dataset).groups.items()
        for metric, value in estimates.items()
    }
    assert len(rows) == len(expected)
    for row in rows:
        found = expected[row["experiment"], row["group"], row["metric"]]
        figures = {"value": found["mean"], "low": found["low"], "high": found["high"], "n": found["n"]}
        assert {name: float(row[name]) for name in figures} == pytest.approx(figures, abs=1e-6)
    assert ("baseline", "finetune/difference", "vqa_accuracy_count") in expected


def test_same_results_same_bytes(monkeypatch, results):
    first = [path.read_bytes() for path in run(monkeypatch, results, ["baseline"], ["shapes"])]
    assert first == [path.read_bytes() for path in run(monkeypatch, results, ["baseline"], ["shapes"])]


def test_panels_leave_out_what_was_not_measured(results):
    known = load_experiment(results / "baseline", results / "datasets/shapes")
    photos = load_experiment(results / "dj_synth", results / "datasets/photos")
    assert [panel.title for panel in headline_panels([photos])] == ["CLIPScore"]
    panels = {panel.title: panel for panel in headline_panels([photos, known])}
    assert [part.experiment for part in panels["VQA accuracy"].parts] == ["baseline"]
    assert [part.index for part in panels["CLIPScore"].parts] == [0, 1]
    kinds = [bar.kind for bar in panels["CLIPScore"].parts[1].bars]
    assert kinds == ["own", "shuffled", "own", "shuffled", "reference"]
    for bar in panels["CLIPScore"].parts[1].bars:
        assert 0 <= bar.low <= bar.width <= bar.high <= 100


def test_chain_is_continuous(results):
    steps = pretrain_chain(load_experiment(results / "baseline", results / "datasets/shapes"))
    assert [step.rows for step in steps] == [100, 90, 80, 78, 78]
    for before, after in zip(steps, steps[1:], strict=False):
        assert before.rows == after.rows + after.dropped


def test_gallery_is_spread_over_the_split_and_judges_captions(results):
    items = gallery(load_experiment(results / "baseline", results / "datasets/shapes"), items=5)
    assert [item.identifier for item in items] == ["00", "03", "06", "09", "12"]
    for item in items:
        own, pretrained, shuffled = item.captions
        assert own.right and re.fullmatch(r"(\d) of \1 right", own.verdict)
        assert not pretrained.right and pretrained.verdict.startswith("0 of")
        assert shuffled.kind == "shuffled"
        assert [answer.right for answer in item.answers] == [True]
    photos = load_experiment(results / "dj_synth", results / "datasets/photos")
    assert {caption.verdict for item in gallery(photos) for caption in item.captions} == {""}
    assert len(gallery(photos, items=100)) == IMAGES


@pytest.mark.parametrize("name", [*RULE_OF_FILE, "summary.json", "evaluation.jsonl"])
def test_a_missing_file_is_named_with_its_rule(monkeypatch, results, capsys, name):
    in_dataset = name not in RULE_OF_FILE
    path = (results / "datasets/shapes" if in_dataset else results / "baseline") / name
    path.unlink()
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, results, ["baseline"], ["shapes"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert str(path) in message and f"run the rule {RULE_OF_FILE.get(name, 'make_dataset')} first" in message
    assert not (results / "report").exists()


def test_an_unreadable_gallery_image_is_named(monkeypatch, results, capsys):
    (results / "datasets/shapes/images/00.png").write_bytes(b"")
    with pytest.raises(SystemExit):
        run(monkeypatch, results, ["baseline"], ["shapes"])
    assert "00.png has zero bytes; restore the image" in capsys.readouterr().err


def test_each_experiment_needs_its_dataset(monkeypatch, results, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, results, ["baseline", "dj_synth"], ["shapes"])
    assert "--datasets names 1 folders for 2 experiments" in capsys.readouterr().err


def test_loss_curves_are_reproducible_and_smoothing_keeps_a_straight_line():
    rows = [{"step": step, "loss": 2.0 - 0.01 * step} for step in range(1, 101)]
    assert loss_curves({"a": rows, "b": rows[:1]}) == loss_curves({"a": rows, "b": rows[:1]})
    line = np.linspace(2, 1, 50)
    assert running_mean(line, 6)[3:-3] == pytest.approx(line[3:-3])
    assert running_mean(line, 0) == pytest.approx(line)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.42, "0.4 s"), (59.2, "59 s"), (75, "1 min 15 s"), (3725, "1 h 02 min")]
)
def test_durations(seconds, expected):
    assert duration(seconds) == expected
