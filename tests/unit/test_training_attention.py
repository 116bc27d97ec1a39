from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_mgm

from dj2mgm.mgm import MGMForConditionalGeneration
from dj2mgm.training.model import attention_of


@pytest.mark.parametrize(
    ("wanted", "gpu", "bf16", "installed", "expected"),
    [
        ("auto", True, True, True, ("flash_attention_2", None)),
        ("auto", False, True, True, ("sdpa", None)),
        ("auto", True, False, True, ("sdpa", None)),
        ("sdpa", True, True, True, ("sdpa", None)),
        ("flash_attention_2", True, True, False, ("flash_attention_2", None)),
    ],
)
def test_auto_is_flash_attention_where_it_can_run(wanted, gpu, bf16, installed, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("dj2mgm.training.model.is_flash_attn_2_available", lambda: installed)
    assert attention_of(SimpleNamespace(attn_implementation=wanted, bf16=bf16)) == expected


def test_a_gpu_run_without_flash_attn_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("dj2mgm.training.model.is_flash_attn_2_available", lambda: False)
    chosen, remark = attention_of(SimpleNamespace(attn_implementation="auto", bf16=True))
    assert chosen == "sdpa" and "flash-attn is not installed" in remark


def test_the_implementation_of_the_language_model_is_chosen_alone(tmp_path):
    tiny_mgm().save_pretrained(tmp_path)
    model = MGMForConditionalGeneration.from_pretrained(tmp_path, attn_implementation={"text_config": "eager"})
    assert model.model.language_model.config._attn_implementation == "eager"
    assert model.model.vision_tower.config._attn_implementation == "sdpa"
