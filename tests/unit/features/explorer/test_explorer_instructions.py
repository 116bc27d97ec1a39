"""The explorer's tables of instructions, with a slider for each limit and with written instructions."""

from pathlib import Path

import pytest

from dj2mgm.features.explorer.pairs import StageFolder, read_instructions
from dj2mgm.features.selection.operators.model_score_filters import RATINGS
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl
from instructions import ANSWERS, COUNT, QUESTIONS, save_instructions, select
from scripted_server import ScriptedServer, caption, make_server_captioner


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return save_instructions(tmp_path_factory.mktemp("project"))


def read_table(folder: Path):
    return read_instructions(StageFolder("synthesize", folder / "out"))


def test_instructions_have_a_slider(project, tmp_path):
    select(project, tmp_path, [{"likelihood_gain_filter": {"min_gain": 0.0, "other_images": 2}}])
    table = read_table(tmp_path)
    assert (table.name, len(table)) == ("instructions", COUNT)
    assert table.texts[1]["lines"] == [["question", QUESTIONS[1]], ["", ANSWERS[1]]]
    [step] = table.steps
    [limit] = step.limits
    assert (limit.argument, limit.value) == ("min_gain", 0.0)
    assert int((table.fate > 0).sum()) == step.dropped == read_json(tmp_path / "out/summary.json")["rows_dropped"]


def test_limits_of_checks_are_movable(project, tmp_path):
    select(project, tmp_path, [{"round_trip_filter": {"min_agreement": 0.0}}, {"blind_answer_filter": {}}])
    assert [step.limits[0].argument for step in read_table(tmp_path).steps] == ["min_agreement", "max_likelihood"]


def test_limits_of_ratings_are_movable(project, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    ratings = ", ".join(f'"{name}": 4' for name in RATINGS)
    with ScriptedServer(lambda request: caption(f"{{{ratings}}}")) as server:
        process = [{"vlm_rating_filter": {"min_formatting": 3}}]
        select(project, tmp_path, process, captioner=make_server_captioner(server.url))
    assert [limit.argument for limit in read_table(tmp_path).steps[0].limits] == [f"min_{name}" for name in RATINGS]


def test_a_written_instruction_has_its_question_and_its_answer(project, tmp_path):
    select(project, tmp_path, [{"likelihood_gain_filter": {"min_gain": 0.0, "other_images": 2}}])
    rows = list(read_jsonl(tmp_path / "out/instructions.jsonl"))
    write_jsonl(tmp_path / "out/instructions.jsonl", [{**rows[0], "slot": 1}, *rows[1:]])
    event = {"id": "i0", "event": "changed", "operator": "a_mapper", "question": "How many?", "text_after": "two"}
    write_jsonl(tmp_path / "out/dropped.jsonl", [event])
    assert read_table(tmp_path).texts[0]["lines"] == [["question", "How many?"], ["after a_mapper", "two"]]
