"""Differences of an experiment: settings with effects, rows that add up with their flow, and chosen images."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.row_flow import build_pretrain_steps, read_recaptions
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.reporting.verdicts.headline_panels import build_headline_panels
from dj2mgm.reporting.what_changed import FILE_STEP, build_strip, describe_changes
from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_json, write_jsonl, write_yaml
from report_pages import read_page_text, write_report
from report_results import FILTER_RECIPE, write_photos, write_results

TEXT_FILTER = "filter recipe: text_length_filter"


@pytest.fixture
def config(tmp_path):
    """Write baseline and dj_synth, and return the page's configuration."""
    return write_results(tmp_path / "results", seeds=(0,))


def add_experiment(config: Path, name: str, dropped_ids: set[str] = frozenset(), **settings) -> None:
    """Replace dj_synth by a copy of the baseline whose second operator also drops these rows."""
    page = read_yaml(config)
    entry = read_yaml(config)["experiments"][0] | {"name": name}
    entry["config"] |= settings
    if dropped_ids:
        arguments = {
            "text_length_filter": {"min_len": 60, "max_len": 528},
            "image_aspect_ratio_filter": {"min_ratio": 0.2},
        }
        process = [{key: arguments.get(key, value)} for step in FILTER_RECIPE["process"] for key, value in step.items()]
        entry["recipes"] = {"filter": {"process": process}, "synthesize": None}
        stages = entry["runs"][0]["stages"]
        for stage in ("filter", "jsonl"):
            folder = config.parents[1] / name / stage
            shutil.copytree(stages[stage], folder)
            stages[stage] = str(folder)
        events = [*read_jsonl(folder.parent / "filter/dropped.jsonl")]
        drop = {"event": "dropped", "step": 2, "operator": "text_length_filter", "stats": {}}
        write_jsonl(
            folder.parent / "filter/dropped.jsonl", [*events, *({"id": row} | drop for row in sorted(dropped_ids))]
        )
        rows = [row for row in read_jsonl(folder / "pretrain.jsonl") if row["id"] not in dropped_ids]
        write_jsonl(folder / "pretrain.jsonl", rows)
        summary = read_json(folder / "summary.json")
        summary["pretrain"] |= {"rows_in": len(rows) + 1, "rows_out": len(rows)}
        write_json(folder / "summary.json", summary)
    write_yaml(config, {"experiments": [page["experiments"][0], entry]})


def test_rows_add_up_with_the_flow_of_rows(config):
    experiments = load_experiments(config)
    [changed] = describe_changes(experiments)
    pairs, instructions = changed.rows
    lanes = [
        build_pretrain_steps(experiment, experiment.runs[0], read_recaptions(experiment.runs[0]))[-1].lanes
        for experiment in experiments
    ]
    assert [pairs.reference, pairs.experiment] == [lane.original + lane.recaptioned for lane in lanes]
    totals = pairs.totals
    assert pairs.reference - totals["dropped"] + totals["added"] == pairs.experiment
    assert totals["changed"] == lanes[1].recaptioned
    assert pairs.causes == {
        "synthesize recipe: low_similarity_recaption_mapper": Counter(changed=11),
        "synthesize recipe: batched_image_text_similarity_filter": Counter(dropped=4),
        "synthesize recipe: caption_log_likelihood_filter": Counter(dropped=3),
        FILE_STEP: Counter(dropped=1),
    }
    assert not instructions.totals and instructions.reference == instructions.experiment == 38


def test_each_setting_has_its_effect_in_rows(config):
    settings = {"arguments": {"text_length_filter": {"min_len": 60}}, "without": ["image_size_filter"]}
    settings["finetune"] = {"save_steps": 5, "learning_rate": 0.5}
    add_experiment(config, "strict", {"p020", "p021"}, **settings)
    experiments = load_experiments(config)
    [changed] = describe_changes(experiments)
    assert [(change.settings, change.effect) for change in changed.changes] == [
        ([("text_length_filter.min_len", "38 → 60")], "2 pairs dropped"),
        ([("finetune.learning_rate", "0.0002 → 0.5")], ""),
        ([("image_aspect_ratio_filter.min_ratio", "0.25 → 0.2")], "no row"),
    ]
    assert changed.hidden == 1, "save_steps does not affect the trained weights"
    assert changed.rows[0].causes == {TEXT_FILTER: Counter(dropped=2)}
    [reverse] = describe_changes(experiments[::-1])
    assert reverse.rows[0].causes == {TEXT_FILTER: Counter(added=2)}
    assert reverse.changes[0].effect == "2 pairs added"


def test_equal_experiments_are_said_to_be_equal(monkeypatch, config):
    add_experiment(config, "same")
    [changed] = describe_changes(load_experiments(config))
    assert (changed.changes, changed.hidden) == ([], 0)
    assert [rows.totals for rows in changed.rows] == [Counter(), Counter()]
    text = read_page_text(write_report(monkeypatch, config))
    assert "No setting that affects the trained weights differs. Both train on the same 51 pairs." in text


def write_answers(experiment, wrong: set[int]) -> None:
    """Let an experiment answer two questions about each image; `wrong` are the numbers of the wrong answers."""
    file = experiment.runs[0].stages["generate"] / "answers.jsonl"
    rows, number = [], 0
    for row in read_jsonl(file):
        for question in ("How many?", "What?") if row["images"] == "own" else ("How many?",):
            is_wrong = row["images"] != "own" or number in wrong
            rows.append(row | {"question": question, "prediction": "two" if is_wrong else "one"})
            number += row["images"] == "own"
    write_jsonl(file, rows)


@pytest.mark.parametrize(
    ("baseline_wrong", "wrong", "counts", "shown"),
    [
        (
            {4, 5, 9},
            {0, 1, 2},
            (3, 3, 24),
            {"Only dj_synth is right": 2, "Only baseline is right": 0, "Both are right": 1},
        ),
        ({0, 2}, {1, 2}, (1, 1, 28), {"Only dj_synth is right": 0, "Only baseline is right": 0, "Both are wrong": 1}),
        (set(), set(), (0, 0, 30), {"Both are right": 0}),
    ],
)
def test_first_question_of_each_outcome_is_shown(config, baseline_wrong, wrong, counts, shown):
    baseline, experiment = load_experiments(config)
    write_answers(baseline, baseline_wrong)
    write_answers(experiment, wrong)
    strip = build_strip(baseline, experiment)
    alone, other, same = counts
    assert strip.note.startswith(
        f"30 held-out questions, seed 0: Only dj_synth is right ({alone}); Only baseline is right ({other}); "
        f"Both are right, or both wrong ({same})."
    )
    assert {item.title: int(item.identifier[1:]) for item in strip.items} == shown
    for item in strip.items:
        marks = {"Only dj_synth is right": "✗✓", "Only baseline is right": "✓✗", "Both are right": "✓✓"}
        assert "".join(answer.mark for answer in item.answers) == marks.get(item.title, "✗✗")
        assert item.truth == "one" and len(item.image) < 20_000


def test_captions_are_compared_without_questions(tmp_path):
    config = write_photos(tmp_path / "results")
    page = read_yaml(config)
    write_yaml(config, {"experiments": [page["experiments"][0], page["experiments"][0] | {"name": "other"}]})
    photos, other = load_experiments(config)
    strip = build_strip(photos, other)
    assert strip.note.startswith(
        "15 held-out captions, seed 7: other: higher CLIPScore (0); photos: higher CLIPScore (0)"
    )
    values = other.scores[0].groups["finetune/own"]["clip_score"].sums
    values[0], values[3] = 0.25, 9
    strip = build_strip(photos, load_experiments(config)[1])
    assert [item.title for item in strip.items] == ["The same CLIPScore"]
    strip = build_strip(photos, other)
    assert [(item.title, item.identifier) for item in strip.items] == [
        ("other: higher CLIPScore", "e03"),
        ("photos: higher CLIPScore", "e00"),
        ("The same CLIPScore", "e01"),
    ]
    assert strip.items[0].answers[1].mark == "CLIPScore 9.000" and strip.items[0].question == ""


def measure_probability(config: Path, fall: float = 0.0) -> None:
    """Give all runs the headline score; the CLIPScore of dj_synth falls by `fall`."""
    for file in config.parents[1].rglob("evaluate_vqa/scores.jsonl"):
        rows = [row | {"values": row["values"] | {"answer_probability": row["values"]["vqa_accuracy"]}} for row in
                read_jsonl(file)]  # fmt: skip
        write_jsonl(file, rows)
    for file in config.parents[1].glob("dj_synth/**/evaluate_clip/scores.jsonl"):
        rows = list(read_jsonl(file))
        for number, row in enumerate(rows):
            if fall and (row["model"], row["images"]) == ("finetune", "own"):
                row["values"]["clip_score"] = [0.4 - fall - 0.001 * (number % 3), 1]
        write_jsonl(file, rows)


def test_a_random_control_is_advised_until_there_is_one(config):
    measure_probability(config)
    record = Assessment(load_experiments(config)).build_records()
    assert record["dj_synth"]["control_command"] == "snakemake dj_synth --config 'controls=[random]'"
    page = read_yaml(config)
    control = page["experiments"][0] | {"name": "dj_synth-random"}
    control["control"] = {"kind": "random", "experiment": "dj_synth", "compared": ["dj_synth", "dj_synth-random"]}
    write_yaml(config, {"experiments": [*page["experiments"], control]})
    records = Assessment(load_experiments(config)).build_records()
    assert [records[name]["control_command"] for name in ("dj_synth", "dj_synth-random")] == ["", ""]
    entry = page["experiments"][1] | {
        "recipes": page["experiments"][0]["recipes"]
    }  # mappers and equal recipes select none
    write_yaml(config, {"experiments": [page["experiments"][0], entry]})
    assert Assessment(load_experiments(config)).build_records()["dj_synth"]["control_command"] == ""


def test_a_control_keeps_seeds_and_other_controls(tmp_path):
    config = write_results(tmp_path / "results", seeds=(0, 4))
    measure_probability(config)
    page = read_yaml(config)
    half = page["experiments"][1] | {"name": "dj_synth-half-learning-rate"}
    half["control"] = {"kind": "half_learning_rate", "experiment": "dj_synth", "compared": None}
    write_yaml(config, {"experiments": [*page["experiments"], half]})
    command = Assessment(load_experiments(config)).build_records()["dj_synth"]["control_command"]
    assert command == "snakemake dj_synth --config 'controls=[half_learning_rate,random]' 'seeds=[0,4]'"


@pytest.mark.parametrize(("fall", "sentence"), [(0.0, ""), (0.3, "CLIPScore (−0.")])
def test_a_fallen_score_is_named_next_to_a_better_verdict(monkeypatch, config, fall, sentence):
    measure_probability(config, fall)
    record = Assessment(load_experiments(config)).build_records()["dj_synth"]
    assert record["verdict"] == ("Better, one seed, some scores got worse" if fall else "Better, one seed")
    assert ("decide whether the scores that fell matter" in record["next_step"]) == bool(fall)
    assert bool(record["fallen"]) == bool(fall) and sentence in record["fallen"].replace("\u00a0", " ")
    if fall:
        assert record["fallen"].replace("\u00a0", " ") in read_page_text(write_report(monkeypatch, config)).replace(
            "\u00a0", " "
        )


@pytest.mark.parametrize("fall", [0.0, 0.3])
def test_a_single_model_names_the_captions_that_it_lost(config, fall):
    measure_probability(config, fall)
    write_yaml(config, {"experiments": [read_yaml(config)["experiments"][1]]})
    [record] = Assessment(load_experiments(config)).build_records().values()
    sentence = "Captions fell after stage 1, which trains only captions: CLIPScore from "
    assert (sentence in record["fallen"]) == bool(fall)
    assert record["verdict"] == ("Learned, but captions fell" if fall else "Learned")
    assert ("add rows to the instructions" in record["fallen"]) == bool(fall)
    assert record["next_step"].startswith("Compare with other data. ")


def test_judged_scores_have_a_scale(config):
    experiments = load_experiments(config)
    panels = {panel.title: panel for panel in build_headline_panels(experiments, {})}
    scales = {title: panel.scale for title, panel in panels.items()}
    assert panels["CLIPScore"].ceiling < panels["CLIPScore"].level_ticks[-1].at
    assert (
        "0 to 2.5" in scales["CLIPScore"]
        and "other images get 0.500, and the reference captions 2.000" in scales["CLIPScore"]
    )
    assert scales["VQA accuracy"] == ""
