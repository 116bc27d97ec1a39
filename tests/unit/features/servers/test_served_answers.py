"""`check_served_model.py` against a scripted server in this process."""

import json
import sys

import numpy as np
import pytest
from scipy.stats import ttest_1samp

import check_served_model
from dj2mgm.features.servers.served_answers import AskedQuestion, compare_answers
from dj2mgm.runs.all_runs import Runs
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl, write_yaml
from scripted_server import MODEL, Reply, ScriptedServer, caption
from tiny_models import save_image

MODEL_FILE = "tiny-llava"
IMAGES = 6


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """Write the inputs of `serve_check` from a finished dj_synth, and return the folder of its run."""
    monkeypatch.chdir(tmp_path)
    run = Runs({"model": MODEL_FILE}).first_seed("dj_synth")
    folder, dataset = tmp_path / "results" / run.folder, tmp_path / "results/datasets/shapes"
    rows, answers, captions = [], [], []
    for number in range(IMAGES):
        save_image(dataset / f"images/{number}.png", (40 * number, 0, 0))
        question = {"question": f"What is {number}?", "answer": "red", "type": "color"}
        rows.append(
            {"id": str(number), "image": f"images/{number}.png", "captions": ["a red circle"], "questions": [question]}
        )
        for images in ("own", "shuffled"):
            own = {"id": str(number), "image_id": f"images/{number}.png", "model": "finetune", "images": images}
            answers.append(own | question | {"prediction": "red" if number % 2 else "a  blue"})
            captions.append(own | {"caption": "a red circle"})
    write_jsonl(dataset / "evaluation.jsonl", rows)
    (folder / "generate").mkdir(parents=True)
    write_jsonl(folder / "generate/answers.jsonl", answers)
    write_jsonl(folder / "generate/captions.jsonl", captions)
    settings = run.settings["generate"].file_content() | {"image_root": "results/datasets/shapes"}
    write_yaml(folder / "generate/config.yaml", settings)
    return folder


def check(monkeypatch, **config) -> None:
    monkeypatch.setattr(sys, "argv", ["check_served_model.py", "--config", json.dumps({"model": MODEL_FILE} | config)])
    check_served_model.main()


def test_answers_of_a_server_are_compared(finished, monkeypatch, capsys):
    """The server's answer to question 0 differs from the workflow's; all others are equal."""

    def reply(request) -> Reply:
        text = request.body["messages"][0]["content"][1]["text"]
        number = int(text.split()[-1].removesuffix("?"))
        assert request.body["temperature"] == 0 and request.body["max_tokens"] == 40 and request.body["model"] == MODEL
        assert request.image.convert("RGB").tobytes() == shown[number]
        return caption("red" if number == 0 or number % 2 else "a blue")

    shown = {number: read_pixels(number) for number in range(IMAGES)}
    with ScriptedServer(reply) as server:
        check(monkeypatch, endpoint=server.url)
    printed = capsys.readouterr().out
    assert f"{server.url} (model {MODEL}): 83.3 % of 6 answers are identical to dj_synth's" in printed
    assert "served 66.7 %, own 50.0 %, difference +16.7 points (95 % interval -26.2 to +59.5)" in printed
    result = read_json(finished / "serve_check/metrics.json")
    assert result["identical"] == pytest.approx(5 / 6)
    interval = ttest_1samp([1, 0, 0, 0, 0, 0], 0).confidence_interval(0.95)
    difference = result["difference"]["vqa_accuracy"]
    assert (difference["low"], difference["high"]) == pytest.approx(tuple(interval))
    assert [row["served"] for row in read_jsonl(finished / "serve_check/answers.jsonl")][:2] == ["red", "red"]


def read_pixels(number: int) -> bytes:
    from dj2mgm.data.images import load_image

    return load_image(f"results/datasets/shapes/images/{number}.png").tobytes()


def test_captions_are_compared_if_there_are_no_questions(finished, monkeypatch, capsys):
    write_jsonl(finished / "generate/answers.jsonl", [])
    with ScriptedServer(lambda request: caption("a red circle" if request.number > 1 else "a circle")) as server:
        check(monkeypatch, endpoint=server.url)
    assert "83.3 % of 6 captions are identical" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "models", "message"),
    [
        ({"endpoint": None}, ["\x1b[2J<script>"], "no valid name; name a model"),
        ({}, [MODEL], "endpoint: no server is named; add endpoint=http://localhost:8000/v1 to --config"),
        ({"endpoint": None}, [MODEL, "other"], "lists 'tiny', 'other'. Name one of these"),
        ({"endpoint": None, "model": "tiny"}, [MODEL], "trains an MGM, which no server supports"),
        ({"endpoint": None, "experiment": "baseline"}, [MODEL], "run `snakemake baseline` first"),
    ],
)
def test_incomparable_results_are_refused(finished, monkeypatch, capsys, config, models, message):
    with ScriptedServer(lambda request: caption("red"), models=models) as server, pytest.raises(SystemExit):
        check(monkeypatch, **{key: server.url if key == "endpoint" else value for key, value in config.items()})
    assert message in capsys.readouterr().err


def test_line_breaks_are_ignored(tmp_path):
    rows = [{"answer": "x", "type": "t", "image_id": str(number), "prediction": "a\nb "} for number in range(2)]
    questions = [AskedQuestion(tmp_path, "?", row["prediction"], row) for row in rows]
    result = compare_answers(questions, ["a b", "c"])
    assert result["identical"] == 0.5 and np.isclose(result["difference"]["vqa_accuracy"].mean, 0)
