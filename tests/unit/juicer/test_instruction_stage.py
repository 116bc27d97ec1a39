"""The synthesize stage with a recipe for instructions: rows, statistics, and the explorer's table."""

import json
from pathlib import Path

import pytest

from dj2mgm.data.formats import build_conversation, extract_caption
from dj2mgm.data.instruction_rows import INPUT, convert_instructions
from dj2mgm.juicer.operators.likelihood_gain_filter import compute_likelihood_gain
from dj2mgm.juicer.recipe_settings import CaptionerModel
from dj2mgm.juicer.run_recipe import SYNTHESIZED, run_recipe
from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from dj2mgm.models.questions import GivenAnswer
from dj2mgm.reporting.explorer.pairs import StageFolder, read_instructions
from dj2mgm.settings.chat_templates import read_chat_template
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl, write_yaml
from synthesis import read_synthesize_settings, synthesis_settings
from tiny_captioners import save_project

COUNT = 6
QUESTIONS = ["What is it?", "Is it a cat?"]
ANSWERS = ["a cat", "yes", "a dog", "no", "the sea", "no"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Write a project of random models, with two questions about each of three images."""
    folder = save_project(tmp_path_factory.mktemp("project"), ["a picture"] * COUNT)
    rows = [
        build_conversation(f"i{number}", f"images/{number // 2}.png", QUESTIONS[number % 2], answer)
        for number, answer in enumerate(ANSWERS)
    ]
    (folder / "data/finetune.json").write_text(json.dumps(rows))
    return folder


def select(project: Path, folder: Path, process: list[dict], **changes) -> dict:
    """Run the stage on the instructions like synthesize_captions.py, and return its summary."""
    captioner = {"name": "mgm", "template": read_chat_template("gemma"), "question": "", "num_beams": 2}
    settings = synthesis_settings(project, folder, process, captioner | {"batch_size": 4, "max_new_tokens": 5})
    settings["recipe"]["rows"] = "instructions"
    folder.mkdir(exist_ok=True)
    (folder / "out").mkdir(exist_ok=True)
    write_yaml(folder / "out/config.yaml", settings | changes)
    rows = convert_instructions(json.loads((project / "data/finetune.json").read_text()))
    write_jsonl(folder / "out" / INPUT, rows)
    model = CaptionerModel(project / "base", project / "pretrain")
    recipe = read_synthesize_settings(folder / "out/config.yaml", folder / "out", model)
    return run_recipe(recipe, folder / "out" / INPUT, folder / "out", SYNTHESIZED)


def test_gains_are_computed_for_answers_given_questions(project, tmp_path):
    process = [{"likelihood_gain_filter": {"keep_fraction": 0.5, "other_images": 2}}]
    summary = select(project, tmp_path, process)
    assert (summary["rows_in"], summary["rows_kept"], summary["rows"]) == (COUNT, 3, "instructions")
    stats = {row["id"]: row for row in read_jsonl(tmp_path / "out/stats.jsonl")}
    stats |= {row["id"]: row["stats"] for row in read_jsonl(tmp_path / "out/dropped.jsonl")}
    generator = MGMGenerator(project / "base", project / "pretrain", "cpu")
    images = [str(project / "data/images" / f"{number}.png") for number in range(3)]
    gains = []
    for number, answer in enumerate(ANSWERS):
        own = number // 2
        answers = [GivenAnswer((own + step) % 3, QUESTIONS[number % 2], answer) for step in range(3)]
        gains.append(compute_likelihood_gain(generator.compute_answer_log_likelihoods(images, answers, "gemma"), 1.0))
        assert stats[f"i{number}"]["likelihood_gain"] == pytest.approx([gains[-1]], abs=1e-5)
    kept_rows = list(read_jsonl(tmp_path / "out" / SYNTHESIZED))
    best = sorted(sorted(range(COUNT), key=lambda number: -gains[number])[:3])
    assert [row["id"] for row in kept_rows] == [f"i{number}" for number in best]
    for row, number in zip(kept_rows, best, strict=True):
        assert (row["question"], extract_caption(row["text"])) == (QUESTIONS[number % 2], ANSWERS[number])
        assert row["images"] == [f"images/{number // 2}.png"]


def test_the_explorer_shows_instructions_with_a_slider(project, tmp_path):
    select(project, tmp_path, [{"likelihood_gain_filter": {"min_gain": 0.0, "other_images": 2}}])
    table = read_instructions(StageFolder("synthesize", tmp_path / "out"))
    assert (table.name, len(table)) == ("instructions", COUNT)
    assert table.texts[1]["lines"] == [["question", QUESTIONS[1]], ["", ANSWERS[1]]]
    [step] = table.steps
    [limit] = step.limits
    assert (limit.argument, limit.value) == ("min_gain", 0.0)
    assert int((table.fate > 0).sum()) == step.dropped == read_json(tmp_path / "out/summary.json")["rows_dropped"]
