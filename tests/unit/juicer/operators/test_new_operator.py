"""A new operator needs one file and one entry, shown with docs/examples/operator.py in a copy of the code."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dj2mgm.data.formats import build_dj_text
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl, write_yaml
from forked_python import forked_python
from paths import PROJECT
from tiny_models import save_image

EXTENDING = (PROJECT / "docs/extending.md").read_text(encoding="utf-8")
NAME = "word_frequency_filter"
CAPTIONS = ["a cat", "a dog", "a cat and a dog", "cat cat", "ein Hund"]
FREQUENCIES = {"a": -1.0, "and": -2.0, "cat": -3.0, "dog": -9.0}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """Copy workflow_scripts/ and add one file, and config/schemas/ with its entry."""
    copy = tmp_path_factory.mktemp("project") / "workflow_scripts"
    shutil.copytree(PROJECT / "config/schemas", copy.parent / "config/schemas")
    reviewed = copy.parent / "config/schemas/operators.yaml"
    text = reviewed.read_text(encoding="utf-8")
    [entry] = re.findall(r"```yaml\n# \S+operators\.yaml, .*\n((?:.*\n)+?)```", EXTENDING)
    reviewed.write_text(text.replace("\noperators:\n", f"\noperators:\n{entry}"), encoding="utf-8")
    shutil.copytree(PROJECT / "workflow_scripts", copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "docs/examples/operator.py", copy / f"dj2mgm/juicer/operators/{NAME}.py")
    return copy


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/frequencies.json").write_text(json.dumps(FREQUENCIES))
    return tmp_path / "model"


def run_filter(scripts: Path, folder: Path, captions: list[str], **arguments) -> subprocess.CompletedProcess:
    save_image(folder / "a.png")
    rows = [{"id": f"r{n}", "text": build_dj_text(text), "images": ["a.png"]} for n, text in enumerate(captions)]
    write_jsonl(folder / "pairs.jsonl", rows)
    settings = {"image_root": str(folder), "processes": 2, "recipe": {"process": [{NAME: arguments}]}}
    write_yaml(folder / "config.yaml", settings)
    flags = ["--config", folder / "config.yaml", "--data", folder / "pairs.jsonl", "--output-dir", folder / "out"]
    return subprocess.run([forked_python(), scripts / "filter_data.py", *flags], capture_output=True, text=True)


def test_a_new_operator_needs_only_one_file(scripts, model, tmp_path):
    done = run_filter(scripts, tmp_path, CAPTIONS, model=str(model), keep_fraction=0.5)
    assert done.returncode == 0, done.stderr
    assert [row["id"] for row in read_jsonl(tmp_path / "out/filtered.jsonl")] == ["r0", "r3", "r4"]
    assert [row["id"] for row in read_jsonl(tmp_path / "out/dropped.jsonl")] == ["r1", "r2"]
    [step] = read_json(tmp_path / "out/summary.json")["operators"]
    assert step["unknown_words"] == {"captions": 5, "without_known_words": 1}


def test_a_new_operators_report_can_stop_the_stage(scripts, model, tmp_path):
    done = run_filter(scripts, tmp_path, ["ein Hund"], model=str(model))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {model} knows no word of any caption")


def test_a_new_operators_file_and_model_are_inputs_of_the_work(scripts, model, tmp_path):
    """This holds also at Snakemake's start, when Data-Juicer is not imported."""
    (tmp_path / "pairs.jsonl").touch()
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from dj2mgm.script_modules import find_modules\n"
        "from dj2mgm.recipes.recipe_parsing import parse_recipe, parse_steps\n"
        "name, model, data = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])\n"
        "process = [{name: {'model': str(model), 'keep_fraction': 0.5, 'batch_size': 8}}]\n"
        "parse_recipe('recipe', {'process': process})\n"
        "assert 'data_juicer' not in sys.modules\n"
        "scripts = Path(sys.argv[4])\n"
        "assert scripts / f'dj2mgm/juicer/operators/{name}.py' in find_modules(scripts / 'filter_data.py')\n"
        "from dj2mgm.juicer.run_recipe import compute_recipe_fingerprint\n"
        "from dj2mgm.juicer.recipe_settings import RecipeSettings\n"
        "steps = parse_steps('recipe', [{name: {'model': str(model)}}])\n"
        "settings = RecipeSettings(data.parent, 1, steps)\n"
        "before = compute_recipe_fingerprint(steps, settings, data)\n"
        "(model / 'frequencies.json').write_text('{}')\n"
        "assert compute_recipe_fingerprint(steps, settings, data) != before\n"
    )
    arguments = [forked_python(), "-c", code, NAME, model, tmp_path / "pairs.jsonl", scripts]
    environment = os.environ | {"PYTHONPATH": str(scripts)}
    done = subprocess.run(arguments, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
