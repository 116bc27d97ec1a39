"""The engine of the filter stage accounts for every row with any operators."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from time import sleep

import pytest
from data_juicer.utils import mm_utils
from PIL import Image

from dj2mgm.data.formats import build_dj_text, extract_caption
from dj2mgm.errors import InputError
from dj2mgm.juicer.patched_data_juicer import OPERATORS, Fields, Filter, Mapper, load_ops
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.juicer.run_recipe import FILTERED, WORKING_FOLDER_PREFIX, compute_recipe_fingerprint, run_recipe
from dj2mgm.recipes.recipe_parsing import RecipeStep, parse_steps
from dj2mgm.storage.files import compute_sha256, read_jsonl, write_jsonl, write_yaml
from forked_python import forked_python
from paths import PROJECT

CAPTIONS = ["a red circle", "no", "a blue square on a lawn", "x", "a red circle", "three green stars"]


def write_dataset(folder: Path, captions: list[str] = CAPTIONS, **extra) -> Path:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, caption in enumerate(captions):
        Image.new("RGB", (40, 40), (len(caption), 0, 0)).save(folder / f"images/{number}.png")
        rows.append({"id": f"r{number}", "text": build_dj_text(caption), "images": [f"images/{number}.png"]} | extra)
    write_jsonl(folder / "pretrain.jsonl", rows)
    return folder / "pretrain.jsonl"


def run(data: Path, output: Path, process: list, processes: int = 1) -> dict:
    root = data.parent.resolve()
    settings = RecipeSettings(
        root, processes, parse_steps("recipe", process), {"image_integrity_filter": {"image_root": str(root)}}
    )
    return run_recipe(settings, data, output, FILTERED).as_dict()


def read_rows(path: Path) -> list[dict]:
    return list(read_jsonl(path))


def ids(path: Path) -> list[str]:
    return [row["id"] for row in read_rows(path)]


LENGTH = {"text_length_filter": {"min_len": 5}}


@pytest.fixture
def register(monkeypatch):
    """Register an operator for one test."""

    def add(name: str, operator: type) -> None:
        operator._name = name
        monkeypatch.setitem(OPERATORS.modules, name, operator)

    return add


def test_every_row_is_kept_or_listed_with_its_operator(tmp_path):
    data = write_dataset(tmp_path, source="web", tags=["a", 1, None])
    (tmp_path / "images/2.png").unlink()
    (tmp_path / "images/5.png").write_bytes(b"")
    summary = run(data, tmp_path / "out", [{"image_integrity_filter": None}, LENGTH, {"image_text_deduplicator": None}])

    dropped = read_rows(tmp_path / "out/dropped.jsonl")
    assert [(row["id"], row["step"], row["operator"]) for row in dropped] == [
        ("r2", 1, "image_integrity_filter"),
        ("r5", 1, "image_integrity_filter"),
        ("r1", 2, "text_length_filter"),
        ("r3", 2, "text_length_filter"),
        ("r4", 3, "image_text_deduplicator"),
    ]
    assert dropped[0]["stats"] == {"image_integrity": "missing"}
    assert dropped[2]["stats"] == {"image_integrity": "ok", "text_len": len("no")}
    # relative path and other keys do not change
    assert read_rows(tmp_path / "out/filtered.jsonl") == read_rows(data)[:1]
    assert read_rows(tmp_path / "out/stats.jsonl") == [
        {"id": "r0", "image_integrity": "ok", "text_len": len(CAPTIONS[0])}
    ]
    assert (summary["rows_in"], summary["rows_kept"], summary["rows_dropped"], summary["errors"]) == (6, 1, 5, 0)
    counts = [(step["rows_in"], step["rows_out"], step["dropped"]) for step in summary["operators"]]
    assert counts == [(6, 4, 2), (4, 2, 2), (2, 1, 1)]
    assert summary["broken_images"] == {"missing": 1, "outside": 0, "empty": 1, "undecodable": 0}
    assert summary["input"]["sha256"] == compute_sha256(data)
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary


def test_outputs_do_not_depend_on_the_number_of_processes(tmp_path):
    data = write_dataset(tmp_path, CAPTIONS * 5)
    process = [
        {"image_integrity_filter": None},
        LENGTH,
        {"image_shape_filter": {"min_width": 1}},
        {"image_text_deduplicator": None},
    ]
    process.append({"document_deduplicator": {}})
    for processes in (1, 3):
        run(data, tmp_path / f"out{processes}", process, processes)
    for name in ("filtered.jsonl", "stats.jsonl", "dropped.jsonl"):
        assert (tmp_path / "out1" / name).read_bytes() == (tmp_path / "out3" / name).read_bytes()


def test_a_second_run_reads_the_images_again(tmp_path):
    data = write_dataset(tmp_path)
    run(data, tmp_path / "out", [{"image_integrity_filter": None}])
    (tmp_path / "images/0.png").write_text("no image any more")
    run(data, tmp_path / "out", [{"image_integrity_filter": None}])
    assert ids(tmp_path / "out/dropped.jsonl") == ["r0"]


def test_results_of_an_earlier_run_in_the_input_are_not_used(tmp_path):
    record = {"caption": "written before", "original": "no", "similarity": 0.3}
    data = write_dataset(tmp_path, recaption=record, **{Fields.stats: {"text_len": 10_000}})
    run(data, tmp_path / "out", [LENGTH])
    assert ids(tmp_path / "out/dropped.jsonl") == ["r1", "r3"]
    rows = read_rows(tmp_path / "out/filtered.jsonl")
    assert rows and all("recaption" not in row and row["earlier_recaption"] == record for row in rows)


def test_a_mappers_edits_reach_the_rows_and_the_trace(tmp_path):
    data = write_dataset(tmp_path, ["see https://a.example/b now", "nothing to clean"])
    summary = run(data, tmp_path / "out", [{"clean_links_mapper": {}}])
    [change] = read_rows(tmp_path / "out/dropped.jsonl")
    assert (change["id"], change["event"], change["operator"]) == ("r0", "changed", "clean_links_mapper")
    texts = [row["text"] for row in read_rows(tmp_path / "out/filtered.jsonl")]
    assert texts[0] == change["text_after"] != change["text_before"] == build_dj_text("see https://a.example/b now")
    assert "https" not in texts[0] and texts[1] == build_dj_text("nothing to clean")
    assert (summary["rows_kept"], summary["operators"][0]["changed"]) == (2, 1)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failing_operator_stops_the_stage_and_names_the_row(tmp_path, register, processes):
    class FussyFilter(Filter):
        _batched_op = True

        def compute_stats_batched(self, samples):
            for text in samples[self.text_key]:
                if "square" in text:
                    raise ValueError("no squares, please")
            return samples

        def process_batched(self, samples):
            return [True] * len(samples["id"])

    register("fussy_filter", FussyFilter)
    data = write_dataset(tmp_path)
    with pytest.raises(InputError, match="fussy_filter failed on row 'r2': ValueError: no squares, please"):
        run(data, tmp_path / "out", [LENGTH, {"fussy_filter": None}], processes)
    assert outputs(tmp_path / "out") == []


def outputs(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(WORKING_FOLDER_PREFIX)]


def test_work_before_a_failing_operator_is_not_repeated(tmp_path, register, monkeypatch):
    """A disk that is full for a moment costs one partition."""
    for size in ("PARTITION_ROWS", "ROWS_AT_ONCE"):
        monkeypatch.setattr(f"dj2mgm.juicer.partitions.{size}", 2)
    done = []

    class OnceFullMapper(Mapper):
        def process_single(self, sample):
            done.append(sample["id"])
            if done.count("r4") == 1:
                raise OSError("No space left on device")
            return sample

    register("once_full_mapper", OnceFullMapper)
    data = write_dataset(tmp_path)
    with pytest.raises(
        InputError,
        match="once_full_mapper failed: OSError: No space left on device. No row fails alone, so run it again",
    ):
        run(data, tmp_path / "out", [{"once_full_mapper": None}])
    before = list(done)
    run(data, tmp_path / "out", [{"once_full_mapper": None}])
    assert not {"r0", "r1", "r2", "r3"} & set(done[len(before) :])


def test_an_operator_that_adds_rows_is_refused(tmp_path, register):
    class TwiceMapper(Mapper):
        _batched_op = True

        def process_batched(self, samples):
            return {key: values * 2 for key, values in samples.items()}

    register("twice_mapper", TwiceMapper)
    with pytest.raises(InputError, match="twice_mapper added rows"):
        run(write_dataset(tmp_path), tmp_path / "out", [{"twice_mapper": None}])


def test_an_operator_that_swaps_images_is_refused(tmp_path, register):
    class SwapMapper(Mapper):
        def process_single(self, sample):
            return sample | {"images": ["/elsewhere.png"]}

    register("swap_mapper", SwapMapper)
    with pytest.raises(InputError, match="replaced the image of row 'r0'"):
        run(write_dataset(tmp_path), tmp_path / "out", [{"swap_mapper": None}])


FORMS = [
    build_dj_text("{}"),
    "<__dj__image> {}<|__dj__eoc|>\n",
    "  {}\n<__dj__image>",
    "{} <|__dj__eoc|> <__dj__image>",
]


@pytest.mark.parametrize("form", FORMS)
def test_a_mapper_gets_the_caption_and_the_tokens_stay_around_it(tmp_path, register, form):
    captions = ["image eoc dj", "a <b>|dj</b>  square", "no change"]

    class CaptionMapper(Mapper):
        def process_single(self, sample):
            assert sample["text"] in captions
            return sample | {"text": re.sub("[<>|dj]", "", sample["text"])}

    register("caption_mapper", CaptionMapper)
    data = write_dataset(tmp_path, captions)
    write_jsonl(data, [row | {"text": form.format(extract_caption(row["text"]))} for row in read_rows(data)])
    summary = run(data, tmp_path / "out", [{"caption_mapper": None}])
    expected = [form.format(caption) for caption in ("image eoc ", "a b/b  square", "no change")]
    texts = [row["text"] for row in read_rows(tmp_path / "out/filtered.jsonl")]
    assert texts == [expected[0].replace("eoc ", "eoc", 1), *expected[1:]], "white space at the ends is not kept"
    assert summary["operators"][0]["changed"] == 2
    assert [row["text_after"] for row in read_rows(tmp_path / "out/dropped.jsonl")] == texts[:2]


def test_a_mapper_may_remove_the_characters_of_the_tokens(tmp_path):
    process = [
        {"remove_specific_chars_mapper": {"chars_to_remove": "<_|>e"}},
        {"remove_non_chinese_character_mapper": {}},
    ]
    run(write_dataset(tmp_path, ["a red | circle", "é blue square"]), tmp_path / "out", process)
    texts = [row["text"] for row in read_rows(tmp_path / "out/filtered.jsonl")]
    assert texts == [build_dj_text("a rd  circl"), build_dj_text("blu squar")]


RATIOS = {"min_ratio": 0.0, "max_ratio": 1.0}
TEXT_FILTERS = [
    {"alphanumeric_filter": RATIOS},
    {"average_line_length_filter": {"min_len": 0}},
    {"character_repetition_filter": RATIOS | {"rep_len": 3}},
    {"maximum_line_length_filter": {"min_len": 0}},
    {"special_characters_filter": RATIOS},
    {"text_length_filter": {"min_len": 0}},
    {"word_repetition_filter": RATIOS | {"rep_len": 2}},
    {"words_num_filter": {"min_num": 0}},
]


@pytest.mark.parametrize("form", FORMS[:2])
def test_text_statistics_equal_those_of_data_juicer_on_captions(tmp_path, form):
    captions = ["a red circle", "one two one two one two", "a line\nand another one", "!?", "12 image dj eoc", ""]
    data = write_dataset(tmp_path, captions)
    write_jsonl(data, [row | {"text": form.format(extract_caption(row["text"]))} for row in read_rows(data)])
    run(data, tmp_path / "out", TEXT_FILTERS)
    samples = {"text": captions, Fields.stats: [{} for _ in captions]}
    for operator in load_ops([dict(step) for step in TEXT_FILTERS]):
        samples = operator.compute_stats_batched(samples)
    expected = [{"id": f"r{number}"} | row for number, row in enumerate(samples[Fields.stats])]
    rows = read_rows(tmp_path / "out/stats.jsonl")
    assert len(rows) == len(expected) and len(rows[0]) == len(TEXT_FILTERS) + 1
    assert all(row == pytest.approx(measured, abs=1e-9) for row, measured in zip(rows, expected, strict=True))


def test_deduplicators_and_selections_compare_captions(tmp_path):
    data = write_dataset(tmp_path, ["a red circle"] * len(FORMS))
    rows = [row | {"text": form.format("a red circle")} for row, form in zip(read_rows(data), FORMS, strict=True)]
    write_jsonl(data, rows)
    for name in ("image_text_deduplicator", "document_deduplicator"):
        run(data, tmp_path / name, [{name: None}])
        assert read_rows(tmp_path / name / "filtered.jsonl") == rows[:1]


@pytest.mark.parametrize("change", [lambda text: text * 2, lambda text: text.replace("<__dj__image>", "")])
def test_an_operator_of_tokens_must_not_change_their_number(tmp_path, register, monkeypatch, change):
    class TokenMapper(Mapper):
        def process_single(self, sample):
            return sample | {"text": change(sample["text"]) if sample["id"] == "r3" else sample["text"]}

    monkeypatch.setitem(globals(), "SpecialTokens", mm_utils.SpecialTokens)  # by which the engine knows such operators
    register("token_mapper", TokenMapper)
    with pytest.raises(InputError, match="operator token_mapper changed the image tokens of row 'r3'"):
        run(write_dataset(tmp_path), tmp_path / "out", [{"token_mapper": None}])


def test_an_empty_result_names_the_operator_that_dropped_most(tmp_path):
    """Outputs of an earlier run, and stored work of another recipe, are removed."""
    data = write_dataset(tmp_path)
    (tmp_path / "out/.data_juicer-0123456789abcdef/pass-0").mkdir(parents=True)
    assert run(data, tmp_path / "out", [LENGTH])["rows_in"] == len(CAPTIONS)
    assert len(os.listdir(tmp_path / "out")) == 4
    with pytest.raises(
        InputError, match=r"kept none of 6 rows; text_length_filter \(step 2\) dropped the most rows \(4"
    ):
        run(data, tmp_path / "out", [LENGTH, {"text_length_filter": {"min_len": 9000}}])
    assert outputs(tmp_path / "out") == []
    data.write_text("")
    with pytest.raises(InputError, match="has no rows"):
        run(data, tmp_path / "out", [LENGTH])


def test_repaired_images_are_read_after_an_empty_result(tmp_path):
    data = write_dataset(tmp_path)
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    first = re.escape(str(tmp_path.resolve() / "images/0.png"))
    sentence = f"kept none of 6 rows; the images of 6 of them cannot be read .6 missing; the first is {first}"
    with pytest.raises(InputError, match=sentence):
        run(data, tmp_path / "out", [{"image_integrity_filter": None}])
    (tmp_path / "elsewhere").rename(tmp_path / "images")
    assert run(data, tmp_path / "out", [{"image_integrity_filter": None}])["rows_kept"] == 6


SMALL_PARTITION = 400
IN_SMALL_PARTITIONS = f"""
import sys; sys.path.insert(0, sys.argv.pop(1))
from dj2mgm.juicer import partitions; partitions.PARTITION_ROWS = partitions.ROWS_AT_ONCE = {SMALL_PARTITION}
import filter_data; filter_data.main()
"""


def command(
    data: Path, output: Path, process: list, processes: int, python: str = sys.executable, **executor_keys
) -> list[str]:
    config = data.parent / "config.yaml"
    settings = {"image_root": str(data.parent), "processes": processes, "recipe": {"process": process} | executor_keys}
    write_yaml(config, settings)
    return [
        python,
        "-c",
        IN_SMALL_PARTITIONS,
        str(PROJECT / "workflow_scripts"),
        "--config",
        str(config),
        "--data",
        str(data),
        "--output-dir",
        str(output),
    ]


def test_nothing_is_written_outside_the_output_folder(tmp_path):
    data = write_dataset(tmp_path / "data")
    for name in ("home", "tmp", "cwd"):
        (tmp_path / name).mkdir()
    environment = os.environ | {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE"):
        environment.pop(name, None)
    process = [{"image_integrity_filter": None}, LENGTH, {"image_text_deduplicator": None}]
    arguments = command(data, tmp_path / "out", process, 2)
    subprocess.run(arguments, cwd=tmp_path / "cwd", env=environment, check=True, capture_output=True)
    assert [path for name in ("home", "tmp", "cwd") for path in (tmp_path / name).rglob("*")] == []
    assert sorted(os.listdir(tmp_path / "out")) == ["dropped.jsonl", "filtered.jsonl", "stats.jsonl", "summary.json"]


def write_partitions(folder: Path, partitions: float) -> Path:
    """Write `partitions` partitions of rows about six images; a few rows are bad or repeated."""
    data = write_dataset(folder)
    rows = read_rows(data)
    numbered = (
        row | {"id": f"n{number}", "text": build_dj_text(f"picture {number % 399}") if number % 7 else row["text"]}
        for number, row in zip(range(round(partitions * SMALL_PARTITION)), cycle(rows), strict=False)
    )
    write_jsonl(data, numbered)
    (folder / "images/3.png").write_bytes(b"")
    return data


MIXED = [
    {"image_integrity_filter": None},
    LENGTH,
    {"clean_links_mapper": {}},
    {"image_text_deduplicator": None},
    {"text_length_filter": {"max_len": 16}},
    {"document_deduplicator": {}},
    {"alphanumeric_filter": {"min_ratio": 0.85}},
    {"image_near_deduplicator": {"max_levels": 0}},
]
ROW_FILES = ("filtered.jsonl", "stats.jsonl", "dropped.jsonl")


@pytest.mark.parametrize(
    "executor_keys", [{}, pytest.param({"executor": "ray"}, marks=pytest.mark.slow)], ids=["local", "ray"]
)
def test_a_killed_run_resumes_with_the_same_result(tmp_path, executor_keys):
    data = write_partitions(tmp_path, 4.1)
    arguments = command(data, tmp_path / "out", MIXED[:4], 2, **executor_keys)
    victim = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    while not list((tmp_path / "out").glob(".data_juicer-*/pass-1/000000")):
        assert victim.poll() is None
        sleep(0.01)
    victim.kill()
    victim.stderr.read()  # returns only after the workers, which share the pipe, have ended
    victim.wait()
    assert [name.startswith(".data_juicer-") for name in os.listdir(tmp_path / "out")] == [True]

    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"continuing after [1-4] finished partitions", done.stderr)
    run(data, tmp_path / "whole", MIXED[:4])
    for name in ROW_FILES:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert len(os.listdir(tmp_path / "out")) == 4


@pytest.mark.parametrize("first", ["default", pytest.param("ray", marks=pytest.mark.slow)])
def test_ray_resumes_after_a_failing_row_and_equals_local(tmp_path, first):
    data = write_partitions(tmp_path, 1.1)
    image, process = tmp_path / "images/3.png", [{"image_shape_filter": {"min_width": 1}}, *MIXED]
    write_jsonl(
        data, [*read_jsonl(data), {"id": "last", "text": build_dj_text("a late row"), "images": ["images/last.png"]}]
    )
    Image.new("RGB", (40, 40)).save(image)
    (tmp_path / "images/last.png").write_text("no image")
    arguments = command(data, tmp_path / "ray", process, 1, forked_python(), executor=first)
    failed = subprocess.run(arguments, capture_output=True, text=True)
    assert failed.returncode == 2, failed.stderr
    sentence = "error: operator image_shape_filter failed on row 'last': BadImageError: undecodable"
    assert failed.stderr.splitlines()[-1].startswith(sentence)
    assert outputs(tmp_path / "ray") == []

    shutil.copy(image, tmp_path / "images/last.png")
    expected = run(data, tmp_path / "local", process)
    arguments = command(data, tmp_path / "ray", process, 2, forked_python(), executor="ray")
    completed = subprocess.run(arguments, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    assert "continuing after 1 finished partitions" in completed.stderr
    for name in ROW_FILES:
        assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes()
    summary = json.loads((tmp_path / "ray/summary.json").read_text())
    assert without_seconds(summary) == without_seconds(expected)
    dropping = {step["operator"] for step in summary["operators"] if step["dropped"]}
    unused = {"clean_links_mapper", "image_integrity_filter"}  # no broken image remains at this operator
    assert dropping == {name for step in MIXED for name in step} - unused


def without_seconds(summary: dict) -> dict:
    return summary | {"operators": [step | {"seconds": 0} for step in summary["operators"]]}


def test_only_changes_of_used_code_discard_stored_work(tmp_path, monkeypatch):
    scripts = tmp_path / "scripts"
    shutil.copytree(PROJECT / "workflow_scripts", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("dj2mgm.juicer.engine.__file__", str(scripts / "dj2mgm/juicer/engine.py"))
    monkeypatch.setattr("dj2mgm.script_modules.SCRIPTS", scripts)
    data, settings = write_dataset(tmp_path), RecipeSettings(tmp_path, 1, [])

    def changed(module: str) -> bool:
        before = compute_recipe_fingerprint(parse_steps("recipe", [LENGTH]), settings, data)
        with open(scripts / module, "a", encoding="utf-8") as file:
            file.write("# changed\n")
        return compute_recipe_fingerprint(parse_steps("recipe", [LENGTH]), settings, data) != before

    others = (
        "dj2mgm/reporting/report_page.py",
        "dj2mgm/training/trainer.py",
        "dj2mgm/evaluation/vqa.py",
        "dj2mgm/health/probes.py",
        "chat.py",
    )
    assert not any(map(changed, others))
    own = ("dj2mgm/juicer/chain.py", "dj2mgm/data/images.py", "dj2mgm/juicer/operators/image_file_operators.py")
    helpers = ("dj2mgm/juicer/operators/declarations.py", "dj2mgm/juicer/operators/captioners.py")
    assert all(map(changed, own + helpers))


def test_work_continues_only_with_same_recipe_data_and_models(tmp_path, monkeypatch):
    data = write_dataset(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    monkeypatch.chdir(tmp_path)
    (model / "model.safetensors").write_bytes(b"1")
    settings = RecipeSettings(tmp_path, 1, [])
    words = tmp_path / "words.txt"
    words.write_text("cat")
    process = [
        LENGTH,
        {"batched_image_text_similarity_filter": {"hf_clip": str(model), "words": [str(words)], "a": ""}},
    ]
    steps = parse_steps("recipe", process)
    before = compute_recipe_fingerprint(steps, settings, data)
    (tmp_path / "snakemake.txt").write_text("what is in the current folder is no model's")
    assert compute_recipe_fingerprint(steps, settings, data) == before
    assert compute_recipe_fingerprint(steps, replace(settings, processes=4, executor="ray"), data) == before
    assert compute_recipe_fingerprint(steps[:1], settings, data) != before
    (model / "model.safetensors").write_bytes(b"2")
    other_model = compute_recipe_fingerprint(steps, settings, data)
    data.write_bytes(data.read_bytes() + b" ")
    other_data = compute_recipe_fingerprint(steps, settings, data)
    words.write_text("dog")
    assert len({before, other_model, other_data, compute_recipe_fingerprint(steps, settings, data)}) == 4
    steps = [RecipeStep("recipe", "instruction_synthesis_mapper", {"held_out_file": str(words)})]
    before = compute_recipe_fingerprint(steps, settings, data)
    words.write_text("other questions")
    assert compute_recipe_fingerprint(steps, settings, data) != before


def test_a_ray_address_without_a_cluster_is_named(tmp_path):
    data = write_dataset(tmp_path)
    executor_keys = {"executor": "ray", "ray_address": "127.0.0.1:1"}
    arguments = command(data, tmp_path / "out", [LENGTH], 1, forked_python(), **executor_keys)
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "recipe.ray_address: no Ray cluster at '127.0.0.1:1'" in done.stderr.splitlines()[-1]
