"""Repair of answers that do not depend on their image."""

import pytest
from safetensors.torch import load_file, save_file

from dj2mgm.data.formats import build_dj_text, extract_caption
from dj2mgm.errors import InputError
from dj2mgm.juicer.operators.text_generation.text_problems import find_text_problem
from dj2mgm.juicer.patched_data_juicer import Fields, load_ops
from dj2mgm.juicer.run_recipe import SYNTHESIZED
from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from dj2mgm.reporting.explorer.pairs import StageFolder, read_instructions
from dj2mgm.settings.chat_templates import read_chat_template
from dj2mgm.storage.files import read_jsonl
from instructions import ANSWERS, COUNT, QUESTIONS, select
from scripted_server import ScriptedServer, caption, make_server_captioner, read_text

NAME = "answer_repair_mapper"
GAIN = {"likelihood_gain_filter": {"min_gain": -100.0, "other_images": 2}}


pytestmark = pytest.mark.usefixtures("quick_requests")


def measuring(project) -> dict:
    return {"base_model": str(project / "base"), "stage": str(project / "pretrain"), "other_images": 2}


def trusted(process: list[dict]) -> dict:
    """Return settings that allow folders outside of results/, and the contents of a template."""
    return {"recipe": {"process": process, "rows": "instructions"}, "trusted_recipes": True}


def test_answers_with_low_gain_are_replaced_by_the_models(project, tmp_path):
    select(project, tmp_path / "before", [GAIN])
    gains = {row["id"]: row["likelihood_gain"][0] for row in read_jsonl(tmp_path / "before/out/stats.jsonl")}
    limit = sorted(gains.values())[3]
    summary = select(project, tmp_path, [{NAME: {"min_gain": limit, "other_images": 2, "max_tokens": 6}}, GAIN])
    rows = {row["id"]: row for row in read_jsonl(tmp_path / "out" / SYNTHESIZED)}
    stats = {row["id"]: row for row in read_jsonl(tmp_path / "out/stats.jsonl")}
    generator, changed = MGMGenerator(project / "base", project / "pretrain", "cpu"), 0
    for number, answer in enumerate(ANSWERS):
        name, image = f"i{number}", project / "data/images" / f"{number // 2}.png"
        assert stats[name]["original_likelihood_gain"] == pytest.approx([gains[name]])
        if gains[name] < limit:
            [expected] = generator.answer([image], [QUESTIONS[number % 2]], "gemma", 6, 1)
            expected = expected.strip() or answer
            changed += expected != answer
            assert stats[name]["likelihood_gain"] != pytest.approx([gains[name]]) or expected == answer
        else:
            expected = answer
        assert extract_caption(rows[name]["text"]) == expected
    report = summary["operators"][0]["repairs"]
    assert report["below"] == 3 == report["repaired"] + report["same answer"] + sum(report["unusable"].values())
    assert summary["operators"][0]["changed"] == report["repaired"] == changed


def test_a_server_repairs_answers_and_both_are_shown(project, tmp_path):
    def reply(request):
        return caption("<b>two</b>" if "Is it" in read_text(request) else "a boat")

    process = [{NAME: measuring(project) | {"min_gain": 100.0, "template": "gemma"}}]
    with ScriptedServer(reply) as server:
        changes = trusted(process) | {"captioner": make_server_captioner(server.url)}
        summary = select(project, tmp_path, process, **changes)
        assert server.requests == COUNT
        select(project, tmp_path, process, **changes)
        assert server.requests == COUNT, "answers are kept"
    report = summary["operators"][0]["repairs"]
    assert (report["repaired"], report["unusable"]) == (3, {"markup": 3})
    table = read_instructions(StageFolder("synthesize", tmp_path / "out"))
    assert table.texts[0]["lines"] == [
        ["question", QUESTIONS[0]],
        ["before", ANSWERS[0]],
        [f"after {NAME}", "a boat"],
    ]


def test_the_captioner_answers_while_another_model_measures(project, tmp_path):
    other = tmp_path / "pretrain"
    other.mkdir()
    weights = load_file(project / "pretrain/projector.safetensors")
    save_file({name: -2 * tensor for name, tensor in weights.items()}, other / "projector.safetensors")
    answering = {"mgm_captioning_mapper": {"base_model": str(project / "base"), "stage": str(other)}}
    process = [{NAME: measuring(project) | {"min_gain": 100.0, "template": "gemma", "captioner": answering}}]
    # the default template of the captioner
    with pytest.raises(InputError, match="template plain leaves out the question"):
        select(project, tmp_path, process, **trusted(process))
    answering["mgm_captioning_mapper"]["template"] = "gemma"
    select(project, tmp_path, process, **trusted(process))
    rows = [extract_caption(row["text"]) for row in read_jsonl(tmp_path / "out" / SYNTHESIZED)]
    images = [project / f"data/images/{number // 2}.png" for number in range(COUNT)]
    answers = list(MGMGenerator(project / "base", other, "cpu").answer(images, QUESTIONS * 3, "gemma", 32, 1))
    usable = [number for number in range(COUNT) if find_text_problem(answers[number].strip(), 300) is None]
    assert usable and [rows[number] for number in usable] == [answers[number].strip() for number in usable]


def test_a_server_needs_a_model_that_measures():
    captioner = {"openai_captioning_mapper": {"model": "m"}}
    with pytest.raises(ValueError, match="base_model, stage, template: name the model that measures"):
        load_ops([{NAME: {"captioner": captioner}}])
    template = read_chat_template("gemma")
    own = {"mgm_captioning_mapper": {"base_model": "a", "stage": "b", "template": template}}
    [operator] = load_ops([{NAME: {"captioner": own}}])
    assert operator.budget is None and not operator.in_one_process


@pytest.mark.parametrize(
    ("old", "new", "count"), [("a cat", " A cat.", "same answer"), ("5", "-5", "repaired"), ("C++", "C#", "repaired")]
)
def test_answers_that_differ_in_one_symbol_are_different(project, old, new, count, monkeypatch):
    own = {"base_model": str(project / "base"), "stage": str(project / "pretrain"), "template": "gemma"}
    captioner = {"mgm_captioning_mapper": own}
    [operator] = load_ops([{NAME: {"captioner": captioner, "min_gain": 100.0, "other_images": 2}}])
    monkeypatch.setattr(MGMGenerator, "answer", lambda *_: iter([new] * 3))
    images = [[str(project / f"data/images/{number}.png")] for number in range(3)]
    samples = {"text": [build_dj_text(old)] * 3, "images": images, "question": ["What is it?"] * 3}
    operator.process(samples | {Fields.stats: [{} for _ in images]})
    assert operator.report[count] == 3
