"""Someone's own data, in particular the Better Synth challenge's folders as they come."""

import json
import shutil

import pytest
from better_synth_kit import QUESTION, save_kit
from places import PROJECT

from errors import InputError
from files import read_json, read_jsonl
from formats.own_data import write_own_data
from settings.datasets import resolve_dataset


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """The kit beside a copy of config/, as the current folder."""
    shutil.copytree(PROJECT / "config", tmp_path / "config")
    monkeypatch.chdir(tmp_path)
    save_kit(tmp_path / "better_synth")
    return tmp_path / "better_synth"


def test_the_challenges_folders_become_the_workflows_files(kit, tmp_path):
    dataset = resolve_dataset("better_synth")
    summary = write_own_data(dataset["settings"], tmp_path / "out")
    assert summary == {"pretrain": 4, "finetune": 3, "evaluation": 2}
    pairs = list(read_jsonl(tmp_path / "out/pretrain.jsonl"))
    assert {row["question"] for row in pairs} == {QUESTION}
    assert all((tmp_path / dataset["images"]["pretrain"] / row["images"][0]).is_file() for row in pairs)
    instructions = read_json(tmp_path / "out/finetune.json")
    assert [row["id"] for row in instructions] == ["000000033471", "000000033471~2", "7"]
    assert (tmp_path / dataset["images"]["finetune"] / instructions[0]["image"]).is_file()


def test_a_pair_whose_question_is_not_there_is_named(kit, tmp_path):
    path = kit / "input/pretrain_stage_1_10k/stage_1.json"
    path.write_text(json.dumps(read_json(path)[1:]))
    with pytest.raises(InputError, match="stage_1.json has no row with the id '000000000'"):
        write_own_data(resolve_dataset("better_synth")["settings"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
