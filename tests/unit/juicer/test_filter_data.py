"""The filter stage as a command, and the baseline recipe on planted faults."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.shapes import write_shapes
from dj2mgm.errors import InputError
from dj2mgm.juicer.recipe_settings import RecipeSettings, read_filter_settings
from dj2mgm.juicer.run_recipe import FILTERED, run_recipe
from dj2mgm.recipes.recipe_parsing import parse_steps
from dj2mgm.storage.files import read_jsonl, write_jsonl, write_yaml
from drawn_datasets import draw_dataset
from paths import PROJECT
from tiny_models import save_image

RECIPE = PROJECT / "config/recipes/baseline.yaml"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    """Write 300 pairs, a third of them faulty, in a folder whose name has spaces and non-ASCII letters."""
    folder = tmp_path_factory.mktemp("data") / "Größe und 形"
    rates = {"mismatched": 0.1, "junk_text": 0.06, "short_text": 0.04, "duplicate": 0.04, "tiny_image": 0.04}
    rates |= {"extreme_aspect": 0.04, "truncated_image": 0.04, "not_an_image": 0.04}
    write_shapes(draw_dataset(7, 300, 3, 2, **rates), folder)
    return folder


def test_the_baseline_recipe_finds_only_the_planted_faults(shapes, tmp_path):
    process = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["process"]
    settings = RecipeSettings(
        shapes, 1, parse_steps("recipe", process), {"image_integrity_filter": {"image_root": str(shapes)}}
    )
    run_recipe(settings, shapes / "pretrain.jsonl", tmp_path, FILTERED)
    faults = {row["id"]: row["fault"] for row in read_jsonl(shapes / "ground_truth.jsonl")}
    planted = Counter(faults.values())
    dropped = Counter(faults[row["id"]] for row in read_jsonl(tmp_path / "dropped.jsonl"))
    for fault in ("junk_text", "short_text", "duplicate", "tiny_image", "extreme_aspect"):
        assert dropped[fault] >= 0.95 * planted[fault] > 0, fault
    for fault in ("truncated_image", "not_an_image"):
        assert dropped[fault] == planted[fault] > 0, fault
    good = ("clean", "mismatched")  # another recipe compares captions with their images
    assert sum(dropped[kind] for kind in good) <= 0.02 * sum(planted[kind] for kind in good)


def test_the_command_logs_operators_and_needs_no_torch_or_ray(shapes, tmp_path):
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    script = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from filter_data import main; main()\n"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    config = tmp_path / "config.yaml"
    write_yaml(config, {"image_root": str(shapes), "processes": 1, "recipe": recipe})
    done = subprocess.run(
        [sys.executable, "-c", script, PROJECT / "workflow_scripts", "--config", config]
        + ["--data", shapes / "pretrain.jsonl", "--output-dir", tmp_path / "out put é"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(recipe["process"]) == 10, done.stderr
    assert "[1/10] image_integrity_filter: 300 rows in, 276 out, 24 dropped" in lines[0]
    summary = json.loads((tmp_path / "out put é/summary.json").read_text(encoding="utf-8"))
    assert summary["rows_in"] == 300 == summary["rows_kept"] + summary["rows_dropped"]


CAPTIONS = {
    "Chinese": ["浅色的桌子上放着一个红色的圆球，背景是一面白色的墙。", "红色的圆球"],
    "Japanese": ["白いテーブルの上に赤いボールがあります。", "犬が海辺を走っている"],
    "Thai": ["ลูกบอลสีแดงวางอยู่บนโต๊ะสีขาว"],
    "Korean": ["하얀 식탁 위에 빨간 공이 놓여 있다"],
    "Latin": ["A red ball lies on a white table.", "a dog runs along the beach"],
}
JUNK = ["img", "红", "好好", "photo 12", "。" * 12, "点击这里" * 4, "买" * 60, "A" * 600]


def run_on_captions(tmp_path: Path, captions: list[str], process: list[dict]) -> list[str]:
    """Return the captions that a recipe keeps."""
    rows = []
    for number, caption in enumerate(captions):
        save_image(tmp_path / f"{number}.png", (number, 200, 100), (64, 64))
        rows.append({"id": str(number), "text": build_dj_text(caption), "images": [f"{number}.png"]})
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    roots = {"image_integrity_filter": {"image_root": str(tmp_path)}}
    settings = RecipeSettings(tmp_path, 1, parse_steps("recipe", process), roots)
    run_recipe(settings, tmp_path / "pairs.jsonl", tmp_path / "out", FILTERED)
    return [captions[int(row["id"])] for row in read_jsonl(tmp_path / "out" / FILTERED)]


def test_the_baseline_recipe_suits_languages_without_spaces(tmp_path):
    good = [caption for captions in CAPTIONS.values() for caption in captions]
    process = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["process"]
    assert run_on_captions(tmp_path, [*good, *JUNK], process) == good


def test_the_arguments_in_the_docs_keep_an_empty_caption(tmp_path):
    [line] = re.findall(
        "^arguments: .*min_num: 0.*$", (PROJECT / "docs/data.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    process = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["process"]
    arguments = yaml.safe_load(line)["arguments"]
    process = [{name: arguments.get(name, values) for name, values in step.items()} for step in process]
    assert run_on_captions(tmp_path, ["", *JUNK], process)[0] == ""


def test_max_len_counts_characters_in_all_scripts(tmp_path):
    """Wide characters count as two for `min_len` only."""
    limits = {"min_len": 10, "max_len": 30}
    captions = ["红" * 4, "红" * 5, "红" * 30, "红" * 31, "a" * 9, "a" * 10, "a" * 30, "a" * 31]
    kept_captions = run_on_captions(tmp_path, captions, [{"text_length_filter": limits}])
    assert kept_captions == ["红" * 5, "红" * 30, "a" * 10, "a" * 30]


@pytest.mark.parametrize(
    ("english", "limits", "loss"),
    [
        (9, {"max_num": 6}, "drops 3 of 12 rows (3 of 3 in Chinese). "),
        (4, {"max_num": 6}, "drops 3 of 7 rows (3 of 3 in Chinese). "),
        (3, {"min_num": 6}, "drops 3 of 6 rows (3 of 3 in Latin). "),
        (9, {"min_num": 1}, None),
    ],
)
def test_a_loss_of_many_rows_or_of_one_script_is_noted(tmp_path, capsys, english, limits, loss):
    captions = [f"a dog runs beside {word}" for word in "abcdefghi"[:english]]
    captions += ["浅色的桌子上放着一个红色的圆球", "浅色的桌子上放着一个蓝色的方块", "浅色的桌子上放着一个绿色的方块"]
    run_on_captions(tmp_path, captions, [{"words_num_filter": {"min_num": 1} | limits}])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert lines == [] if loss is None else len(lines) == 1 and f"words_num_filter {loss}" in lines[0]


@pytest.mark.parametrize(
    "step",
    [
        {"length_balance_filter": {"bucket_words": 5, "keep_fraction": 0.5}},
        {"length_balance_filter": {"bucket_words": 5, "keep_rows": 4}},
        {"random_selector": {"select_ratio": 0.5}},
    ],
    ids=["fraction", "rows", "data_juicer"],
)
def test_a_requested_loss_is_not_noted(tmp_path, capsys, step):
    captions = [f"a dog runs beside {word}" for word in "abcdefghi"]
    assert len(run_on_captions(tmp_path, captions, [step])) == 4
    assert "note: " not in capsys.readouterr().err


SETTINGS = {"processes": 1, "recipe": {"process": [{"text_length_filter": {}}]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"imageroot": "x"}, "imageroot: unknown key; did you mean 'image_root'?"),
        ({"image_root": "/no/such/folder"}, "image_root: there is no folder /no/such/folder"),
        ({"processes": 0}, "processes: expected an integer from 1 to 4096 or null, found 0"),
    ],
)
def test_messages_about_settings_name_file_and_key(tmp_path, change, message):
    write_yaml(tmp_path / "config.yaml", {"image_root": str(tmp_path)} | SETTINGS | change)
    with pytest.raises(InputError, match=re.escape(f"config.yaml: {message}")):
        read_filter_settings(tmp_path / "config.yaml")


def test_processes_null_means_all_cores_of_this_process(tmp_path):
    write_yaml(tmp_path / "config.yaml", {"image_root": str(tmp_path)} | SETTINGS | {"processes": None})
    assert read_filter_settings(tmp_path / "config.yaml").processes == len(os.sched_getaffinity(0))
