"""Search for specific questions of benchmarks in training conversations."""

import json

import pytest
from PIL import Image

import find_leaks
import write_jsonl as write_jsonl_script
from dj2mgm.data.formats import build_conversation, build_dj_text
from dj2mgm.evaluation.groups import read_leaked_ids
from dj2mgm.features.challenge.challenge_questions import QuestionSearch
from dj2mgm.storage.files import read_json, read_jsonl, write_json, write_json_list, write_jsonl, write_yaml
from run_main import run_main

LONG = "What is the name of the station on the blue sign?"
INSTRUCTION = "Answer the question using a single word or phrase."


def ask(questions, *turns) -> list[str]:
    """Return the leaked ids of questions (id, image, question, answers) in a conversation of these turns."""
    search = QuestionSearch({})
    for identifier, image, question, answers in questions:
        search.add("b", {"id": identifier, "image": image}, question, answers)
    values = [{"value": value} for turn in turns for value in turn]
    return search.find_questions(values).get("b", [])


def test_a_question_leaks_only_with_its_answer():
    questions = [("1", "a.jpg", LONG, ["Union Station", "union"])]
    assert ask(questions, (f"<image>\n{LONG}\n{INSTRUCTION}", "Union")) == ["1"]
    assert ask(questions, (f"{LONG}\n<image>", "union station.")) == ["1"]
    assert ask(questions, ("Who is it?", "me"), ("what IS the name of the  station, on the 'blue' sign", "UNION")) == [
        "1"
    ]
    assert ask(questions, (LONG, "Grand Central")) == []
    assert ask(questions, (f"In one word: {LONG}", "union")) == []


def test_generic_questions_are_not_leaks():
    assert ask([("1", "a.jpg", "What color is it?", ["red"])], ("What color is it?", "red")) == []
    seven, eight = "What is the color of the car?", "What is the color of the parked car?"
    assert ask([("1", "a.jpg", seven, ["red"])], (seven, "red")) == []
    assert ask([("1", "a.jpg", eight, ["red"])], (eight, "red")) == ["1"]
    of_two_images = [("1", "a.jpg", LONG, ["union"]), ("2", "b.jpg", LONG, ["central"])]
    assert ask(of_two_images, (LONG, "union")) == []
    rotations = [("1", b"image", LONG, ["A", "union"]), ("1000001", b"image", LONG, ["B", "union"])]
    assert ask(rotations, (LONG, "union")) == ["1", "1000001"] and ask(rotations, (LONG, "B")) == ["1000001"]
    assert ask([("1", "a.jpg", LONG, ["?"])], (LONG, "!")) == [], "an answer without a word is none"


@pytest.fixture
def dataset(tmp_path):
    """Write two pairs and four instructions; two instructions are a benchmark's questions about other images."""
    for at, color in enumerate(("red", "blue")):
        Image.new("RGB", (32, 32), color).save(tmp_path / f"{at}.png")
    Image.radial_gradient("L").convert("RGB").save(tmp_path / "asked.jpg")
    pairs = [{"id": str(at), "text": build_dj_text("a"), "images": [f"{at}.png"]} for at in range(2)]
    write_jsonl(tmp_path / "data/pretrain.jsonl", pairs)
    text_only = {"id": "t", "conversations": build_conversation("t", "0.png", LONG, "union")["conversations"]}
    text_only["conversations"][0]["value"] = LONG
    instructions = [
        build_conversation("0", "0.png", f"{LONG}\n{INSTRUCTION}", "Union"),
        build_conversation("1", "1.png", LONG, "central"),
        build_conversation("2", "1.png", "What color is it?", "red"),
        text_only,
    ]
    write_json_list(tmp_path / "data/finetune.json", instructions)
    write_jsonl(tmp_path / "data/evaluation.jsonl", [{"id": "e", "image": "asked.jpg", "captions": ["a"]}])
    questions = [(LONG, 7, "union"), ("What color is it?", 8, "red")]
    prompts = [{"question_id": "asked", "image": "asked.jpg", "text": f"{q}\n{INSTRUCTION}"} for q, _, _ in questions]
    write_jsonl(tmp_path / "questions.jsonl", prompts)
    truth = [{"question_id": n, "image_id": "asked", "question": q, "answers": [a] * 10} for q, n, a in questions]
    write_json(tmp_path / "answers.json", {"data": truth})
    files = {"questions": "questions.jsonl", "answers": "answers.json", "images": "."}
    roots = dict.fromkeys(("pretrain_images", "finetune_images", "evaluation_images"), str(tmp_path))
    files = {key: str(tmp_path / name) for key, name in files.items()}
    write_yaml(tmp_path / "config.yaml", roots | {"benchmarks": {"textvqa": files}, "folders": [], "cpu_threads": 1})
    return tmp_path


def run(capsys, script, **flags) -> None:
    arguments = [part for flag, value in flags.items() for part in (f"--{flag.replace('_', '-')}", str(value))]
    done = run_main(script, *arguments, capture=capsys)
    assert done.status == 0, done.stderr


def test_leaked_instructions_are_listed_counted_and_omitted(dataset, capsys):
    leaks = dataset / "leaks/leaks.jsonl"
    run(capsys, find_leaks, config=dataset / "config.yaml", dataset=dataset / "data", output_dir=leaks.parent)
    assert list(read_jsonl(leaks)) == [
        {"split": "finetune", "row": name, "of": "textvqa", "ids": ["7"]} for name in ("0", "t")
    ]
    assert read_json(leaks.parent / "summary.json")["textvqa"] == {
        **{"references": 1, "leaked": 0, "questions": 0, "training_images": 0, "training_rows": 0},
        **{"texts": 2, "leaked_texts": 1, "text_rows": 2},
    }
    assert read_leaked_ids(leaks, "textvqa") == {"7"}

    roots = dict.fromkeys(("pretrain_images", "finetune_images", "evaluation_images"), str(dataset))
    settings = {"on_bad_row": "refuse", "max_samples": 9, "leaks": "drop", "seed": 0, "cpu_threads": 1, "sources": {}}
    write_yaml(dataset / "jsonl.yaml", roots | settings | {"question": "", "control_tokens": []})
    flags = {"config": dataset / "jsonl.yaml", "evaluation": dataset / "data/evaluation.jsonl"}
    flags |= {"pairs": dataset / "data/pretrain.jsonl", "instructions": dataset / "data/finetune.json"}
    run(capsys, write_jsonl_script, **flags, output_dir=dataset / "complete")
    run(capsys, write_jsonl_script, **flags, leaks=leaks, output_dir=dataset / "dropped")
    complete, dropped = (read_json(dataset / name / "summary.json") for name in ("complete", "dropped"))
    assert complete["finetune"]["rows_out"] == 4
    assert dropped["finetune"]["dropped"] == {"leaked_text": 2} and dropped["finetune"]["rows_out"] == 2
    assert dropped["pretrain"] == complete["pretrain"], "the pair with the id of an instruction that leaks stays"
    rows = [json.loads(line)["id"] for line in (dataset / "dropped/finetune.jsonl").read_text().splitlines()]
    assert rows == ["1", "2"]
