"""Types of the stages' settings: each key has one definition and reaches its stage."""

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
from dj2mgm.settings.data import CAPTIONERS, FilterSection, FilterSettings, JsonlKeys, JsonlSettings
from dj2mgm.settings.training_stages import FinetuneSection, LoraSettings, TuningSection
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_yaml
from paths import PROJECT

SCRIPTS = PROJECT / "workflow_scripts"


def test_both_trainings_have_the_settings_of_stage_2():
    assert FinetuneSection.model_fields.keys() == TuningSection.model_fields.keys()


LOADED = """
from dj2mgm.runs.layers import merge_experiment
from dj2mgm.settings.validation import load_settings
from dj2mgm.runs.stages import STAGES
from dj2mgm.storage.files import write_yaml

images = dict.fromkeys(("pretrain", "finetune", "evaluation"), "images")
for stage, section, holder in {keys}:
    resolved = STAGES[stage].settings(merge_experiment("baseline", {{section: {{"new_key": 7}}}}), images)
    write_yaml("config.yaml", resolved.file_content())
    settings = load_settings(type(resolved), "config.yaml")
    assert (getattr(settings, holder) if holder else settings).new_key == 7
"""
# file, class, stage, section, and the field of the stage's settings that holds the key
NEW_KEYS = [
    ("data.py", "FilterSection", "filter", "filter", ""),
    ("evaluation.py", "Decoding", "generate", "evaluate", "decoding"),
    ("training_stages.py", "TrainingSection", "finetune", "finetune", ""),
]


def test_a_new_key_needs_one_line_in_one_file(tmp_path):
    shutil.copytree(SCRIPTS / "dj2mgm", tmp_path / "workflow_scripts/dj2mgm")
    (tmp_path / "config").symlink_to(PROJECT / "config")
    for file, kind, *_ in NEW_KEYS:
        module = tmp_path / "workflow_scripts/dj2mgm/settings" / file
        text = module.read_text(encoding="utf-8")
        head = re.search(rf'class {kind}\(Section\):\n    """.*?"""\n', text, re.S)[0]
        module.write_text(text.replace(head, head + '\n    new_key: int = setting(3, "a new key")\n'), encoding="utf-8")
    code = LOADED.format(keys=[tuple(keys) for _, _, *keys in NEW_KEYS])
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


@pytest.mark.parametrize("name", CAPTIONERS)
def test_each_captioner_can_be_chosen_and_has_a_section(name, monkeypatch):
    monkeypatch.chdir(PROJECT)
    required = {name: {"model": "somebody/model"}} if name == "openai" else {}
    config = merge_experiment("dj_synth", {"synthesize": {"captioner": name} | required})
    settings = STAGES["synthesize"].settings(config, resolve_dataset(config.dataset).images)
    assert type(settings.captioner) is CAPTIONERS[name] and settings.captioner.name == name


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
