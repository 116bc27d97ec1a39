"""lmms-eval's tasks from local files: questions, answers of tiny models, and metrics.

lmms-eval runs in a separate process, because it changes how Pillow reads images.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import Sequence, Value
from PIL import Image

from benchmark_files import make_mmbench_row, make_textvqa_question, make_textvqa_truth, write_mmbench, write_rows
from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import estimate_metrics
from dj2mgm.evaluation.intervals import Measurements
from dj2mgm.features.challenge.benchmarks import load_benchmark, read_questions
from dj2mgm.features.lmms_eval.exchange import CUTTING_CLASSES, cut_answer, find_stop_texts, save_once
from dj2mgm.features.lmms_eval.lmms_eval_keys import LMMS_EVAL, find_evaluation_data
from dj2mgm.features.lmms_eval.lmms_tasks import MAX_UNITS, compute_pseudo_values
from dj2mgm.storage.files import read_json, read_jsonl, write_json, write_jsonl, write_yaml
from dj2mgm.training.outputs import gather_weights, save_projector
from evaluation_files import TASKS, TEXT, color, draw_picture, write_evaluations, write_task
from paths import PROJECT
from tiny_families import BUILDERS
from tiny_models import save_image, tiny_mgm, tiny_processor

QUESTIONS = 200
IMAGES = 6
RIGHT = {"own": 4, "shuffled": 2, "none": 0}  # answers to OCRBench
REFUSED = [  # task, data and message
    ("popes", "pope", "lmms-eval has no task 'popes'; did you mean"),
    ("mmbench_en", "pope", "mmbench_en is a group of lmms-eval's tasks; name its tasks instead"),
    ("mmstar", "pope", "pope is not the data of the task mmstar with the split val"),
    ("pope", "empty", "empty is not the data of the task pope with the split test"),
]
TWO_PARAGRAPHS = "It shows the leaf.\n\nThe answer is B. ASSISTANT: none"
WORDS = ["red", "blue", "two", "dakota", "coca cola", "12:30", "nous les gosses"]
needs_lmms_eval = pytest.mark.skipif(
    not (LMMS_EVAL / "lmms_eval").is_dir(), reason="lmms-eval is not installed: `make lmms_eval` does it"
)


def test_16_bit_images_have_the_levels_of_training(tmp_path):
    gray = Image.fromarray(np.full((4, 4), 2**15, dtype=np.uint16))
    shown = np.asarray(Image.open(save_once(gray, tmp_path)))
    assert shown.shape == (4, 4, 3) and np.unique(shown).tolist() == [128]


def run_scripts(commands: list[list], folder: Path, *program: str, ok: bool = True) -> subprocess.CompletedProcess:
    program = program or (str(PROJECT / "tests/support/run_scripts.py"),)
    arguments = [json.dumps([[str(word) for word in command] for command in commands])] if commands else []
    packages = os.pathsep.join([str(PROJECT / "workflow_scripts"), str(LMMS_EVAL)])
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        env=os.environ | {"PYTHONPATH": packages, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == ok, (done.stdout + done.stderr)[-4000:]
    return done


def vary_answer(word: str, rng: random.Random) -> str:
    """Return a variant of an answer that normalization reverts."""
    return rng.choice([word, word.upper(), f"the {word}", f"{word}.", f" {word} ", word.replace("two", "2")])


def write_textvqa_twice(folder: Path, data: Path, rng: random.Random) -> tuple[dict, list[str]]:
    """Write questions in this workflow's files and in lmms-eval's columns, and answers to them."""
    rows, questions, truth, predictions = [], [], [], []
    for number in range(QUESTIONS):
        image, question = f"im{number % 20}", f"what is number {number}?"
        right = rng.choice(WORDS)
        answers = [vary_answer(right, rng) if rng.random() < 0.4 else rng.choice(WORDS) for _ in range(10)]
        predictions.append(vary_answer(rng.choice([right, right, *WORDS]), rng))
        save_image(folder / f"{image}.png")
        questions.append(make_textvqa_question(image, question, ocr=None))
        truth.append(make_textvqa_truth(number, image, question, answers))
        row = {"question_id": str(number), "image_id": image, "question": question, "image": draw_picture(number % 20)}
        rows.append(row | {"answers": answers, "ocr_tokens": [], "answer": answers[0]})
    write_rows(folder / "questions.jsonl", questions)
    (folder / "answers.json").write_text(json.dumps({"data": truth}), encoding="utf-8")
    features = dict.fromkeys(("question_id", "image_id", "question", "answer"), TEXT)
    write_task(data, "validation", rows, features | dict.fromkeys(("answers", "ocr_tokens"), Sequence(TEXT)))
    files = {"questions": f"{folder}/questions.jsonl", "answers": f"{folder}/answers.json", "images": str(folder)}
    return files, predictions


def write_mmbench_twice(folder: Path, data: Path, rng: random.Random) -> tuple[dict, list[str]]:
    table, predictions = [], []
    for turn in (0, 1_000_000):
        for number in range(QUESTIONS // 2):
            answer = rng.choice("AB")
            options = {"A": "blue", "B": "red"} if number % 2 else {"A": "a cat", "B": "two dogs"}
            table.append(make_mmbench_row(number + turn, answer, **options, category=f"category {number % 3}"))
            choice = answer if rng.random() < 0.7 else rng.choice("AB")
            text = options[choice]
            predictions.append(
                rng.choice([choice, f"{choice}.", f"({choice})", f"{choice}. {text}", f"({choice}) {text}", text])
            )
    keys = {"l2-category": "L2-category"}
    rows = [{keys.get(key, key): value or "nan" for key, value in row.items()} for row in table]
    rows = [row | {"index": int(row["index"]), "image": draw_picture(0)} for row in rows]
    features = dict.fromkeys(rows[0].keys() - {"index", "image"}, TEXT)
    write_task(data, "dev", rows, features | {"index": Value("int64")})
    return write_mmbench(folder / "mmbench.tsv", table), predictions


def make_partly_right_answers(right: dict[str, int]) -> list[dict]:
    """Return answers to OCRBench's questions; the first `count` are right."""
    return [
        {
            "id": str(n),
            "image": f"{n}.png",
            "model": "finetune",
            "images": images,
            "prediction": color(n) if n < count else "nothing",
        }
        for images, count in right.items()
        for n in range(IMAGES)
    ]


def make_answer_rows(questions: list[dict], predictions: list[str]) -> list[dict]:
    return [
        row | {"model": "finetune", "images": "own", "prediction": text}
        for row, text in zip(questions, predictions, strict=True)
    ]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    """Run four tasks with a tiny MGM, and two benchmarks of this workflow with given answers."""
    root = tmp_path_factory.mktemp("evaluated")
    data, commands, rng = write_evaluations(root / "data", IMAGES), [], random.Random(7)
    model = tiny_mgm()
    model.save_pretrained(root / "mgm")
    tiny_processor().save_pretrained(root / "mgm")
    trained = {n: p for n, p in model.named_parameters() if ".projector." in n or ".patch_info_mining." in n}
    save_projector(model, gather_weights(trained), root / "finetune")
    (root / "files").mkdir()
    ours = {
        "textvqa": ("textvqa_val", *write_textvqa_twice(root / "files", data / "textvqa_val", rng)),
        "mmbench": ("mmbench_en_dev", *write_mmbench_twice(root / "files", data / "mmbench_en_dev", rng)),
    }
    for benchmark, (task, files, predictions) in ours.items():
        rows = list(read_questions(benchmark, files))
        answered = [row | {"prediction": text} for row, text in zip(rows, predictions, strict=True)]
        write_json(root / task / "ours.json", estimate_metrics(load_benchmark(benchmark).measure(answered))["score"])
        questions = [{"id": str(number), "image": "one.png"} for number in range(len(rows))]
        write_jsonl(root / task / "answers.jsonl", make_answer_rows(questions, predictions))
    settings = {"seed": 3, "template": "gemma", "gpus": 1, "cpu_threads": 1}
    write_yaml(root / "answer.yaml", settings | {"decoding": {"batch_size": 8, "max_new_tokens": 6}})
    for task in (*TASKS, *(task for task, *_ in ours.values())):
        folder = root / task
        write_yaml(folder / "config.yaml", {"task": task, "data": str(data / task)})
        commands.append(["read_evaluation.py", "--config", folder / "config.yaml", "--output-dir", folder])
        if task in TASKS:
            answer = ["answer_evaluation.py", "--config", root / "answer.yaml", "--questions", folder]
            answer += ["--model", root / "mgm", "--finetuned", root / "finetune", "--output-dir", folder]
            commands.append(answer)
        score = ["score_evaluation.py", "--config", folder / "config.yaml", "--answers", folder / "answers.jsonl"]
        commands.append([*score, "--output-dir", folder])
    write_jsonl(root / "partly.jsonl", make_partly_right_answers(RIGHT))
    score = ["score_evaluation.py", "--config", root / "ocrbench/config.yaml", "--answers", root / "partly.jsonl"]
    commands.append([*score, "--output-dir", root / "partly"])
    (data / "empty").mkdir()
    for number, (task, folder, _) in enumerate(REFUSED):
        config = root / f"refused {number}.yaml"
        write_yaml(config, {"task": task, "data": str(data / folder)})
        commands.append(["read_evaluation.py", "--config", config, "--output-dir", root / "nothing"])
    (root / "refused.txt").write_text(run_scripts(commands, root, ok=False).stderr)
    return root


@needs_lmms_eval
@pytest.mark.parametrize(
    ("task", "metric", "unit"), [("textvqa_val", "exact_match", 100), ("mmbench_en_dev", "gpt_eval_score", 1)]
)
def test_lmms_eval_and_this_workflow_give_equal_scores(evaluated, task, metric, unit):
    theirs = read_json(evaluated / task / "metrics.json")["groups"]["finetune/own"][f"{task}/{metric}"]
    own = read_json(evaluated / task / "ours.json")
    assert 20 < own["mean"] < 80
    assert abs(unit * theirs["mean"] - own["mean"]) < 0.1, "points of 100"


@needs_lmms_eval
@pytest.mark.parametrize("task", TASKS)
def test_questions_are_answered_with_own_other_and_no_image(evaluated, task):
    questions = list(read_jsonl(evaluated / task / "questions.jsonl"))
    answers = list(read_jsonl(evaluated / task / "answers.jsonl"))
    for images in ("own", "shuffled", "none"):
        rows = [row for row in answers if row["images"] == images]
        assert [{key: row[key] for key in ("id", "image", "prompt")} for row in rows] == questions
    assert len({row["image"] for row in questions}) == IMAGES
    assert all((evaluated / task / row["image"]).is_file() for row in questions)
    groups = read_json(evaluated / task / "metrics.json")["groups"]
    assert set(groups) == {f"finetune/{images}" for images in ("own", "shuffled", "none", "difference")}
    for name, own in groups["finetune/own"].items():
        others = [groups[f"finetune/{images}"][name] for images in ("shuffled", "difference", "none")]
        assert own["mean"] - others[0]["mean"] == pytest.approx(others[1]["mean"])
        assert all(other["images"] == own["images"] and other["n"] == own["n"] for other in others)


@needs_lmms_eval
def test_metrics_equal_their_definition(evaluated):
    """Compute POPE's metrics from the answers."""
    data = evaluated / "data/pope"
    truth = ["yes" if number % 2 == 0 else "no" for number in range(2 * IMAGES)]  # in the order of the data
    groups = read_json(evaluated / "pope/metrics.json")["groups"]
    for images in ("own", "shuffled", "none"):
        rows = [row for row in read_jsonl(evaluated / "pope/answers.jsonl") if row["images"] == images]
        right = [row["prediction"].lower() == answer for row, answer in zip(rows, truth, strict=True)]
        assert groups[f"finetune/{images}"]["pope/pope_accuracy"]["mean"] == pytest.approx(sum(right) / len(right))
    assert data.is_dir() and groups["finetune/own"]["pope/pope_yes_ratio"]["mean"] == pytest.approx(0.5)


@needs_lmms_eval
def test_metric_with_module_state_is_computed_per_group(evaluated):
    """OCRBench counts right answers in a module variable, which must not carry over."""
    groups = read_json(evaluated / "partly/metrics.json")["groups"]
    for images, count in RIGHT.items():
        assert groups[f"finetune/{images}"]["ocrbench/ocrbench_accuracy"]["mean"] == pytest.approx(count / 1000)


@pytest.mark.slow  # the tests above compare the metrics without lmms-eval's command
@needs_lmms_eval
def test_lmms_evals_command_has_the_same_metrics(evaluated, tmp_path):
    """lmms-eval finds `--model dj2mgm` by its entry point and gets the same answers as the rule."""
    source = LMMS_EVAL / "lmms_eval/tasks/pope/pope.yaml"
    text = f"include: {source}\ntask: pope_here\ndataset_path: {evaluated}/data/pope\ndataset_kwargs: {{}}\n"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/pope_here.yaml").write_text(text)
    model = f"model={evaluated}/mgm,finetuned={evaluated}/finetune,template=gemma"
    command = ["-m", "lmms_eval", "--model", "dj2mgm", "--model_args", model, "--tasks", "pope_here"]
    command += ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out"), "--log_samples"]
    run_scripts([], tmp_path, *command, "--batch_size", "8", "--device", "cpu")
    [samples] = (tmp_path / "out").rglob("*samples_pope_here.jsonl")
    responses = {str(row["doc_id"]): row["filtered_resps"] for row in read_jsonl(samples)}
    answers = read_jsonl(evaluated / "pope/answers.jsonl")
    assert responses == {row["id"]: row["prediction"] for row in answers if row["images"] == "own"}
    [results] = (tmp_path / "out").rglob("*results.json")
    theirs = read_json(results)["results"]["pope_here"]
    own = read_json(evaluated / "pope/metrics.json")["groups"]["finetune/own"]
    for name, estimate in own.items():
        assert estimate["mean"] == pytest.approx(theirs[f"{name.removeprefix('pope/')},none"])


@pytest.fixture(scope="module")
def returned_by_classes() -> dict[str, str]:
    """Return the answers of lmms-eval's own class for each type of models to `TWO_PARAGRAPHS`."""
    until = json.dumps(["\n\n", "ASSISTANT:"])
    done = run_scripts([], PROJECT, str(PROJECT / "tests/support/lmms_classes.py"), TWO_PARAGRAPHS, until)
    return json.loads(done.stdout.splitlines()[-1])


@needs_lmms_eval
@pytest.mark.parametrize("kind", [*BUILDERS, "mgm", "qwen2_vl", "glm4v", "llama4", "gemma4"])
def test_answers_are_cut_like_lmms_evals_own_classes(returned_by_classes, tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    ends = find_stop_texts(tmp_path, ["\n\n", "ASSISTANT:"])
    assert cut_answer(TWO_PARAGRAPHS, ends) == returned_by_classes[kind].strip()
    assert set(CUTTING_CLASSES) <= set(returned_by_classes)


@needs_lmms_eval
def test_a_second_paragraph_of_an_answer_is_scored(evaluated, tmp_path):
    """A task without `until` gets a blank line, at which few of lmms-eval's classes cut."""
    until = read_json(evaluated / "ocrbench/decoding.json")["until"]
    assert until == ["\n\n"]
    answer = f"It shows a word.\n\nThe word is {color(0)}."
    for kind, whole in (("mgm", True), ("gemma3", True), ("qwen2_vl", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert (color(0) in cut_answer(answer, find_stop_texts(tmp_path, until))) == whole


@needs_lmms_eval
def test_wrong_tasks_and_data_are_refused_in_a_sentence(evaluated):
    printed = [line for line in (evaluated / "refused.txt").read_text().splitlines() if line.startswith("error")]
    for line, (_, _, message) in zip(printed, REFUSED, strict=True):
        assert message in line


@pytest.mark.parametrize("counts", [[1] * 7, [1, 4, 2, 9, 1, 1, 3]])
def test_pseudo_values_of_a_mean_are_the_values(counts):
    rng = random.Random(3)
    images = [f"{image}" for image, count in enumerate(counts) for _ in range(count)]
    values = [rng.random() for _ in images]
    sums = compute_pseudo_values(lambda items: sum(items) / len(items), values, images)
    units, totals, numbers = Measurements.from_values(values, images).sum_by_unit()
    assert {unit: tuple(pair) for unit, pair in sums.items()} == {
        unit: (pytest.approx(total), number) for unit, total, number in zip(units, totals, numbers, strict=True)
    }


def test_pseudo_values_keep_mean_and_jackknife():
    rng, counts = random.Random(4), [1, 2, 3, 2, 1, 4, 2, 2]
    images = [f"{image}" for image, count in enumerate(counts) for _ in range(count)]
    items = [(rng.random() < 0.5, rng.random() < 0.5) for _ in images]

    def f1(pairs: list) -> float:
        both = sum(predicted and true for predicted, true in pairs)
        return 2 * both / max(1, sum(predicted + true for predicted, true in pairs))

    sums = compute_pseudo_values(f1, items, images)
    total = sum(count for _, count in sums.values())
    mean = sum(value for value, _ in sums.values()) / total
    assert mean == pytest.approx(f1(items)) and total == len(items)
    for image, (value, count) in sums.items():
        rest = f1([item for item, of in zip(items, images, strict=True) if of != image])
        left_out = (sum(v for v, _ in sums.values()) - value) / (total - count)
        assert left_out - mean == pytest.approx(rest - mean, abs=0.02), "but for the figure's bias"


def test_many_images_are_left_out_in_groups():
    calls = []
    images = [str(number) for number in range(3 * MAX_UNITS) for _ in range(2)]
    sums = compute_pseudo_values(lambda items: calls.append(1) or sum(items) / len(items), [1.0] * len(images), images)
    assert len(sums) == MAX_UNITS and len(calls) == MAX_UNITS + 1
    assert all(pair == [pytest.approx(6.0), 6] for pair in sums.values())


def test_answers_end_at_the_stop_strings_of_a_task(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    assert cut_answer(" yes\n\nNo, wait ", find_stop_texts(tmp_path, "\n\n")) == "yes"
    assert cut_answer("red ASSISTANT: blue\n\n", find_stop_texts(tmp_path, ["ASSISTANT:", ""])) == "red"
    assert find_stop_texts(tmp_path, None) == []


def test_missing_data_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(InputError, match="the data of pope are missing. Set evaluation_data"):
        find_evaluation_data("pope", None)
    with pytest.raises(InputError, match="there is no folder .*/pope with the data of pope"):
        find_evaluation_data("pope", str(tmp_path))
