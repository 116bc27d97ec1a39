"""Untrusted folders of a training stage: only a LoRA's regular files are read, and no code is published."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dj2mgm.errors import InputError
from dj2mgm.features.publish.stock_weights import drop_code, write_adapter
from dj2mgm.models.trained_weights import load_stage_weights

FILES = ("projector.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")


@pytest.fixture
def stage(tmp_path) -> Path:
    stage = tmp_path / "stage"
    (stage / "adapter").mkdir(parents=True)
    for name in FILES[:2]:
        save_file({"a": torch.zeros(1)}, stage / name)
    (stage / FILES[2]).write_text(json.dumps({"peft_type": "LORA"}))
    return stage


def refusal(stage: Path) -> str:
    """Return the message with which all readers refuse a stage."""
    messages = set()
    for read in (
        lambda: load_stage_weights(torch.nn.Linear(1, 1), stage),
        lambda: write_adapter(None, stage, "a/b", 1, None),
    ):
        with pytest.raises(InputError) as error:
            read()
        messages.add(str(error.value))
    [sentence] = messages
    return sentence


@pytest.mark.parametrize("name", [FILES[0], FILES[2], "language_model.safetensors"])
def test_a_link_out_of_a_stage_is_not_followed(stage, tmp_path, name):
    (tmp_path / "secret").write_text("secret")
    (stage / name).unlink(missing_ok=True)
    (stage / name).symlink_to(tmp_path / "secret")
    assert f"{stage / name} is a link out of its folder" in refusal(stage)


def test_a_link_to_another_adapter_is_not_followed(stage, tmp_path):
    (stage / "adapter").rename(tmp_path / "adapter")
    (stage / "adapter").symlink_to(tmp_path / "adapter")
    assert "is a link out of its folder" in refusal(stage)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_pipe_in_a_stage_does_not_block(stage, name):
    (stage / name).unlink()
    os.mkfifo(stage / name)
    assert f"{stage / name} is not a regular file but a pipe" in refusal(stage)


def test_a_stage_in_a_hub_snapshot_is_read(stage, tmp_path):
    blobs, snapshot = tmp_path / "cache/models--a--b/blobs", tmp_path / "cache/models--a--b/snapshots/1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    stage.rename(snapshot / "stage")
    config = snapshot / "stage" / FILES[2]
    config.rename(blobs / "2")
    config.symlink_to("../../../../blobs/2")
    (blobs / "2").write_text(json.dumps({"peft_type": "XLORA"}))
    assert "peft_type must be LORA" in refusal(snapshot / "stage")  # change the file after it was read


@pytest.mark.parametrize("kind", ["XLORA", ["LORA"]])
def test_an_adapter_that_is_not_a_lora_is_refused(stage, kind):
    (stage / FILES[2]).write_text(json.dumps({"peft_type": kind}))
    assert f"adapter_config.json: peft_type must be LORA, found {kind!r}" in refusal(stage)


@pytest.mark.parametrize("name", FILES[1:])
def test_incomplete_adapter_is_not_searched_on_the_hub(stage, name):
    (stage / name).rename(stage / "adapter/adapter_model.bin")
    assert f"is damaged (it has no {Path(name).name})" in refusal(stage)


def test_a_published_model_names_no_code(tmp_path):
    (tmp_path / "part").mkdir()
    values = {"model_type": "llava", "text_config": {"a": 1}}
    for name in ("config.json", "tokenizer_config.json", "part/processor_config.json"):
        (tmp_path / name).write_text(json.dumps(values | {"auto_map": {"AutoModel": "evil/repository--code.Model"}}))
    plain = tmp_path / "generation_config.json"
    plain.write_text('{"do_sample":false}')
    drop_code(tmp_path)
    for name in ("config.json", "tokenizer_config.json", "part/processor_config.json"):
        assert json.loads((tmp_path / name).read_text()) == values
    assert plain.read_text() == '{"do_sample":false}'
