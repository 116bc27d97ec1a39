"""Selection of the attention implementation, and refusals of unusable FlashAttention."""

from types import SimpleNamespace

import pytest
import torch

from dj2mgm.errors import InputError
from dj2mgm.models.mgm import MGMForConditionalGeneration
from dj2mgm.runs.stage_settings import require_flash_attention, require_fp8_device
from dj2mgm.settings.configuration import Configuration
from dj2mgm.training.model_preparation import choose_attention
from tiny_models import tiny_mgm


@pytest.mark.parametrize(
    ("setting", "gpu", "bf16", "installed", "expected"),
    [
        ("auto", True, True, True, ("flash_attention_2", None)),
        ("auto", False, True, True, ("sdpa", None)),
        ("auto", True, False, True, ("sdpa", None)),
        ("sdpa", True, True, True, ("sdpa", None)),
        ("flash_attention_2", True, True, True, ("flash_attention_2", None)),
    ],
)
def test_auto_selects_flash_attention_if_it_can_run(setting, gpu, bf16, installed, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("dj2mgm.training.model_preparation.is_flash_attn_2_available", lambda: installed)
    assert choose_attention(SimpleNamespace(attn_implementation=setting, bf16=bf16)) == expected


def test_unusable_flash_attention_is_refused(monkeypatch):
    monkeypatch.setattr("dj2mgm.training.model_preparation.is_flash_attn_2_available", lambda: False)
    requested = SimpleNamespace(attn_implementation="flash_attention_2", bf16=True)
    for spec, missing in ((None, "the package flash-attn, which is not installed"), ("there", "a GPU")):
        monkeypatch.setattr("dj2mgm.training.model_preparation.find_spec", lambda name, spec=spec: spec)
        with pytest.raises(InputError, match=f"attn_implementation: flash_attention_2 needs {missing}; set auto"):
            choose_attention(requested)


def test_flash_attention_needs_its_package_at_parse_time(monkeypatch):
    requested = Configuration(finetune={"attn_implementation": "flash_attention_2"})
    monkeypatch.setattr("dj2mgm.runs.stage_settings.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match="finetune.attn_implementation: flash_attention_2 needs the package flash-attn"
    ):
        require_flash_attention(requested)
    require_flash_attention(Configuration(finetune={"attn_implementation": "sdpa"}))
    monkeypatch.setattr("dj2mgm.runs.stage_settings.find_spec", lambda name: "there")
    require_flash_attention(requested)


def test_a_gpu_run_notes_that_flash_attn_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("dj2mgm.training.model_preparation.is_flash_attn_2_available", lambda: False)
    chosen, remark = choose_attention(SimpleNamespace(attn_implementation="auto", bf16=True))
    assert chosen == "sdpa" and "flash-attn is not installed" in remark


def test_the_setting_applies_to_the_language_model_only(tmp_path):
    tiny_mgm().save_pretrained(tmp_path)
    model = MGMForConditionalGeneration.from_pretrained(tmp_path, attn_implementation={"text_config": "eager"})
    assert model.model.language_model.config._attn_implementation == "eager"
    assert model.model.vision_tower.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_fp8_without_a_gpu_is_refused_before_anything_runs(monkeypatch, tmp_path, stage):
    requested = Configuration(**{stage: {"precision": "fp8"}})
    monkeypatch.setattr("dj2mgm.runs.stage_settings.GPU_DEVICES", [tmp_path / "nvidia0"])
    with pytest.raises(InputError, match=f"{stage}.precision: fp8 needs an NVIDIA GPU, and this machine has none"):
        require_fp8_device(requested)
    require_fp8_device(Configuration())
    (tmp_path / "nvidia0").touch()
    require_fp8_device(requested)
