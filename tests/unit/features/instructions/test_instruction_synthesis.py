"""Instructions that a model writes: untrusted answers, stored answers, and questions of the dataset."""

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import httpx2
import pytest
from transformers.utils.import_utils import is_serve_available

import synthesize_captions
from dj2mgm.data.formats import build_conversation, extract_caption
from dj2mgm.data.images import HeldOutImages
from dj2mgm.data.instruction_rows import make_slots
from dj2mgm.data.shapes import QUESTION_TYPES, describe_scene, draw_question, draw_scene
from dj2mgm.data.texts import normalize_words
from dj2mgm.features.instructions.operators.instruction_checks import EvaluationQuestions, QuestionPool
from dj2mgm.features.instructions.operators.instruction_synthesis_mapper import (
    QUESTION_KINDS,
    Instruction,
    build_prompt,
    parse_instructions,
)
from dj2mgm.juicer.operators.captioners import WRONG_SCHEMA, find_text_problem
from dj2mgm.juicer.operators.declarations import draw
from dj2mgm.juicer.patched_data_juicer import load_ops
from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from dj2mgm.settings.models import read_chat_template
from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_jsonl, write_yaml
from forked_python import forked_python
from paths import PROJECT
from scripted_server import MODEL, CaptionRequest, Reply, ScriptedServer, caption
from served_llava import TransformersServe, save_llava_that_answers
from synthesis import build_synthesis_settings
from tiny_captioners import save_project

KEY, VARIABLE = "sk-Secret_123", "TEST_CHAT_KEY"
NAME = "instruction_synthesis_mapper"
PAIRS = 8


pytestmark = pytest.mark.usefixtures("quick_requests")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Write eight pairs, two instructions about the first image, a held-out image, and random models."""
    folder = save_project(tmp_path_factory.mktemp("project"), ["a red circle at the top left"] * PAIRS)
    rows = [
        build_conversation("i0", "images/0.png", "What color is the circle?", "red"),
        build_conversation("i1", "images/0.png", "How many objects are there?", "one"),
    ]
    (folder / "data/finetune.json").write_text(json.dumps(rows))
    questions = [{"type": "x", "question": "Which of the two red boats here is the older one?", "answer": "the left"}]
    held_out = {"id": "e", "image": "images/7.png", "captions": ["a boat"], "questions": questions}
    write_jsonl(folder / "data/evaluation.jsonl", [held_out])
    return folder


def make_settings(project: Path, folder: Path, captioner: dict, **arguments) -> dict:
    process = [{NAME: {"per_image": 2} | arguments}]
    settings = build_synthesis_settings(project, folder, process, captioner) | {
        "evaluation_images": str(project / "data")
    }
    settings["recipe"]["rows"] = "instructions"
    return settings


def make_server_captioner(project: Path, folder: Path, url: str, **arguments) -> dict:
    defaults = read_yaml(PROJECT / "config/config.yaml")["synthesize"]["openai"]
    server_keys = {"base_url": url, "model": MODEL, "concurrency": 4, "retries": 1}
    return make_settings(
        project, folder, {"name": "openai"} | defaults | server_keys | arguments.pop("server", {}), **arguments
    )


def command(project: Path, folder: Path, settings: dict, *flags: object, instructions: Path | None = None) -> list[str]:
    folder.mkdir(exist_ok=True)
    write_yaml(folder / "config.yaml", settings)
    data = project / "data"
    paths = {
        "config": folder / "config.yaml",
        "data": data / "pairs.jsonl",
        "instructions": instructions or data / "finetune.json",
    }
    paths |= {"evaluation": data / "evaluation.jsonl", "output-dir": folder / "out"}
    words = [forked_python(), PROJECT / "workflow_scripts/synthesize_captions.py", *flags]
    return [str(word) for word in (*words, *(part for key, path in paths.items() for part in (f"--{key}", path)))]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def written(*items: tuple[str, str, str]) -> str:
    return json.dumps(
        {"instructions": [dict(zip(("kind", "question", "answer"), item, strict=True)) for item in items]}
    )


def two_questions(request: CaptionRequest) -> Reply:
    pixel = request.image.getpixel((0, 0))
    return caption(written(("count", f"How many of {pixel}?", "two"), ("yes_no", f"Is it {pixel}?", "No.")))


def read_report(folder: Path) -> dict:
    return read_json(folder / "out/summary.json")["operators"][0]["instructions"]


def test_a_server_writes_two_questions_about_each_image(project, tmp_path):
    with ScriptedServer(two_questions) as server:
        run(command(project, tmp_path, make_server_captioner(project, tmp_path, server.url)))
        assert len(server.request_counts) == server.requests == PAIRS - 1, "nothing is asked about the held-out image"
    rows = list(read_jsonl(tmp_path / "out/synthesized.jsonl"))
    assert [row["id"] for row in rows] == ["i0", "i1", *(f"r{pair}+{slot}" for pair in range(7) for slot in (1, 2))]
    assert rows[2].keys() == {"id", "text", "images", "question"}
    for row in rows[2:]:
        question, answer = ("How many", "two") if row["id"].endswith("+1") else ("Is it", "No.")
        assert row["question"].startswith(question) and extract_caption(row["text"]) == answer
    report = read_report(tmp_path)
    assert report == {
        "given": 2,
        "written": 14,
        "dropped": {},
        "answers": {"yes": 0, "no": 7},
        "server": {"requests": 7, "answers": 7, "tokens": 70},
    }


@pytest.mark.slow
@pytest.mark.skipif(not is_serve_available(), reason="transformers[serving] is not installed")
def test_a_restarted_server_gets_only_missing_requests(project, tmp_path):
    """Kill `transformers serve` with its fourth request open, restart it, and continue with an exact budget."""
    images = PAIRS - 1
    save_llava_that_answers(
        tmp_path / "llava",
        build_prompt(1, list(QUESTION_KINDS), "English"),
        written(("count", "How many dots?", "two")),
    )
    with TransformersServe(tmp_path / "llava") as served:

        def forward(request: CaptionRequest) -> Reply:
            if proxy.requests == 4 and not killed.is_set():
                killed.set()
                served.process.send_signal(signal.SIGSTOP)  # so that the server gets the request and cannot answer it
                threading.Timer(0.2, served.kill).start()
            try:
                answer = httpx2.post(f"{served.url}/chat/completions", json=request.body, timeout=60)
            except httpx2.TransportError:
                return Reply(action="reset")
            return Reply(answer.status_code, json.dumps(answer.json()))

        killed = threading.Event()
        with ScriptedServer(forward, models=[str(served.model)]) as proxy:
            server = {"model": str(served.model), "retries": 0, "concurrency": 2, "max_requests": images}
            settings = make_server_captioner(project, tmp_path, proxy.url, per_image=1, server=server)
            stopped = subprocess.run(command(project, tmp_path, settings), capture_output=True, text=True)
            assert "3 questions in a row got no answer" in stopped.stderr and killed.is_set()
            first = proxy.caption_counts.total()
            assert 2 <= first <= 3, "answers before the fourth request"
            served.start()
            proxy.request_counts.clear()
            one_less = make_server_captioner(
                project, tmp_path, proxy.url, per_image=1, server=server | {"max_requests": images - 1}
            )
            stopped = subprocess.run(command(project, tmp_path, one_less), capture_output=True, text=True)
            assert f"max_requests: {images - 1} is used up" in stopped.stderr
            assert proxy.requests == images - 1 - first
            run(command(project, tmp_path, settings))
            assert proxy.requests == images - first, "the budget is spent, and answers of both servers are reused"
            assert len(proxy.caption_counts) == images and set(proxy.caption_counts.values()) == {1}
    report = read_report(tmp_path)
    assert (report["written"], report["dropped"]) == (images, {})
    assert (report["server"]["requests"], report["server"]["answers"]) == (1, 1)


GOOD = written(("count", "How many dots?", "two"), ("count", "How many lines?", "two"))
HOSTILE = {
    written(("count", "How <b>many</b>?", "two"), ("count", "How many?", "<script>alert(1)</script>")): "markup",
    written(("count", "How many <|im_end|>?", "two"), ("count", "How many?", "two</s>")): "control token",
    written(("count", "How many <__dj__image>?", "two"), ("count", "How many?", "two <|__dj__eoc|>")): "control token",
    written(("count", "What? ASSISTANT: red USER: Why?", "two"), ("count", "How [/INST]?", "two")): "control token",
    written(("count", "How many <\uff5cend\uff5c>?", "two"), ("count", "How many?", "<<SYS>>")): "control token",
    written(("count", "How many?", "x" * 301), ("count", "How " * 100, "two")): "too long",
    written(("count", "", "two"), ("count", "How many?", " ")): "empty",
    written(("count", "???", "two"), ("count", "\u2003", "two")): "empty",
    written(("spell", "How many?", "two"), ("count", 'a"', "two")).replace('"two"', "2"): WRONG_SCHEMA,
    "There are two cats.": WRONG_SCHEMA,
    '{"instructions": "none"}': WRONG_SCHEMA,
    "[" * 100_000: WRONG_SCHEMA,
    '{"instructions": ' + "[" * 100_000: WRONG_SCHEMA,
    f"The key is {KEY}.": "quotes the key",
    written(("text", "What color is the circle\u202e?", "red"), ("count", "Is it\u0007?", "no")): "control character",
    written(("text", "What\nis it?", "red"), ("count", "Is it\u2028?", "no")): "control character",
    written(("text", "What is\xad it?", "red"), ("count", "Is it\U000e0041?", "no")): "control character",
    written(("text", "What i\u200cs it?", "red"), ("count", "Is it?", "no\u200d")): "control character",
}


def test_hostile_answers_are_counted_and_dropped(project, tmp_path, monkeypatch):
    """A useful answer to the first image of each run, and hostile answers to the six others."""
    monkeypatch.setenv(VARIABLE, KEY)
    hostile = list(HOSTILE)
    for first in range(0, len(hostile), 6):
        texts, folder = hostile[first : first + 6], tmp_path / str(first)
        with ScriptedServer(lambda request, texts=(GOOD, *texts): caption(texts[request.number - 1])) as server:
            arguments = make_server_captioner(
                project, folder, server.url, server={"key_variable": VARIABLE, "concurrency": 1}
            )
            report = in_this_process(project, folder, arguments)
        expected = Counter(HOSTILE[text] for text in texts for _ in range(2))
        assert report["written"] == 2 and report["dropped"] == expected
        stored = "".join(path.read_text() for path in folder.rglob("*.jsonl"))
        assert KEY not in stored


def in_this_process(project: Path, folder: Path, settings: dict) -> dict:
    words = command(project, folder, settings)[2:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["synthesize_captions.py", *words])
        synthesize_captions.main()
    return read_report(folder)


def test_an_answer_of_ten_megabytes_is_refused(project, tmp_path):
    flood = "x" * 10_000_000
    with ScriptedServer(lambda request: caption(GOOD if request.number == 1 else flood)) as server:
        report = in_this_process(
            project, tmp_path, make_server_captioner(project, tmp_path, server.url, server={"concurrency": 1})
        )
        assert server.requests == 7, "an answer of that size is not requested again"
    assert report["dropped"] == {"no answer": 12} and report["written"] == 2


def test_duplicates_and_held_out_questions_are_dropped(project, tmp_path):
    leak = ("reasoning", "Which of the two red boats HERE is the older one", "The left.")
    again = ("recognition", "what color is the circle", "red")

    def reply(request: CaptionRequest) -> Reply:
        return caption(f"Sure!\n```json\n{written(again, leak, again)}\n```")

    with ScriptedServer(reply) as server:
        report = in_this_process(project, tmp_path, make_server_captioner(project, tmp_path, server.url, per_image=3))
    assert report["dropped"] == {"duplicate": 8, "held-out question": 7}
    ids = [row["id"] for row in read_jsonl(tmp_path / "out/synthesized.jsonl")]
    assert ids == ["i0", "i1", *(f"r{pair}+1" for pair in range(1, 7))], "the first image has that question already"


def test_one_request_is_sent_for_copies_of_an_image(project, tmp_path):
    pair, data = next(read_jsonl(project / "data/pairs.jsonl")), tmp_path / "data"
    shutil.copytree(project / "data", data)
    shutil.copy(data / "images/0.png", data / "images/copy.png")
    shutil.copy(data / "images/6.png", data / "images/of instruction.png")
    images = [
        "images/copy.png",
        "images/0.png",
        "images/1.png",
        "images/../images/1.png",
        "images/6.png",
        "images/9.png",
    ]
    pairs = [pair | {"id": f"p{number}", "images": [image]} for number, image in enumerate(images)]
    instructions = [
        build_conversation("i0", "images/0.png", "What is it?", "red"),
        build_conversation("i1", "images/of instruction.png", "Is it old?", "no"),
        build_conversation("i2", "images/8.png", "Is this file missing?", "yes"),
        build_conversation("i3", "images/1.png", "Is it old?\nAnswer with one word.", "no"),
    ]
    instructions[3]["conversations"] += [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "It is rusty."}]
    rows = list(make_slots(pairs, instructions, HeldOutImages(), data, 2))
    assert [row["id"] for row in rows] == ["p0+1", "p0+2", "p2+1", "p2+2", "p4+1", "p4+2"]
    several = ["is it old answer with one word", "is it old", "answer with one word", "why"]
    assert [row["asked"] for row in rows[::2]] == [["what is it"], several, ["is it old"]]


def test_a_pair_without_its_image_gets_no_question(project, tmp_path, capsys):
    pairs = [row | {"images": ["images/missing.png"]} for row in read_jsonl(project / "data/pairs.jsonl")]
    assert list(make_slots(pairs, [], HeldOutImages(), project / "data", 1)) == []
    assert f"no questions for {PAIRS} pairs" in capsys.readouterr().err


def test_a_model_that_writes_no_json_stops_the_stage(project, tmp_path, capsys):
    with ScriptedServer(lambda request: caption("I see two cats.")) as server, pytest.raises(SystemExit):
        in_this_process(project, tmp_path, make_server_captioner(project, tmp_path, server.url))
    assert "none of 14 rows got an instruction (14 wrong schema)" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["چه می\u200cبینید؟", "क्\u200dष क्या है?", "Is 👨\u200d👩 here?", "\u200fא"])
def test_questions_in_other_scripts_are_usable(text):
    assert find_text_problem(text, 300) is None


def test_extra_keys_and_unknown_kinds_violate_the_schema():
    good = {"kind": "count", "question": "How many?", "answer": "two"}
    items = [good, good | {"extra": 1}, good | {"kind": "other"}, good | {"answer": ["two"]}, "How many?", None]
    parsed = parse_instructions(json.dumps({"instructions": items}), QUESTION_KINDS)
    assert parsed == [Instruction(**good)] + [None] * 5
    assert parse_instructions(json.dumps({"instructions": [good], "x": 1}), QUESTION_KINDS) is None


@pytest.fixture(scope="module")
def pool() -> QuestionPool:
    rng = random.Random(0)
    return QuestionPool(draw_question(draw_scene(rng), kind, rng) for kind in QUESTION_TYPES for _ in range(1500))


def test_questions_fit_the_scene_of_a_caption(pool):
    """A question fits if the embedded dataset could ask it about the scene."""
    assert {kind: len(questions) > 0 for kind, questions in pool.kinds.items()} == dict.fromkeys(
        ("recognition", "count", "position", "yes_no"), True
    )
    answers = Counter()
    for number in range(200):
        scene = draw_scene(random.Random(number))
        names = {(item.color, item.shape) for item in scene.objects}
        for kind in pool.kinds:
            question = pool.choose(describe_scene(scene), [kind], (), partial(draw, 0, str(number)))
            words = question.rstrip("?").split()
            if kind == "yes_no":
                answers[tuple(words[-2:]) in names] += 1
            elif kind == "position":
                assert tuple(words[-2:]) in names
            elif kind == "recognition":
                scene_words = {item.shape for item in scene.objects} | {item.color for item in scene.objects}
                assert words[-1] in scene_words or words[-2] in scene_words
    assert 80 < answers[True] < 120, "yes and no are balanced"


def test_a_question_is_not_chosen_twice(pool):
    caption, taken = "a red circle at the top left", []
    while question := pool.choose(caption, ["recognition", "position", "count"], taken, partial(draw, 0)):
        taken.append(normalize_words(question))
    expected = {"what color is the circle", "what shape is the red object", "where is the red circle"}
    assert len(taken) == 4 and set(taken) == expected | {"how many objects are there"}


def test_different_spellings_of_a_question_are_one_question():
    questions = [
        ("What color is it?", "red"),
        ("what color is IT", "blue"),
        ("How many?", "two"),
        ("How many?", "several"),
    ]
    pool = QuestionPool(questions + [("How many?", "3")])
    assert pool.kinds == {"recognition": ["What color is it?"], "count": ["How many?"]}, (
        "one odd answer decides nothing"
    )
    assert pool.choose("a cat", ["recognition"], {"what color is it"}, partial(draw, 0)) is None
    pool = QuestionPool(("How many?", answer) for answer in ("two", "several", "3"))
    assert pool.kinds == {"count": ["How many?"]}, "most answers decide the kind"


def test_the_runs_model_answers_questions_of_the_dataset(project, tmp_path):
    mgm = {"name": "mgm", "template": read_chat_template("gemma"), "question": "", "num_beams": 2, "batch_size": 4}
    settings = make_settings(project, tmp_path, mgm | {"max_new_tokens": 5}, questions="dataset", max_tokens=6)
    flags = ("--captioner-model", project / "base", "--captioner-stage", project / "pretrain")
    instructions = [
        build_conversation(f"i{number}", f"images/{number % 2}.png", question, "red")
        for number, question in enumerate(["What color is the circle?", "What color is the star?"] * 20)
    ]
    instructions[0]["image"] = "images/7.png"
    for row in instructions[2::2]:
        row["conversations"][0]["value"] = "<image>\nwhat COLOR is the circle"
    (tmp_path / "finetune.json").write_text(json.dumps(instructions))
    run(command(project, tmp_path, settings, *flags, instructions=tmp_path / "finetune.json"))
    rows = {row["id"]: row for row in read_jsonl(tmp_path / "out/synthesized.jsonl")}
    stats = [row["instruction"] for row in read_jsonl(tmp_path / "out/stats.jsonl")]
    report = read_report(tmp_path)
    assert stats.count("given") == 40 and report["written"] + sum(report["dropped"].values()) == 14
    assert report["dropped"]["no question"] == 8, "one question fits the caption, and the first image has it already"
    generator = MGMGenerator(project / "base", project / "pretrain", "cpu")
    for row in (row for name, row in rows.items() if "+" in name):
        image, question = project / "data" / row["images"][0], "What color is the circle?"
        [answer] = generator.answer([image], [question], "gemma", 6, 1)
        assert (row["question"], extract_caption(row["text"])) == (question, answer.strip())


def test_questions_of_the_dataset_need_the_runs_own_model():
    captioner = {"openai_captioning_mapper": {"model": "m"}}
    with pytest.raises(ValueError, match="captioner must be mgm_captioning_mapper"):
        load_ops([{NAME: {"captioner": captioner, "questions": "dataset"}}])
    with pytest.raises(ValueError, match="captioner must be one operator"):
        load_ops([{NAME: {"captioner": captioner | {"other": None}}}])


def test_held_out_questions_are_recognized_with_their_answer():
    long = "What is the name of the station on the blue sign?"
    rows = [{"image": "a.png", "questions": [{"question": long, "answer": answer} for answer in ("Union.", "?")]}]
    questions = EvaluationQuestions(rows)
    assert questions.has(f" {long.upper()} ", "union") and not questions.has(long, "central")
    assert questions.has(f"{long}\nAnswer in one word.", "union")
    assert not questions.has(long, "!"), "an answer without a word is none"
    assert not EvaluationQuestions([*rows, rows[0] | {"image": "b.png"}]).has(long, "union")
