"""Scores on other images, by another judge or with another prompt are not compared."""

import shutil

import pytest

from dj2mgm.reporting.comparison import (
    compare_with_first,
    compute_score_differences,
    describe_obstacles,
    tabulate_scores,
)
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.sections.judge_section import describe_judges, measure_judge_agreement
from dj2mgm.reporting.verdicts.headline_panels import build_headline_panels, build_metric_verdicts
from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_json, write_jsonl, write_yaml
from report_pages import read_page_text, write_report
from report_results import write_results
from second_judges import SIGLIP, add_second_judge, change_judges

CLIP, TASK = {"clip_score", "ref_clip_score"}, "pope/pope_accuracy"


@pytest.fixture
def config(tmp_path):
    return write_results(tmp_path)


def change_prompt(config, name: str) -> None:
    for file in config.parent.parent.glob(f"{name}/**/evaluate_clip/metrics.json"):
        write_json(file, read_json(file) | {"prompt": "A drawing of "})


def change_scores(config, change) -> None:
    """Add `change(values)` to the values of each row of scores.jsonl, in all runs."""
    for file in config.parent.parent.glob("*/**/evaluate_clip/scores.jsonl"):
        rows = list(read_jsonl(file))
        for row in rows:
            row["values"] |= change(row["values"])
        write_jsonl(file, rows)


def move_to_a_copy(config, change=None) -> None:
    """Evaluate dj_synth on a copy of the dataset with the same ids, and apply `change` to each row."""
    experiments = read_yaml(config)
    folder = config.parent.parent / "datasets/other"
    shutil.copytree(config.parent.parent / "datasets/shapes", folder)
    rows = read_jsonl(folder / "evaluation.jsonl")
    write_jsonl(folder / "evaluation.jsonl", [row | change(row) if change else row for row in list(rows)])
    experiments["experiments"][1]["dataset"] = str(folder)
    write_yaml(config, experiments)


def compared(config) -> set[str]:
    """Return the metrics with a difference, and check that all parts of the report agree on them."""
    experiments = load_experiments(config)
    differences = {"dj_synth": compute_score_differences(experiments[1], experiments[0])}
    metrics = {metric for estimates in differences["dj_synth"].values() for metric in estimates}
    table = tabulate_scores(experiments, compare_with_first(experiments)).set_index("metric")
    for column in ("difference", "difference_low", "difference_high"):
        assert set(table.index[table[column].notna()]) == metrics
    panels = build_headline_panels(experiments, differences)
    drawn = {panel.title for panel in panels if any(model.differences for model in panel.models)}
    [verdict] = build_metric_verdicts(experiments, differences)
    compared_metrics = " ".join(
        title for sentence in verdict.sentences for title in (*sentence.better, *sentence.worse, *sentence.same)
    )
    assert ("CLIPScore" in drawn) == ("CLIPScore" in compared_metrics) == ("clip_score" in metrics)
    assert ("VQA accuracy" in drawn) == ("VQA accuracy" in compared_metrics) == ("vqa_accuracy" in metrics)
    for panel in panels:
        assert all(len(model.levels) == 2 for model in panel.models), "levels are shown in any case"
        assert panel.title != "CLIPScore" or (panel.ceiling is not None) == ("clip_score" in metrics)
    return metrics


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda config: change_judges(config, "dj_synth", lambda judges: [SIGLIP]),
            "judged by different models, models/siglip (SigLIP) and models/clip (CLIP)",
        ),
        (
            lambda config: change_prompt(config, "dj_synth"),
            "judged with different prompts before the captions, “A drawing of ” and “A photo depicts ”",
        ),
    ],
)
def test_scores_of_another_judge_or_prompt_are_not_compared(monkeypatch, config, change, why):
    change_scores(config, lambda values: {"ref_clip_score": values["clip_score"]})
    before = compared(config)
    assert before >= CLIP | {"vqa_accuracy"} and describe_obstacles(*load_experiments(config)[::-1]) == []
    change(config)
    assert compared(config) == before - CLIP
    text = read_page_text(write_report(monkeypatch, config))
    assert f"Captions of dj_synth and baseline were {why}. CLIPScore and RefCLIPScore cannot be compared." in text
    [note] = describe_judges(load_experiments(config))
    assert note.startswith("Judged ") and ". These scores cannot be compared." in note
    assert text.count(note) == 1, "the panels of both scores are of one judge"
    for judge in ("models/clip (CLIP), prompt “A photo depicts ”", why.split(", ")[1].split(" and ")[0]):
        assert judge in text[text.index("Evaluated on") :], "the record names each experiment's judge and prompt"


def test_scores_stay_comparable_with_another_second_judge(config):
    add_second_judge(config, lambda value, row: value / 10)
    before = compared(config)
    assert "second_clip_score" in before
    change_judges(config, "dj_synth", lambda judges: [judges[0], SIGLIP | {"name": "models/other"}])
    assert compared(config) == before - {"second_clip_score"}
    experiments = load_experiments(config)
    [sentence] = describe_obstacles(*experiments[::-1])
    assert sentence.endswith(". The second judge's CLIPScore and RefCLIPScore cannot be compared.")
    differences = {"dj_synth": compute_score_differences(*experiments[::-1])}
    assert measure_judge_agreement(experiments, differences).contrasts.rows == []


@pytest.mark.parametrize(
    "change", [{"captions": ["another picture"]}, {"questions": [{"type": "a", "question": "b", "answer": "c"}]}]
)
def test_other_images_with_equal_ids_are_not_compared(monkeypatch, config, change):
    move_to_a_copy(config, lambda row: change)
    assert compared(config) == set()
    text = read_page_text(write_report(monkeypatch, config))
    why = "dj_synth and baseline were evaluated on different images or questions (of other and of shapes)."
    assert text.count(f"{why} Their scores cannot be compared.") == 1
    assert "paired by image" not in text and "is shown in" not in text and "dj_synth − baseline" not in text


def test_tasks_of_lmms_eval_have_their_own_images(config):
    change_scores(config, lambda values: {TASK: values["clip_score"]})
    move_to_a_copy(config, lambda row: {"captions": ["another picture"]})
    assert compared(config) == {TASK}


def test_the_same_images_in_another_dataset_are_compared(config):
    before = compared(config)
    move_to_a_copy(config)
    assert compared(config) == before and describe_obstacles(*load_experiments(config)) == []


def test_incomparable_experiments_need_no_shared_seed(config):
    experiments = read_yaml(config)
    for run in experiments["experiments"][1]["runs"]:
        run["seed"] += 10
    write_yaml(config, experiments)
    move_to_a_copy(config, lambda row: {"captions": ["another picture"]})
    assert compared(config) == set()
