"""Types of the stages' settings: each key has one definition and reaches its stage."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest

from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset
from dj2mgm.errors import InputError
from dj2mgm.runs.layers import merge_experiment
from dj2mgm.runs.stages import STAGES
from dj2mgm.settings.base import Section, StageSettings
from dj2mgm.settings.data import FilterSection, FilterSettings, JsonlKeys, JsonlSettings, PromptKeys
from dj2mgm.settings.evaluation import GenerateSettings, JudgeKeys, JudgeSettings
from dj2mgm.settings.training_stages import FinetuneSection, LoraSettings, TrainingStageSettings, TuningSection
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_yaml
from paths import PROJECT

SCRIPTS = PROJECT / "workflow_scripts"
TOOLS = ("convert_mgm_checkpoint.py", "train_deepspeed.py")  # started by hand, without a stage's settings


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        (FilterSection, FilterSettings),
        (JsonlKeys, JsonlSettings),
        (PromptKeys, GenerateSettings),
        (JudgeKeys, JudgeSettings),
        (TuningSection, TrainingStageSettings),
    ],
)
def test_every_key_of_a_section_is_a_key_of_its_stage(section, settings):
    assert issubclass(settings, section) and settings.model_fields.keys() >= section.model_fields.keys()


def test_both_trainings_have_the_settings_of_stage_2():
    assert FinetuneSection.model_fields.keys() == TuningSection.model_fields.keys()


LOADED = """
from dj2mgm.runs.layers import merge_experiment
from dj2mgm.settings.validation import load_settings
from dj2mgm.runs.stages import STAGES
from dj2mgm.storage.files import write_yaml

images = dict.fromkeys(("pretrain", "finetune", "evaluation"), "images")
resolved = STAGES["{stage}"].settings(merge_experiment("baseline", {{"{section}": {{"new_key": 7}}}}), images)
write_yaml("config.yaml", resolved.file_content())
settings = load_settings(type(resolved), "config.yaml")
assert {value} == 7
"""


@pytest.mark.parametrize(
    ("file", "kind", "stage", "section", "value"),
    [
        ("data.py", "FilterSection", "filter", "filter", "settings.new_key"),
        ("evaluation.py", "Decoding", "generate", "evaluate", "settings.decoding.new_key"),
        ("evaluation.py", "JudgeKeys", "evaluate_clip", "evaluate", "settings.new_key"),
        ("training_stages.py", "TrainingSection", "finetune", "finetune", "settings.new_key"),
    ],
)
def test_a_new_key_needs_one_line_in_one_file(tmp_path, file, kind, stage, section, value):
    shutil.copytree(SCRIPTS / "dj2mgm", tmp_path / "workflow_scripts/dj2mgm")
    (tmp_path / "config").symlink_to(PROJECT / "config")
    module = tmp_path / "workflow_scripts/dj2mgm/settings" / file
    text = module.read_text(encoding="utf-8")
    head = re.search(rf'class {kind}\(Section\):\n    """.*?"""\n', text, re.S)[0]
    module.write_text(text.replace(head, head + '\n    new_key: int = setting(3, "a new key")\n'), encoding="utf-8")
    code = LOADED.format(stage=stage, section=section, value=value)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "workflow_scripts")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


@pytest.mark.parametrize("name", ["baseline", "dj_synth"])
def test_stages_load_the_files_of_the_workflow(name, tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    config = merge_experiment(name, {})
    images = resolve_dataset(config.dataset).images
    for stage in STAGES.values():
        if resolved := stage.settings(config, images):
            write_yaml(tmp_path / "config.yaml", resolved.file_content())
            assert load_settings(type(resolved), tmp_path / "config.yaml").file_content() == resolved.file_content()


def test_no_stage_reads_keys_of_a_dictionary():
    for path in SCRIPTS.glob("*.py"):
        name = path.name
        if name in TOOLS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
        assert "read_yaml" not in called, name
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                assert node.value.id not in ("settings", "config"), f"{name}, line {node.lineno}"


def test_a_value_without_a_field_is_an_error():
    with pytest.raises(TypeError, match="FilterSettings has no workers"):
        FilterSettings.from_sections(FilterSection(), workers=2)


def test_a_file_of_another_stage_is_refused(tmp_path):
    write_yaml(tmp_path / "config.yaml", {"image_root": "images", "processes": 1, "recipe": {}, "lora": None})
    with pytest.raises(InputError, match="config.yaml: lora: unknown key; known are clip, image_root"):
        load_settings(FilterSettings, tmp_path / "config.yaml")


def test_lists_of_settings_keep_their_identity():
    shared = ["a"]
    values = StageSettings.from_sections().file_content()
    assert values == {} and isinstance(LoraSettings(), Section)
    settings = JsonlSettings.from_sections(JsonlKeys(), seed=0, control_tokens=shared, sources={})
    assert settings.file_content()["control_tokens"] is shared
