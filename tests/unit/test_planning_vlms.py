"""The memory plan of transformers' own vision-language models, counted without data beside the same step with data."""

from pathlib import Path

import pytest
import torch
from tiny_families import BUILDERS, save_tiny_family

from dj2mgm.families import family_of
from dj2mgm.memory.architecture import VLMArchitecture, load_architecture
from dj2mgm.memory.step import Workload, build, count_parameters, trace_memory
from dj2mgm.memory.trace import LiveMemory
from dj2mgm.mgm.lora import LoraSettings, wrap_with_lora

LORA = LoraSettings(r=4, alpha=8, dropout=0.0, targets=["q_proj", "v_proj"])
BATCH, ANSWERS = 3, 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for family in BUILDERS:
        save_tiny_family(family, root / family)
    return {family: root / family for family in BUILDERS}


def planned(folder: Path, tuning: str = "lora", **more) -> Workload:
    architecture = load_architecture("tiny", folder)
    sequence = architecture.image_tokens + ANSWERS
    lora = LORA if tuning == "lora" else None
    return Workload(architecture, tuning, sequence, ANSWERS, torch.float32, lora=lora, projector=False, **more)


def with_data(workload: Workload, folder: Path) -> tuple[int, int]:
    """Peak bytes and FLOPs of the same step on the CPU."""
    family = family_of(folder)
    model = family.load(torch.float32, "eager")
    wrapped = wrap_with_lora(model, LORA, family.parts(model).decoder, projector=False).train()
    model.set_attn_implementation("eager")
    inputs = workload.architecture.inputs(workload.sequence, workload.answers, BATCH)
    memory = LiveMemory(("all",), lambda tensor: "all")
    memory.know([*wrapped.parameters(), *wrapped.buffers(), *inputs.values()])
    with memory:
        wrapped(**{name: value.clone() for name, value in inputs.items()}).loss.backward()
    return memory.moments().sum(axis=1).max(), memory.flops


@pytest.mark.parametrize("family", BUILDERS)
def test_a_step_without_data_holds_and_computes_what_one_with_data_does(folders, family, monkeypatch):
    monkeypatch.setattr("dj2mgm.memory.step.ATTENTION", "eager")  # the only one of both devices
    workload = planned(folders[family])
    step = trace_memory(workload, 0, BATCH)
    peak, flops = with_data(workload, folders[family])
    assert step.sizes.sum(axis=1).max() == pytest.approx(peak, rel=0.03)
    assert step.flops == flops


@pytest.mark.parametrize("family", BUILDERS)
def test_larger_batches_and_less_recomputation_need_more(folders, family):
    workload = planned(folders[family])
    peaks = [trace_memory(workload, every, batch).sizes.sum(axis=1).max() for every, batch in ((1, 4), (0, 4), (0, 8))]
    assert peaks == sorted(peaks) and peaks[1] > 1.02 * peaks[0] and peaks[2] > 1.5 * peaks[1]


@pytest.mark.parametrize("family", BUILDERS)
def test_parameters_are_those_that_are_loaded(folders, family):
    workload = planned(folders[family], "stage1")
    loaded = family_of(folders[family]).load(torch.float32, "eager")
    assert isinstance(workload.architecture, VLMArchitecture)
    shapes = {name: parameter.shape for name, parameter in build(workload).named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in loaded.named_parameters()}
    counted = count_parameters(workload)
    assert 0 < sum(counted.trained) < sum(counted.every) / 2
    assert trace_memory(workload, 0, 2).accumulated[-1] == sum(counted.trained)
