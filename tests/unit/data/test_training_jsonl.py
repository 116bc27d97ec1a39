"""Training files: resolved paths, invalid rows, and the numbers of rows and samples."""

import io
import itertools
import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import write_jsonl
from dj2mgm.data.formats import build_conversation, build_dj_text, read_llava
from dj2mgm.data.images import HeldOutImages
from dj2mgm.data.training_jsonl import _repeat_rows, apportion, convert_pairs, drop_repeats, write_training_jsonl
from dj2mgm.errors import InputError
from dj2mgm.records import JsonlSummary, SourceSamples, TrainingFileCounts
from dj2mgm.storage.files import compute_sha256, read_json, read_jsonl, write_json
from dj2mgm.storage.files import write_jsonl as write_rows
from sample_rules import build_sample_rules
from tiny_models import save_image

TEXT_ONLY = {"id": "text", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
FAULTS = {"missing.png": "missing", "../outside.png": "outside", "zero.png": "empty", "page.png": "undecodable"}


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "Bilder von heute é"
    save_image(root / "a.png")
    save_image(root / "b.png", (30, 30, 200))
    save_image(root / "e.png", (1, 1, 1))
    save_image(root / "f.png", (2, 2, 2))
    save_image(tmp_path / "outside.png")
    (root / "zero.png").touch()
    (root / "page.png").write_text("<html>")
    return root


def rows_about(*images: str) -> list[dict]:
    return [build_conversation(f"r{index}", image, "Q", "A") for index, image in enumerate(images)]


def write(
    rows, root, output, on_bad_row="refuse", max_samples=1000, budget=None, held_out=None, processes=1, **takes
) -> dict:
    rules = build_sample_rules(budget, on_bad_row=on_bad_row, max_samples=max_samples, **takes)
    return write_training_jsonl(rows, root, held_out or HeldOutImages(), output, rules, processes).as_dict()


def write_summary(path, pretrain: TrainingFileCounts, finetune: TrainingFileCounts, **inputs: str) -> None:
    write_json(path, JsonlSummary({"pretrain": pretrain, "finetune": finetune}, inputs).as_dict())


def check_sum(summary: dict) -> bool:
    return summary["rows_in"] == summary["rows_out"] - summary["repeated"] + sum(summary["dropped"].values())


def test_paths_become_absolute_and_everything_else_stays(root, tmp_path):
    rows = rows_about("a.png", "b.png", "a.png")
    summary = write([*rows, TEXT_ONLY], root, tmp_path / "out.jsonl", processes=2)
    *written, text_only = read_llava(tmp_path / "out.jsonl")
    assert text_only == TEXT_ONLY and [row["image"] for row in written] == [str(root / row["image"]) for row in rows]
    assert [row | {"image": ""} for row in written] == [row | {"image": ""} for row in rows]
    assert summary == {"rows_in": 4, "rows_out": 4, "dropped": {}, "repeated": 0}


def test_a_refusal_names_rows_and_keeps_an_earlier_output(root, tmp_path):
    (tmp_path / "out.jsonl").write_text("earlier")
    with pytest.raises(InputError) as error:
        write(rows_about("a.png", *FAULTS), root, tmp_path / "out.jsonl")
    assert "4 of 5 rows of out cannot" in str(error.value) and "jsonl.on_bad_row: drop" in str(error.value)
    for index, (image, reason) in enumerate(FAULTS.items(), start=1):
        assert f"row r{index}: {image}: {reason}: " in str(error.value)
    assert (tmp_path / "out.jsonl").read_text() == "earlier"
    with pytest.raises(InputError) as error:
        write(rows_about(*["missing.png"] * 9), root, tmp_path / "out.jsonl")
    assert "9 of 9 rows" in str(error.value) and "row r4:" in str(error.value) and "row r5:" not in str(error.value)
    assert "…" in str(error.value)


def test_dropped_rows_are_counted_by_reason(root, tmp_path):
    rows = rows_about("a.png", *FAULTS, "page.png", "b.png") + [TEXT_ONLY]
    summary = write(rows, root, tmp_path / "out.jsonl", on_bad_row="drop", max_samples=2, processes=2)
    reasons = {"empty": 1, "missing": 1, "outside": 1, "undecodable": 2}
    assert summary["dropped"] == reasons | {"over_max_samples": 1}, "samples are drawn from the good rows"
    summary = write(rows, root, tmp_path / "out.jsonl", on_bad_row="drop")
    assert summary["dropped"] == reasons
    assert check_sum(summary)
    assert [row["id"] for row in read_jsonl(tmp_path / "out.jsonl")] == ["r0", "r6", "text"]


def test_max_samples_draws_by_seed_and_keeps_the_order(root, tmp_path):
    rows = rows_about(*["a.png"] * 20)

    def chosen(seed: int) -> list[str]:
        summary = write(rows, root, tmp_path / "out.jsonl", max_samples=5, seed=seed)
        assert check_sum(summary) and summary["dropped"] == {"over_max_samples": 15}
        return [row["id"] for row in read_jsonl(tmp_path / "out.jsonl")]

    first = chosen(0)
    assert first == chosen(0) != chosen(1)
    assert first == sorted(set(first), key=lambda identifier: int(identifier[1:]))
    picked = Counter(identifier for seed in range(20) for identifier in chosen(seed))
    assert len(picked) > 17  # every row can be drawn, including the last ones


def test_budget_is_met_by_using_rows_equally_often(root, tmp_path):
    """A user's own key `source` has no effect without sources."""
    own = [{}, {"source": {"name": "cc3m"}}, {"source": ["a"]}, {"source": 7}, {"source": "x"}]
    rows = [row | own[number % 5] for number, row in enumerate(rows_about(*["a.png"] * 10))]
    for budget in (1, 7, 10, 25, 47):
        summary = write(rows, root, tmp_path / "out.jsonl", budget=budget)
        ids = [row["id"] for row in read_llava(tmp_path / "out.jsonl")]  # refuses repeated ids
        assert summary["rows_out"] == len(ids) == budget and check_sum(summary) and "sources" not in summary
        used = Counter(identifier.split("#")[0] for identifier in ids)
        assert set(used.values()) <= {budget // 10, budget // 10 + 1}


def test_repeats_depend_on_seed_and_cap_precedes_budget(root, tmp_path):
    def ids(**rules) -> list[str]:
        write(rows_about(*["a.png"] * 100), root, tmp_path / "out.jsonl", **rules)
        return [row["id"] for row in read_jsonl(tmp_path / "out.jsonl")]

    assert ids(budget=150, seed=1) == ids(budget=150, seed=1) != ids(budget=150, seed=2)
    capped = ids(budget=30, max_samples=20)
    assert len(capped) == 30 and len({identifier.split("#")[0] for identifier in capped}) == 20


def test_converted_pairs_have_caption_and_question():
    pair = {"id": "1", "text": build_dj_text("a red circle"), "images": ["a.png"]}
    for own, for_all, question in (
        ({}, "", ""),
        ({}, "What?", "What?"),
        ({"question": "Why?"}, "What?", "Why?"),
        ({"question": ""}, "What?", "What?"),
    ):
        (row,) = convert_pairs([pair | own], for_all)
        assert row == build_conversation("1", "a.png", question, "a red circle")


@pytest.fixture
def run(root, tmp_path, monkeypatch):
    """Return a function that runs the script on pairs and instructions, and returns its output folder."""
    pair = {"id": "p", "text": build_dj_text("a red circle"), "images": ["a.png"]}

    def run(instructions: list[dict], *flags: str, pairs=(pair,), held_out=("e.png", "f.png"), **changes):
        settings = {
            "pretrain_images": str(root),
            "finetune_images": str(root),
            "evaluation_images": str(root),
            "on_bad_row": "refuse",
            "max_samples": 10,
            "question": "",
            "control_tokens": [],
            "sources": {},
            "seed": 0,
            "cpu_threads": 1,
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings | changes))
        write_rows(tmp_path / "pairs.jsonl", pairs)
        evaluation = [{"id": image, "image": image, "captions": ["a square"]} for image in held_out]
        write_rows(tmp_path / "evaluation.jsonl", evaluation)
        (tmp_path / "finetune.json").write_text(json.dumps(instructions))
        paths = {"config": "config.yaml", "pairs": "pairs.jsonl", "instructions": "finetune.json"}
        paths["evaluation"] = "evaluation.jsonl"
        flags += tuple(part for flag, name in paths.items() for part in (f"--{flag}", str(tmp_path / name)))
        monkeypatch.setattr(sys, "argv", ["write_jsonl.py", *flags, "--output-dir", str(tmp_path / "out")])
        write_jsonl.main()
        return tmp_path / "out"

    return run


def test_script_writes_both_files_and_a_consistent_summary(run, tmp_path):
    out = run([*rows_about("a.png", "b.png"), TEXT_ONLY])
    assert [row["id"] for row in read_llava(out / "pretrain.jsonl")] == ["p"]
    assert [row["id"] for row in read_llava(out / "finetune.jsonl")] == ["r0", "r1", "text"]
    summary = read_json(out / "summary.json")
    assert check_sum(summary["pretrain"]) and check_sum(summary["finetune"])
    assert summary["inputs"]["pairs"] == compute_sha256(tmp_path / "pairs.jsonl")
    assert summary["inputs"]["evaluation"] == compute_sha256(tmp_path / "evaluation.jsonl")


@pytest.mark.parametrize(("bad", "noted"), [(1, False), (2, True)])
def test_a_loss_of_many_rows_is_noted(run, capsys, bad, noted):
    rows = rows_about(*["a.png"] * 3, *["missing.png"] * bad)
    run(rows, on_bad_row="drop", max_samples=2)
    assert (
        f"note: {bad} of {3 + bad} rows of finetune are dropped ({bad} missing)" in capsys.readouterr().err
    ) == noted


def test_the_number_of_rows_can_match_another_experiment(run, tmp_path, capsys):
    write_summary(tmp_path / "size.json", TrainingFileCounts(3, 5, {}, repeated=2), TrainingFileCounts(1, 1, {}))
    write_summary(tmp_path / "budget.json", TrainingFileCounts(7, 7, {}), TrainingFileCounts(7, 7, {}))
    pairs = [{"id": f"p{number}", "text": build_dj_text("a circle"), "images": ["a.png"]} for number in range(10)]
    size = ("--same-rows-as", str(tmp_path / "size.json"))
    budget = ("--same-samples-as", str(tmp_path / "budget.json"))

    def drawn(**changes) -> Counter:
        out = run(rows_about("a.png"), *size, *budget, pairs=pairs, **changes)
        summary = read_json(out / "summary.json")
        assert check_sum(summary["pretrain"]) and summary["pretrain"]["dropped"] == {"over_size": 7}
        assert (summary["finetune"]["dropped"], summary["finetune"]["rows_out"]) == ({}, 7)
        return Counter(row["id"].split("#")[0] for row in read_llava(out / "pretrain.jsonl"))

    assert sorted(drawn().values()) == [2, 2, 3]
    assert drawn().keys() == drawn().keys() != drawn(seed=1).keys()
    with pytest.raises(SystemExit):
        run(rows_about("a.png"), *size, pairs=pairs[:3])
    assert "3 rows is no smaller than the 3 rows of pretrain: the experiment does not select" in capsys.readouterr().err


def test_images_of_both_files_are_verified_once(run, monkeypatch):
    opened = []
    monkeypatch.setattr("dj2mgm.data.training_jsonl.load_image", opened.append)
    pairs = [{"id": name, "text": build_dj_text("a circle"), "images": [f"{name}.png"]} for name in "ab"]
    out = run([], pairs=pairs)  # without instructions, stage 2 trains on captions of the same images
    assert [path.name for path in opened] == ["a.png", "b.png"]
    summary = read_json(out / "summary.json")
    assert summary["pretrain"]["rows_out"] == summary["finetune"]["rows_out"] == 2


def test_rows_about_leaked_images_are_dropped_and_counted(run, tmp_path):
    path = str((tmp_path / "Bilder von heute é/b.png").resolve())
    leak = {"image": "b.png", "path": path, "of": "textvqa", "ids": ["7"], "bits": 0}
    write_rows(tmp_path / "leaks.jsonl", [leak])
    rows = [*rows_about("a.png", "b.png", "b.png"), TEXT_ONLY]
    out = run(rows, "--leaks", str(tmp_path / "leaks.jsonl"))
    assert [row["id"] for row in read_llava(out / "finetune.jsonl")] == ["r0", "text"]
    summary = read_json(out / "summary.json")
    assert summary["finetune"]["dropped"] == {"leaked": 2} and check_sum(summary["finetune"])
    assert summary["pretrain"]["dropped"] == {}


def test_a_lack_of_usable_rows_is_reported_in_one_line(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(rows_about("missing.png"), on_bad_row="drop")
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no row of finetune is left") and error.count("\n") == 1
    assert "1 missing of 1 rows; the first is row r0: missing.png: missing: " in error
    assert not (tmp_path / "out" / "summary.json").exists()


CONTROL = ["<eos>", "</s>", "<end_of_turn>", "<unused0>", "<|im_end|>", "<|image_pad|>", "<image>", "<|__dj__eoc|>"]


def test_a_control_token_in_a_turn_makes_a_row_invalid(root, tmp_path):
    rows = [build_conversation(f"a{token}", "a.png", "", f"a boat {token}") for token in CONTROL]
    rows += [build_conversation(f"q{token}", "a.png", f"What {token}?", "a boat") for token in CONTROL]
    rows += [build_conversation("split", "a.png", "What is <im<image>age>?", "a boat")]
    good = build_conversation("good", "a.png", "Is <b> < c > <__dj__image>?", "a <b> < c")
    with pytest.raises(InputError, match="row a<eos>: its text contains the control token <eos>"):
        write([*rows, good], root, tmp_path / "out.jsonl")
    summary = write([*rows, good], root, tmp_path / "out.jsonl", on_bad_row="drop")
    assert check_sum(summary) and summary["dropped"] == {"control_token": 2 * len(CONTROL) - 1, "image_token": 2}
    assert [row["id"] for row in read_llava(tmp_path / "out.jsonl")] == ["good"]


def test_a_control_character_makes_a_row_invalid(root, tmp_path):
    characters = ["\0", "\x07", "\x0b", "\x1b", "\x7f", "\x85", "\x9f"]
    rows = [build_conversation(f"a{c}", "a.png", "", f"a{c} boat") for c in characters]
    rows += [build_conversation(f"q{c}", "a.png", f"What{c}?", "a boat") for c in characters]
    rows.append(build_conversation("good", "a.png", "a\tb\r\nc", "größer 山 \u00a0é\u200d👩"))
    with pytest.raises(InputError, match=r"its text contains the control character \\x00"):
        write(rows, root, tmp_path / "out.jsonl")
    summary = write(rows, root, tmp_path / "out.jsonl", on_bad_row="drop")
    assert check_sum(summary) and summary["dropped"] == {"control_character": 2 * len(characters)}


@pytest.mark.parametrize(
    ("image", "turns", "problem"),
    [
        ("a.png", ["Q", "<image>"], "expected 1 image token <image> in the human turns, found 0"),
        ("a.png", ["<image>Q", "A", "<image>Q", "A"], "found 2"),
        ("a.png", ["<image>Q", "<image>"], "control token <image>"),
        (None, ["<image>Q", "A"], "expected 0 image token <image> in the human turns, found 1"),
        ("a.png", ["Q", "A", "<image>Q", "A"], None),
    ],
)
def test_row_needs_one_image_token_per_image(root, tmp_path, image, turns, problem):
    conversations = [{"from": ("human", "gpt")[n % 2], "value": value} for n, value in enumerate(turns)]
    row = {"id": "r", "conversations": conversations} | ({"image": image} if image else {})
    if problem is None:
        assert write([row], root, tmp_path / "out.jsonl")["rows_out"] == 1
        return
    with pytest.raises(InputError, match=f"row r: .*{problem}"):
        write([row], root, tmp_path / "out.jsonl")
    summary = write([row, TEXT_ONLY], root, tmp_path / "out.jsonl", on_bad_row="drop")
    assert summary["rows_out"] == 1 and check_sum(summary)


def row_about_both(images: list[str]) -> dict:
    return build_conversation("both", "", "<image> Which is red?", "the first") | {"image": images}


def test_several_images_need_a_model_that_accepts_them(root, tmp_path):
    rows = [row_about_both(["b.png", "a.png"]), *rows_about("a.png")]
    assert write(rows, root, tmp_path / "out.jsonl", several_images=True)["rows_out"] == 2
    first, second = read_llava(tmp_path / "out.jsonl")
    assert first["image"] == [str(root / "b.png"), str(root / "a.png")] and second["image"] == str(root / "a.png")
    with pytest.raises(InputError, match="row both: it has 2 images, but this model accepts one"):
        write(rows, root, tmp_path / "out.jsonl")
    summary = write(rows, root, tmp_path / "out.jsonl", on_bad_row="drop")
    assert summary["dropped"] == {"several_images": 1} and check_sum(summary)


def test_rows_unfit_for_one_question_models_are_counted(root, tmp_path):
    twice = build_conversation("twice", "a.png", "Q", "A")
    twice["conversations"] += TEXT_ONLY["conversations"]
    rows = [row_about_both(["b.png", "a.png"]), TEXT_ONLY, twice, *rows_about("a.png")]
    summary = write(rows, root, tmp_path / "out.jsonl", "drop", one_question=True)
    assert summary["dropped"] == {"no_image": 1, "several_images": 1, "several_questions": 1} and check_sum(summary)


@pytest.mark.parametrize(
    ("images", "reason"),
    [(["a.png", "zero.png"], "empty"), (["a.png", "e.png"], "held_out"), (["a.png", "b.png", "e.png"], "image_token")],
)
def test_one_invalid_image_of_several_makes_a_row_invalid(root, tmp_path, images, reason):
    held_out = HeldOutImages([{"id": "e", "image": "e.png"}], root)
    rows = [row_about_both(images), TEXT_ONLY]
    summary = write(rows, root, tmp_path / "out.jsonl", "drop", held_out=held_out, several_images=True)
    assert summary["dropped"] == {reason: 1} and check_sum(summary)


def test_row_about_a_held_out_image_or_its_copy_is_invalid(root, tmp_path):
    shutil.copy(root / "e.png", root / "copy.png")
    (root / "link.png").symlink_to("f.png")
    held_out = HeldOutImages([{"id": image, "image": image} for image in ("e.png", "f.png")], root)
    rows = rows_about("a.png", "e.png", "copy.png", "link.png", "copy.png", "b.png")
    with pytest.raises(InputError) as error:
        write(rows, root, tmp_path / "out.jsonl", held_out=held_out)
    assert "4 of 6 rows" in str(error.value) and f"row r1: e.png: held_out: {root / 'e.png'} is an" in str(error.value)
    assert f"row r2: copy.png: held_out: {root / 'copy.png'} is a copy of an image that is kept" in str(error.value)
    summary = write(rows, root, tmp_path / "out.jsonl", on_bad_row="drop", held_out=held_out)
    assert summary["dropped"] == {"held_out": 4} and check_sum(summary)
    assert [row["id"] for row in read_llava(tmp_path / "out.jsonl")] == ["r0", "r5"]


def test_no_evaluation_image_is_used_for_training(run, root, capsys):
    shutil.copy(root / "b.png", root / "copy.png")
    with pytest.raises(SystemExit):
        run(rows_about("a.png", "copy.png"), held_out=("e.png", "b.png"))
    error = capsys.readouterr().err
    assert error.startswith("error: 1 of 2 rows of finetune cannot be trained on: row r1: copy.png: held_out: ")


def pairs_about(*images: str) -> list[dict]:
    """Return pairs, every other one with its own question."""
    rows = [{"id": f"p{n}", "text": build_dj_text(f"caption {n}"), "images": [image]} for n, image in enumerate(images)]
    return [row | {"question": "What is it?"} if n % 2 else row for n, row in enumerate(rows)]


def test_stage_2_uses_captions_without_instructions(run):
    out = run([], pairs=pairs_about("a.png", "b.png", "missing.png", "a.png"), on_bad_row="drop")
    written = {name: list(read_llava(out / f"{name}.jsonl")) for name in ("pretrain", "finetune")}
    samples = [[(row["id"], row["image"], row["conversations"][1]) for row in rows] for rows in written.values()]
    assert samples[0] == samples[1] and len(samples[0]) == 3
    questions = {name: [row["conversations"][0]["value"] for row in rows] for name, rows in written.items()}
    assert questions["pretrain"] == ["<image>", "<image>\nWhat is it?", "<image>\nWhat is it?"]
    assert questions["finetune"] == ["<image>\nDescribe the image.", *questions["pretrain"][1:]]
    summary = read_json(out / "summary.json")
    assert summary["finetune"] == summary["pretrain"] and check_sum(summary["finetune"])


def test_both_stages_use_the_same_pairs_without_instructions(run, tmp_path):
    def ids(*flags, **changes) -> dict[str, list[str]]:
        out = run([], *flags, pairs=pairs_about(*["a.png", "b.png"] * 20), **changes)
        return {name: [row["id"] for row in read_llava(out / f"{name}.jsonl")] for name in ("pretrain", "finetune")}

    capped = ids(max_samples=7)
    assert capped["pretrain"] == capped["finetune"] and len(capped["pretrain"]) == 7
    shutil.copy(tmp_path / "out/summary.json", tmp_path / "reference.json")
    for cap in (3, 7, 30):
        same = ids("--same-samples-as", str(tmp_path / "reference.json"), max_samples=cap)
        assert same["pretrain"] == same["finetune"] and len(same["pretrain"]) == 7


@pytest.mark.parametrize(("sizes", "repeats"), [([20, 12, 7], 0), ([20, 12], 7)])
def test_all_rows_are_used_equally_often(sizes, repeats):
    """Check that averages over many seeds are within five standard errors, and that uses vary less than their mean."""
    seeds, good = 1000, io.StringIO("".join(json.dumps({"id": str(n)}) + "\n" for n in range(sizes[0])))
    usable, capped, sample_counts = (Counter({None: n}) for n in (sizes[0], sizes[-1], sizes[-1] + repeats))
    used = Counter(
        row["id"].split("#")[0]
        for seed in range(seeds)
        for row in _repeat_rows(good, usable, capped, sample_counts, build_sample_rules(seed=seed))
    )
    mean = (sizes[-1] + repeats) / sizes[0]
    assert all(abs(used[str(n)] / seeds - mean) < 5 * (mean / seeds) ** 0.5 for n in range(sizes[0]))


def test_ids_of_repeats_do_not_equal_other_ids(root, tmp_path):
    names = ("r", "r#2", "s")
    rows = [row | {"id": name} for row, name in zip(rows_about("a.png", "b.png", "a.png"), names, strict=True)]
    write(rows, root, tmp_path / "out.jsonl", budget=6)
    ids = [row["id"] for row in read_llava(tmp_path / "out.jsonl")]
    assert ids == ["r", "r#2", "s", "r#3", "r#2#2", "s#2"]
    assert [row["id"] for row in drop_repeats(read_llava(tmp_path / "out.jsonl"))] == list(names)


AMOUNTS = st.one_of(st.floats(0.1, 3.0), st.integers(0, 20))


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 40), AMOUNTS), min_size=1), st.data())
def test_samples_of_sources_keep_their_proportions(sources, data):
    usable = Counter({source: rows for source, (rows, _) in sources.items()})
    amounts = {source: amount for source, (_, amount) in sources.items()}
    rules = partial(build_sample_rules, sources=amounts)
    requested = {s: a if isinstance(a, int) else Fraction(str(a)) * usable[s] for s, a in amounts.items()}
    limits = {s: min(usable[s], round(n)) for s, n in requested.items()}  # an amount below 1 limits different rows
    assume(round(sum(n for s, n in requested.items() if limits[s])))
    if any(isinstance(a, int) and a > usable[s] for s, a in amounts.items()):
        with pytest.raises(InputError, match=r"sources\.[a-d]: \d+ rows are requested, but only \d+ rows of pretrain"):
            apportion(usable, rules(), "pretrain")
        return
    used, sample_counts = apportion(usable, rules(), "pretrain")
    assert all(abs(sample_counts[s] - n) <= 1 and used[s] <= limits[s] for s, n in requested.items())
    budget = data.draw(st.integers(1, 200))
    _, sample_counts = apportion(usable, rules(budget), "pretrain")
    assert sample_counts.total() == budget
    drawn = {s: n for s, n in requested.items() if limits[s]}
    assert all(abs(sample_counts[s] - n * budget / sum(drawn.values())) < 1 for s, n in drawn.items())
    good = io.StringIO(
        "".join(json.dumps({"id": f"{s}{n}", "source": s}) + "\n" for s in usable for n in range(usable[s]))
    )
    rows = list(
        _repeat_rows(
            good,
            usable,
            *apportion(usable, rules(budget), "pretrain"),
            rules(budget),
        )
    )
    assert +Counter(row["source"] for row in rows) == +sample_counts
    uses = Counter(row["id"].split("#")[0] for row in rows)
    for source in usable:
        times = [uses[f"{source}{n}"] for n in range(usable[source])]
        pool = [count for count in times if count]
        assert len(pool) <= limits[source] and (not pool or max(pool) - min(pool) <= 1)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 40), min_size=1), st.data())
def test_smaller_shares_are_subsets_of_larger_ones(sources, data):
    """Each source has its share of rows and of samples, so that its rows are repeated equally often."""
    usable = Counter(sources)
    good = "".join(json.dumps({"id": f"{s}{n}", "source": s}) + "\n" for s in usable for n in range(usable[s]))
    budget = data.draw(st.integers(len(usable), 200))
    shares = sorted(data.draw(st.lists(st.floats(0.01, 1), min_size=2, max_size=3)))
    drawn = []
    for share in [*shares, 1.0]:
        alone = data.draw(st.sampled_from([None, "a"]))
        rules = build_sample_rules(
            budget, sources=dict.fromkeys(usable, 1.0), used_fraction={"a": share} if alone else share
        )
        used, sample_counts = apportion(usable, rules, "pretrain")
        rows = [row["id"].split("#")[0] for row in _repeat_rows(io.StringIO(good), usable, used, sample_counts, rules)]
        drawn.append({source: {row for row in rows if row[0] == source} for source in usable})
        full = apportion(usable, build_sample_rules(budget, sources=dict.fromkeys(usable, 1.0)), "pretrain")[1]
        for source in usable:
            fraction = share if source == "a" or not alone else 1.0
            expected = max(min(1, full[source]), round(fraction * full[source]))
            assert sum(row[0] == source for row in rows) == expected
    for smaller, larger in itertools.pairwise(drawn):
        assert smaller.get("a", set()) <= larger.get("a", set()), "its share grows"


@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.integers(1, 200), st.integers(0, 100) | st.none()), min_size=1
    ),
    st.integers(1, 400) | st.none(),
    st.integers(1, 400) | st.none(),
)
def test_no_source_repeats_a_row_while_it_has_unused_ones(sources, budget, max_samples):
    """Check the exact shares, the rest for sources without a share, and the different rows, with and without limits."""
    usable = Counter({source: rows for source, (rows, _) in sources.items()})
    shares = {source: Fraction(share, 100) for source, (_, share) in sources.items() if share is not None}
    total, others = sum(shares.values()), {source: rows for source, rows in usable.items() if source not in shares}
    assume(not shares or 0 < total <= 1)
    settings = {"sources": dict.fromkeys(usable, 1.0), "shares": {s: float(x) for s, x in shares.items()}}
    settings["shares"] |= {"of another stage": 0.9}
    limit = {} if max_samples is None else {"max_samples": max_samples}
    used, samples = apportion(usable, build_sample_rules(budget, **settings, **limit), "pretrain")
    rest = 1 - total if others else 0
    exact = {source: share * (1 - rest) / (total or 1) for source, share in shares.items()}
    exact |= {source: rest * rows / sum(others.values()) for source, rows in others.items()}
    all_rows = sum(usable[source] for source, share in exact.items() if share)
    assert samples.total() == (budget or min(all_rows, max_samples or all_rows))
    assert all(used[source] <= min(usable[source], samples[source]) for source in usable)
    if samples.total() <= (max_samples or 1000):
        assert all(abs(samples[source] - samples.total() * share) < 1 for source, share in exact.items())
        assert all(used[source] == min(usable[source], samples[source]) for source in usable)
    elif any(used[source] < min(usable[source], samples[source]) for source in usable):
        assert used.total() == max_samples, "rows are repeated only if different rows are limited"


SHARES = {"sources": {"photos": 1.0, "charts": 1.0}}


@pytest.mark.parametrize(
    ("usable", "budget", "settings", "samples", "used"),
    [
        # a source without a share limits no other source
        ({"photos": 4900, "charts": 100}, 5000, SHARES | {"shares": {"photos": 0.7}}, [3500, 1500], [3500, 100]),
        (
            {"photos": 4900, "charts": 100},
            5000,
            SHARES | {"shares": {"photos": 0.7, "charts": 0.3}},
            [3500, 1500],
            [3500, 100],
        ),
        # samples are rounded once: a source with too few rows for one does not take the only sample of another
        ({"b": 420, "a": 20, "c": 30}, 7, {}, [6, 0, 1], [6, 0, 1]),
        ({"a": 5, "b": 5, "c": 5}, 30, {"max_samples": 2}, [15, 15, 0], [1, 1, 0]),
        # a source that rounds to no row limits no other one
        ({"a": 1000, "c": 1}, None, {"sources": {"c": 0.4}, "shares": {"a": 0.1}}, [1000, 0], [1000, 0]),
        ({"a": 1000, "c": 1}, 1000, {"sources": {"c": 0.4}, "shares": {"a": 0.1}}, [1000, 0], [1000, 0]),
        ({"a": 3, "c": 1}, None, {"sources": {"c": 0.4}, "shares": {"a": 0.1}}, [3, 0], [3, 0]),
    ],
)
def test_samples_and_rows_of_sources(usable, budget, settings, samples, used):
    used_rows, sample_counts = apportion(Counter(usable), build_sample_rules(budget, **settings), "finetune")
    assert [[counts[source] for source in usable] for counts in (sample_counts, used_rows)] == [samples, used]


def test_amounts_without_any_rows_name_stage_and_sources():
    rules = build_sample_rules(sources={"a": 0, "b": 0.01})
    with pytest.raises(InputError, match=r"no row of finetune to train on \(a: 0 of 12 rows, b: 0.01 of 8 rows\)"):
        apportion(Counter(a=12, b=8), rules, "finetune")


@pytest.mark.parametrize(("amount", "dropped"), [(1, {"sampled": 2}), (1.0, {})])
def test_1_means_one_row_and_1_0_means_each_row_once(root, tmp_path, amount, dropped):
    rows = (row | {"source": "a"} for row in rows_about("a.png", "a.png", "a.png"))
    summary = write(rows, root, tmp_path / "out.jsonl", sources={"a": amount})
    assert summary["dropped"] == dropped and summary["rows_out"] == 3 - sum(dropped.values())


def test_probably_unintended_amounts_are_noted(capsys):
    counts = {name: SourceSamples(50, rows, rows) for name, rows in (("a", 1), ("b", 0), ("c", 9), ("d", 0))}
    write_jsonl.note_amounts("pretrain", counts, {"a": 1, "b": 0.5, "c": 1e300, "d": 1.0}, {"d": 0})
    assert capsys.readouterr().err.splitlines() == [
        "note: sources.a: 1 of its 50 rows of pretrain is used; for a weight per row, write 1.0",
        "note: sources.b: none of its 50 rows of pretrain is used; raise its amount (0.5), or lower the others",
    ]


def test_amount_of_a_source_without_rows_is_refused(run):
    with pytest.raises(SystemExit):
        run([TEXT_ONLY | {"source": "a"}], pairs=(), sources={"a": 1.0, "b": 500})


def test_synthesized_instructions_replace_single_questions(run, tmp_path):
    """Text-only rows stay unchanged in training, and the file of the pairs does not change."""
    chosen = {"id": "r1", "text": build_dj_text("blue"), "images": ["b.png"], "question": "Which color?"}
    write_rows(tmp_path / "synthesized.jsonl", [chosen])
    original = [*rows_about("a.png", "b.png"), TEXT_ONLY]
    out = run(original, "--synthesized", str(tmp_path / "synthesized.jsonl"))
    replaced, text = read_llava(out / "finetune.jsonl")
    assert (text["id"], replaced["id"], replaced["conversations"][1]["value"]) == ("text", "r1", "blue")
    assert replaced["conversations"][0]["value"] == "<image>\nWhich color?" and replaced["image"].endswith("b.png")
    summary = read_json(out / "summary.json")
    assert check_sum(summary["finetune"]) and summary["finetune"]["rows_in"] == 2
    assert summary["inputs"]["synthesized"] == compute_sha256(tmp_path / "synthesized.jsonl")


def test_a_random_subset_of_instructions_keeps_all_pairs(run, tmp_path, capsys):
    counts = TrainingFileCounts(1, 1, {})
    write_summary(tmp_path / "size.json", counts, counts, synthesized="a digest")
    size = ("--same-rows-as", str(tmp_path / "size.json"))
    out = run(rows_about("a.png", "b.png"), *size)
    assert [len(list(read_llava(out / f"{name}.jsonl"))) for name in ("pretrain", "finetune")] == [1, 1]
    with pytest.raises(SystemExit):
        run(rows_about("a.png"), *size)
    assert "1 rows is no smaller than the 1 rows of finetune" in capsys.readouterr().err
    # it wrote two rows and left out two of three
    write_summary(tmp_path / "size.json", counts, replace(counts, rows_in=3), synthesized="a digest")
    out = run(rows_about("a.png"), *size)
    assert [len(list(read_llava(out / f"{name}.jsonl"))) for name in ("pretrain", "finetune")] == [1, 1]
