"""Weighted means of LoRA adapters, against the sum of their products B A."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from dj2mgm.errors import InputError
from dj2mgm.features.studies.merged_adapters import merge_stages
from dj2mgm.storage.files import read_json, write_json

RANK, ALPHA = 2, 6


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def write_stage(folder, seed: int, rank: int = RANK):
    """Write a stage's folder with a random adapter and projector, and return the folder."""
    config = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=["0", "1"])
    wrapped = get_peft_model(build_model(), config)
    torch.manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    wrapped.save_pretrained(folder / "adapter")
    save_file({"weight": torch.randn(3, 3)}, folder / "projector.safetensors")
    return folder


def load_weights(stage) -> list[torch.Tensor]:
    """Return the model's weights with the merged adapter."""
    return [layer.weight for layer in PeftModel.from_pretrained(build_model(), stage / "adapter").merge_and_unload()]


def test_the_merged_adapter_adds_the_mean_of_all_differences(tmp_path):
    stages = [write_stage(tmp_path / str(seed), seed) for seed in (1, 2, 3)]
    shares = [0.5, 0.3, 0.2]
    (tmp_path / "merged").mkdir()
    merge_stages(dict(zip(stages, shares, strict=True)), tmp_path / "merged")
    base = [layer.weight for layer in build_model()]
    expected = [
        start + sum(share * (load_weights(stage)[layer] - start) for share, stage in zip(shares, stages, strict=True))
        for layer, start in enumerate(base)
    ]
    torch.testing.assert_close(load_weights(tmp_path / "merged"), expected)
    projectors = [load_file(stage / "projector.safetensors")["weight"] for stage in stages]
    mean = sum(share * projector for share, projector in zip(shares, projectors, strict=True))
    torch.testing.assert_close(load_file(tmp_path / "merged/projector.safetensors")["weight"], mean)
    assert json.loads((tmp_path / "merged/adapter/adapter_config.json").read_text())["r"] == 3 * RANK


def test_a_single_source_gives_its_own_model(tmp_path):
    first, second = (write_stage(tmp_path / str(seed), seed) for seed in (1, 2))
    (tmp_path / "merged").mkdir()
    merge_stages({first: 1.0, second: 0.0}, tmp_path / "merged")
    torch.testing.assert_close(load_weights(tmp_path / "merged"), load_weights(first))


@pytest.mark.parametrize("changes", [{"alpha_pattern": {"0": 9}}, {"use_rslora": True}], ids=str)
def test_adapters_that_are_not_plain_are_refused(changes, tmp_path):
    stages = [write_stage(tmp_path / name, 1) for name in ("1", "2")]
    for stage in stages:
        file = stage / "adapter/adapter_config.json"
        write_json(file, read_json(file) | changes)
    (tmp_path / "merged").mkdir()
    with pytest.raises(InputError, match=f"{next(iter(changes))} is set, so the LoRAs cannot be merged"):
        merge_stages(dict.fromkeys(stages, 0.5), tmp_path / "merged")


def test_a_truncated_adapter_or_another_rank_is_named(tmp_path):
    stages = [write_stage(tmp_path / "1", 1), write_stage(tmp_path / "2", 2, rank=4)]
    (tmp_path / "merged").mkdir()
    with pytest.raises(InputError, match="2/adapter/adapter_config.json: r differs from"):
        merge_stages(dict.fromkeys(stages, 0.5), tmp_path / "merged")
    file = write_stage(tmp_path / "2", 2) / "adapter/adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match="2/adapter/adapter_model.safetensors is damaged"):
        merge_stages(dict.fromkeys(stages, 0.5), tmp_path / "merged")
