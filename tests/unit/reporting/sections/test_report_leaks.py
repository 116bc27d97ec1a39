"""The report's section on evaluation data that are also in the training data."""

import pytest

from dj2mgm.evaluation.groups import Rows
from dj2mgm.evaluation.vqa import evaluate_answers
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.rendering import Cell
from dj2mgm.reporting.sections.judge_section import build_leak_sections
from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_json, write_jsonl, write_yaml
from report_pages import Elements, read_page_text, write_report
from report_results import IMAGES, write_results

LEAKED = ["e00", "e03", "e14"]


@pytest.fixture
def config(tmp_path):
    """Write experiments on a dataset with leaks, which baseline keeps and dj_synth drops."""
    config = write_results(tmp_path, seeds=(0,))
    folder = tmp_path / "datasets/shapes/leaks and more"
    rows = [{"split": "pretrain", "image": "a", "path": "/a", "of": "held_out", "ids": [name]} for name in LEAKED]
    write_jsonl(folder / "leaks.jsonl", [*rows, rows[0] | {"of": "textvqa", "ids": ["e01"]}])
    names = ("references", "leaked", "questions", "training_images", "training_rows")
    counts = {"held_out": (15, 3, 33, 4, 1234), "textvqa": (5000, 1, 2, 1, 7)}
    summary = {of: dict(zip(names, numbers, strict=True)) for of, numbers in counts.items()}
    summary["textvqa"] |= {"texts": 5001, "leaked_texts": 3, "text_rows": 12}
    write_json(folder / "summary.json", summary)
    page = read_yaml(config)
    for entry, treatment in zip(page["experiments"], ("keep", "drop"), strict=True):
        entry["leaks"] = str(folder)
        entry["config"]["jsonl"] = {"leaks": treatment}
    write_yaml(config, page)
    file = tmp_path / "dj_synth/jsonl/summary.json"
    written = read_json(file)
    written["pretrain"]["dropped"]["leaked"] = 1100
    written["finetune"]["dropped"] |= {"leaked": 2, "leaked_text": 5}
    write_json(file, written)
    return config


def test_section_shows_counts_treatment_and_file(monkeypatch, config):
    page = write_report(monkeypatch, config)
    elements = Elements(page.read_text(encoding="utf-8"))
    text = elements.text()
    assert "held-out images1533341,234–––" in text and "textvqa5,00012175,001312" in text
    assert "baseline was trained on these rows." in text
    assert "dj_synth dropped 1,100 pairs (after the filters) and 7 instructions." in text
    [link] = [target for target in elements.attributes("href") if not target.startswith(("#", "explorer/"))]
    assert link == "../datasets/shapes/leaks%20and%20more/leaks.jsonl"
    assert "leaks" in elements.attributes("id")


def test_scores_without_leaks_use_the_other_images(config, tmp_path):
    experiments = load_experiments(config)
    [part] = build_leak_sections(experiments, config)
    answers: dict[str, Rows] = {"own": [], "shuffled": []}
    for row in read_jsonl(tmp_path / "baseline/generate/answers.jsonl"):
        if row["id"] not in LEAKED:
            answers[row["images"]].append(row)
    expected = evaluate_answers({"finetune": answers}, {})["groups"]["finetune/own"]["vqa_accuracy"]
    shown = {(row.head, row.cells[0].text, row.cells[1].text): row.cells[2:] for row in part.scores.rows}
    every, rest = shown["baseline", "Fine-tuned", "VQA accuracy"]
    low, high = (f"{100 * end:.1f}".replace("-", "−") for end in expected.ends)
    assert rest == Cell(f"{100 * expected.mean:.1f} %", f"{low} to {high}") != every
    assert ("dj_synth", "Pretrained", "CLIPScore") in shown
    file = tmp_path / "datasets/shapes/leaks and more/leaks.jsonl"
    write_jsonl(file, [{"of": "held_out", "ids": [f"e{number:02d}" for number in range(IMAGES)]}])  # about one image
    summary = read_json(file.parent / "summary.json")
    write_json(file.parent / "summary.json", summary | {"held_out": summary["held_out"] | {"leaked": 1}})
    [part] = build_leak_sections(load_experiments(config), config)
    assert part.leaked == "1" and {row.cells[-1] for row in part.scores.rows} == {None}, "no scores are left"


def test_section_states_that_no_leaks_were_found(monkeypatch, config, tmp_path):
    folder = tmp_path / "datasets/shapes/leaks and more"
    write_jsonl(folder / "leaks.jsonl", [])
    summary = read_json(folder / "summary.json")
    write_json(folder / "summary.json", {of: dict.fromkeys(counts, 0) for of, counts in summary.items()})
    text = read_page_text(write_report(monkeypatch, config))
    assert "No leaks were found." in text
    assert "without images that leak" not in text and "was trained on them" not in text
