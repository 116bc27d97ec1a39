"""Stages from benchmark files to the challenge's table, with a tiny random model."""

import shutil
import sys
from pathlib import Path

import openpyxl
import pandas as pd
import pytest

import answer_benchmark
import score_benchmark
import score_challenge
import write_submission
from benchmark_files import make_circular_rows, make_mmbench_row, write_mmbench, write_rows, write_textvqa
from dj2mgm.errors import InputError
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.features.challenge import benchmarks, challenge_keys
from dj2mgm.features.challenge.benchmarks.mmbench import build_workbook
from dj2mgm.features.challenge.benchmarks.textvqa import compute_vqa_accuracy
from dj2mgm.features.challenge.challenge_keys import ChallengeSettings
from dj2mgm.features.challenge.challenge_stages import build_benchmark_settings
from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from dj2mgm.runs.layers import merge_experiment
from dj2mgm.script_modules import find_modules
from dj2mgm.settings.validation import validate_settings
from dj2mgm.storage.files import read_json, read_jsonl, write_json, write_jsonl, write_yaml
from paths import PROJECT
from tiny_captioners import save_tiny_mgm
from tiny_models import save_image


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Path]:
    """Return the folders of an assembled model and of a trained stage."""
    return save_tiny_mgm(tmp_path_factory.mktemp("model"))


def run(monkeypatch, module, **flags: Path) -> None:
    arguments = [text for flag, value in flags.items() for text in (f"--{flag.replace('_', '-')}", str(value))]
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments])
    module.main()


def answer(monkeypatch, model, benchmark: str, files: dict, output: Path) -> list[dict]:
    settings = {"benchmark": benchmark, "files": files, "template": "gemma", "gpus": 1, "cpu_threads": 1}
    settings["decoding"] = {"batch_size": 2, "max_new_tokens": 5}
    write_yaml(output / "config.yaml", settings)
    folders = {"model": model[0], "finetuned": model[1], "output_dir": output}
    run(monkeypatch, answer_benchmark, config=output / "config.yaml", **folders)
    return list(read_jsonl(output / "answers.jsonl"))


def score(monkeypatch, folder: Path) -> dict:
    run(monkeypatch, score_benchmark, answers=folder / "answers.jsonl", output_dir=folder)
    return read_json(folder / "metrics.json")


def test_textvqa_from_files_to_score(monkeypatch, model, tmp_path):
    files = write_textvqa(tmp_path / "data")
    rows = answer(monkeypatch, model, "textvqa", files, tmp_path / "out")
    generator = MGMGenerator(*model)
    images = [Path(files["images"]) / f"{row['image_id']}.png" for row in rows]
    expected = generator.answer(images, [row["prompt"] for row in rows], "gemma", 5, 1)
    assert [row["prediction"] for row in rows] == list(expected)
    expected = generator.answer([None] * 3, [row["prompt"] for row in rows], "gemma", 5, 1)
    assert [row["blind_prediction"] for row in rows] == list(expected)
    metrics = score(monkeypatch, tmp_path / "out")
    assert (metrics["benchmark"], metrics["variant"], metrics["counts"]["answers"]) == ("textvqa", "ocr_tokens", 3)

    answers = ["Red", "two", "blue."]  # 10, 2 + 1 (written "2") and 1 of ten agree
    rows = [row | {"prediction": text, "blind_prediction": "red"} for row, text in zip(rows, answers, strict=True)]
    write_jsonl(tmp_path / "out/answers.jsonl", rows)
    metrics = score(monkeypatch, tmp_path / "out")
    estimate = metrics["estimates"]["score"]
    assert metrics["without_image"]["estimates"]["score"]["mean"] == pytest.approx(100 / 3)
    assert estimate["n"] == 3 and estimate["mean"] == pytest.approx((100 + 90 + 30) / 3)
    assert estimate["low"] <= estimate["mean"] <= estimate["high"]
    assert compute_vqa_accuracy(answers[1], rows[1]["answers"]) == 0.9

    leak = {"image": "a.png", "of": "textvqa", "ids": [rows[2]["id"]], "bits": 0}
    write_jsonl(tmp_path / "leaks.jsonl", [leak, leak | {"of": "held_out", "ids": [rows[0]["id"]]}])
    flags = {"answers": tmp_path / "out/answers.jsonl", "leaks": tmp_path / "leaks.jsonl", "output_dir": tmp_path}
    run(monkeypatch, score_benchmark, **flags)
    scored = read_json(tmp_path / "metrics.json")
    assert scored["estimates"]["score"] == estimate
    assert scored["without_leaked"]["counts"]["answers"] == 2
    assert scored["without_leaked"]["estimates"]["score"]["mean"] == pytest.approx((100 + 90) / 2)


def test_mmbench_from_file_to_score_and_submission(monkeypatch, model, tmp_path, capsys):
    files = write_mmbench(tmp_path / "mmbench.tsv", make_circular_rows())
    rows = answer(monkeypatch, model, "mmbench", files, tmp_path / "out")
    assert [row["id"] for row in rows] == ["241", "252", "1000241", "1000252"]
    assert rows[0]["prediction"] and rows[0]["prediction"] != rows[1]["prediction"], "images matter to the random model"
    answers = ["B", "B.", "A", "= B"]
    write_jsonl(tmp_path / "out/answers.jsonl", [row | {"prediction": p} for row, p in zip(rows, answers, strict=True)])
    metrics = score(monkeypatch, tmp_path / "out")
    assert metrics["variant"] == "circular" and metrics["counts"] == {"answers": 4, "empty": 0, "unreadable": 1}
    assert {name: value["mean"] for name, value in metrics["estimates"].items()} == {
        "score": 50,
        "l2_category/finegrained_perception (instance-level)": 50,
        "category/attribute_recognition": 100,
        "category/image_style": 0,
    }
    assert (metrics["estimates"]["score"]["n"], metrics["estimates"]["score"]["images"]) == (2, 2)

    write_jsonl(tmp_path / "leaks.jsonl", [{"split": "finetune", "row": "t", "of": "mmbench", "ids": ["1000252"]}])
    flags = {"answers": tmp_path / "out/answers.jsonl", "leaks": tmp_path / "leaks.jsonl", "output_dir": tmp_path}
    capsys.readouterr()
    run(monkeypatch, score_benchmark, **flags)
    assert "2 answers to questions whose image and text are not in the training data" in capsys.readouterr().out
    rest = read_json(tmp_path / "metrics.json")["without_leaked"]
    assert rest["counts"]["answers"] == 2, "the question is left out with all its rotations"
    assert rest["estimates"]["score"]["mean"] == 100 and "category/image_style" not in rest["estimates"]
    run(monkeypatch, write_submission, answers=tmp_path / "out/answers.jsonl", output_dir=tmp_path / "out")
    sheet = openpyxl.load_workbook(tmp_path / "out/submission.xlsx").active
    header, *lines = sheet.iter_rows(values_only=True)
    assert header == ("index", "question", "A", "B", "C", "D", "prediction", "answer", "split")
    assert lines[3] == (1000252, 'Which is "red"?', "red", "blue", None, None, "= B", "A", "dev")
    assert [line[6] for line in lines] == answers and sheet["G5"].data_type == "s", "no formula"


def test_questions_without_answers_are_submitted_unscored(monkeypatch, model, tmp_path, capsys):
    files = write_mmbench(tmp_path / "mmbench.tsv", [make_mmbench_row(1, answer="")])
    answer(monkeypatch, model, "mmbench", files, tmp_path)
    metrics = score(monkeypatch, tmp_path)
    assert metrics["estimates"] == {} and metrics["counts"]["answers"] == 1
    assert "submission.xlsx" in capsys.readouterr().out
    run(monkeypatch, write_submission, answers=tmp_path / "answers.jsonl", output_dir=tmp_path)
    assert (tmp_path / "submission.xlsx").is_file()
    row = {"index": 1, "question": "?", "options": {"A": "x"}, "prediction": "A\x00\x07", "answer": None, "split": ""}
    assert build_workbook([row]).active["G2"].value == "A", "invalid characters of spreadsheets are left out"


def test_an_invalid_row_is_reported_before_the_model_loads(monkeypatch, tmp_path, capsys):
    files = write_mmbench(tmp_path / "mmbench.tsv", [make_mmbench_row(1), make_mmbench_row(1)])
    with pytest.raises(SystemExit) as stop:
        answer(monkeypatch, (tmp_path / "no model", tmp_path / "none"), "mmbench", files, tmp_path)
    assert stop.value.code == 2 and "row 2: id '1' is already the id of row 1" in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()


REFERENCE = {
    "reference": "MGM-2B",
    "scores": {"textvqa": {"score": 50.0, "variant": "ocr_tokens"}, "mmbench": {"score": 60, "variant": "circular"}},
}


def scored_run(folder: Path, experiment: str, seed: int, *scores: float, **variants: str) -> dict:
    """Return an entry of the challenge's configuration, and write its metrics."""
    for name, value in zip(("textvqa", "mmbench"), scores, strict=True):
        variant = variants.get(name, REFERENCE["scores"][name]["variant"])
        metrics = {"benchmark": name, "variant": variant, "estimates": {"score": Estimate(9, 9, 1, value, None, None)}}
        write_json(folder / experiment / str(seed) / name / "metrics.json", metrics)
    benchmarks = {name: str(folder / experiment / str(seed) / name) for name in ("textvqa", "mmbench")}
    return {"experiment": experiment, "seed": seed, "benchmarks": benchmarks}


def challenge(monkeypatch, folder: Path, runs: list[dict]) -> pd.DataFrame:
    write_yaml(folder / "config.yaml", REFERENCE | {"runs": runs})
    run(monkeypatch, score_challenge, config=folder / "config.yaml", output_dir=folder)
    return pd.read_csv(folder / "challenge.csv")


def test_the_challenges_score_is_the_mean_of_the_ratios(monkeypatch, tmp_path):
    runs = [
        scored_run(tmp_path, "baseline", 0, 25, 60),
        scored_run(tmp_path, "dj_synth", 0, 50, 90),
        scored_run(tmp_path, "dj_synth", 1, 60, 60),
    ]
    table = challenge(monkeypatch, tmp_path, runs)
    assert list(table.columns) == [
        *("experiment", "seed", "textvqa", "textvqa_ratio", "mmbench", "mmbench_ratio", "challenge_score")
    ]
    assert table["experiment"].tolist() == ["MGM-2B", "baseline", *["dj_synth"] * 4]
    assert table["seed"].tolist() == ["reference", "0", "0", "1", "mean", "standard deviation"]
    assert table["challenge_score"].tolist() == pytest.approx([1, 0.75, 1.25, 1.1, 1.175, 0.15 / 2**0.5], abs=1e-6)
    assert table["mmbench_ratio"].tolist() == pytest.approx([1, 1, 1.5, 1, 1.25, 0.5 / 2**0.5], abs=1e-6)


def test_scores_of_different_variants_are_not_combined(monkeypatch, tmp_path, capsys):
    runs = [scored_run(tmp_path, "baseline", 0, 25, 60), scored_run(tmp_path, "mine", 0, 50, 90, mmbench="single")]
    with pytest.raises(SystemExit):
        challenge(monkeypatch, tmp_path, runs)
    path = Path(runs[1]["benchmarks"]["mmbench"]) / "metrics.json"
    message = capsys.readouterr().err
    assert "mmbench was run in the variant single" in message and str(path) in message
    write_json(path, read_json(path) | {"estimates": {}, "variant": "circular"})
    with pytest.raises(SystemExit):
        challenge(monkeypatch, tmp_path, runs)
    assert "mmbench has no score, because its file has no answers" in capsys.readouterr().err
    assert not (tmp_path / "challenge.csv").exists()


# A third benchmark


@pytest.fixture
def yes_no(tmp_path, monkeypatch) -> dict[str, str]:
    """Install the documented example as a benchmark and return its `files`."""
    folder = tmp_path / "benchmarks"
    shutil.copytree(challenge_keys.MODULES, folder)
    shutil.copy(PROJECT / "docs/examples/benchmark.py", folder / "yes_no.py")
    monkeypatch.setattr(challenge_keys, "MODULES", folder)
    monkeypatch.setattr(benchmarks, "__path__", [str(folder)])
    yield write_yes_no(tmp_path / "data")
    sys.modules.pop("dj2mgm.features.challenge.benchmarks.yes_no", None)


def write_yes_no(folder: Path) -> dict[str, str]:
    answers = {"Is it red?": "yes", "Is it blue?": "no", "Is it round?": "no"}
    rows = [
        {"id": str(number), "image": "a.png", "question": question, "answer": answer}
        for number, (question, answer) in enumerate(answers.items())
    ]
    save_image(folder / "a.png")
    write_rows(folder / "questions.jsonl", rows)
    return {"questions": f"{folder}/questions.jsonl", "images": str(folder)}


def test_a_new_benchmark_needs_only_one_file(monkeypatch, model, tmp_path, yes_no):
    rows = answer(monkeypatch, model, "yes_no", yes_no, tmp_path / "out")
    assert [row["answer"] for row in rows] == ["yes", "no", "no"]
    assert rows[0]["prompt"] == "Is it red?\nAnswer the question using a single word, yes or no."
    answers = ["Yes.", "yes", "perhaps"]
    write_jsonl(tmp_path / "out/answers.jsonl", [row | {"prediction": p} for row, p in zip(rows, answers, strict=True)])
    metrics = score(monkeypatch, tmp_path / "out")
    assert (metrics["benchmark"], metrics["variant"]) == ("yes_no", "one_word")
    assert metrics["counts"] == {"answers": 3, "empty": 0, "unreadable": 1}
    assert metrics["estimates"]["score"]["mean"] == pytest.approx(100 / 3)
    assert metrics["estimates"]["score"]["images"] == 1


def test_a_new_benchmark_can_lack_a_submission(monkeypatch, tmp_path, yes_no, capsys):
    assert (
        not challenge_keys.read_declarations()["yes_no"].has_submission
        and challenge_keys.read_declarations()["mmbench"].has_submission
    )
    write_jsonl(tmp_path / "answers.jsonl", [{"benchmark": "yes_no", "prediction": "yes"}])
    with pytest.raises(SystemExit):
        run(monkeypatch, write_submission, answers=tmp_path / "answers.jsonl", output_dir=tmp_path)
    assert "the benchmark yes_no has no submission" in capsys.readouterr().err


def test_a_misspelt_attribute_of_a_benchmark_is_an_error(yes_no):
    path = challenge_keys.MODULES / "yes_no.py"
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace("count=count", "cuont=count"), encoding="utf-8")
    with pytest.raises(TypeError, match="unexpected keyword argument 'cuont'"):
        benchmarks.load_benchmark("yes_no")
    path = path.rename(path.with_name("misspelt.py"))
    path.write_text(source.replace("files=", "file="), encoding="utf-8")
    with pytest.raises(InputError, match=r"misspelt.py: BENCHMARK = Benchmark\(files=…, variants=…, …\) is missing"):
        challenge_keys.read_declarations()


def test_the_configuration_has_keys_of_a_new_benchmark(yes_no):
    keys, config = challenge_keys.build_keys(), merge_experiment("baseline", {})
    stated = validate_settings(keys, {"benchmarks": {"yes_no": yes_no}}, "config.yaml").benchmarks
    settings = build_benchmark_settings("yes_no", config.model_copy(update={"benchmarks": stated}), {})
    assert (settings.benchmark, settings.files) == ("yes_no", yes_no)
    assert build_benchmark_settings("yes_no", config, {}) is None
    for values, message in [
        ({"benchmarks": {"yes_no": {"question": "q.jsonl", "images": "im"}}}, "question: unknown key; did you mean"),
        ({"benchmarks": {"yes_no": {"questions": "q.jsonl"}}}, "benchmarks.yes_no.images: the key is missing"),
        ({"benchmarks": {"yesno": yes_no}}, "benchmarks.yesno: unknown key; did you mean 'yes_no'"),
        (
            {"challenge": {"scores": {"yes_no": {"score": 50, "variant": "two"}}}},
            "challenge.scores.yes_no.variant: expected one_word, found 'two'",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            validate_settings(keys, values, "config.yaml")
    with pytest.raises(InputError, match="there is no benchmark 'vqa'; known benchmarks are mmbench, textvqa, yes_no"):
        list(benchmarks.read_questions("vqa", {}))


def test_every_benchmark_is_a_module_of_scripts_that_use_one():
    """Benchmarks are imported by name, and a change of one must rerun its rules."""
    for script in ("answer_benchmark.py", "score_benchmark.py", "write_submission.py"):
        assert set(challenge_keys.MODULES.glob("*.py")) < set(find_modules(PROJECT / "workflow_scripts" / script))


def test_challenge_table_has_scores_without_leaks(tmp_path):
    scores = {name: {"score": 50.0, "variant": "v"} for name in ("textvqa", "mmbench")}
    runs = []
    every, unleaked = ({"estimates": {"score": Estimate(9, 9, 1, mean, None, None)}} for mean in (40.0, 30.0))
    for experiment, rest in (("a", {}), ("b", {"without_leaked": unleaked})):
        for name in scores:
            metrics = {"variant": "v"} | every | (rest if name == "mmbench" else {})
            write_json(tmp_path / experiment / name / "metrics.json", metrics)
        folders = {name: str(tmp_path / experiment / name) for name in scores}
        runs.append({"experiment": experiment, "seed": 0, "benchmarks": folders})
    table = score_challenge.tabulate_challenge(ChallengeSettings(reference="r", scores=scores, runs=runs)).set_index(
        "experiment"
    )
    assert "textvqa_without_leaked" not in table and table["challenge_score"].tolist() == [1.0, 0.8, 0.8]
    assert pd.isna(table.loc["r", "mmbench_without_leaked"])
    assert table.loc[["a", "b"], "mmbench_without_leaked"].tolist() == [40.0, 30.0]
