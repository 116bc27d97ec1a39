"""Memory of a step, traced on the meta device, compared with PyTorch's profiler and other sizes."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.autograd.profiler import profile
from transformers import MambaConfig

from dj2mgm.planning.architecture import Architecture, MGMArchitecture
from dj2mgm.planning.live_memory import LiveMemory
from dj2mgm.planning.step import MemoryTrace, Workload, build_meta_model, count_parameters, trace_memory
from dj2mgm.settings.training_stages import LoraSettings
from tiny_models import mgm_config

LORA = LoraSettings(r=4, alpha=8, dropout=0.1, targets=["q_proj", "v_proj"])


def workload(tuning="lora", fused=False, family="gemma"):
    architecture = MGMArchitecture("tiny", mgm_config(family))
    lora = LORA if tuning == "lora" else None
    return Workload(architecture, tuning, 40, answer_tokens=12, precision=torch.float32, fused=fused, lora=lora)


def train_three_layers(device: str) -> None:
    layers = [torch.randn(200, 200, device=device, requires_grad=True) for _ in range(3)]
    hidden = torch.randn(64, 200, device=device)
    for layer in layers:
        hidden = (hidden @ layer).relu()
    hidden.sum().backward()


def test_the_traced_peak_equals_pytorchs_profiler():
    with profile(profile_memory=True) as profiled:
        train_three_layers("cpu")
    changes = [event.nbytes() for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    memory = LiveMemory(("all",), lambda tensor: "all")
    with memory:
        train_three_layers("meta")
    assert memory.stack_moments().sum(axis=1).max() == np.cumsum(changes).max() > 0


def test_flops_equal_those_of_the_matrix_products():
    memory = LiveMemory(("all",), lambda tensor: "all")
    with memory:
        train_three_layers("meta")
    forward = 3 * 2 * 64 * 200 * 200
    assert memory.flops == forward + 2 * forward - forward // 3, "the first layer's input needs no gradient"


def test_parameters_equal_those_of_the_real_model():
    case = workload("lora")
    model = build_meta_model(case)
    counted = count_parameters(case)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or "projector" in name or "patch_info_mining" in name for name in trained)
    assert sum(counted.all_sizes) == sum(parameter.numel() for parameter in model.parameters())
    assert sum(counted.trained_sizes) == sum(p.numel() for name, p in model.named_parameters() if name in trained)


def peak(case: Workload, checkpointing_interval=0, micro_batch=4) -> int:
    return trace_memory(case, checkpointing_interval, micro_batch).sizes.sum(axis=1).max()


def test_checkpointing_fusion_and_small_batches_need_less():
    case = workload("full")
    assert peak(case, checkpointing_interval=1) <= peak(case, checkpointing_interval=2) <= peak(case)
    assert peak(case, checkpointing_interval=1) < peak(case)
    assert peak(workload("full", fused=True)) < peak(case)
    assert peak(case, micro_batch=2) < peak(case)


def assert_equal_peaks(trace: MemoryTrace, expected: MemoryTrace) -> None:
    assert trace.flops == expected.flops
    assert trace.sizes.sum(axis=1).max() == expected.sizes.sum(axis=1).max()
    assert (trace.sizes.max(axis=0) == expected.sizes.max(axis=0)).all()
    assert (trace.accumulated.max(), trace.latest.max()) == (expected.accumulated.max(), expected.latest.max())


@pytest.mark.parametrize(
    ("tuning", "fused"),
    [
        ("stage1", False),
        ("lora", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("stage1", True), ("lora", False))),
        *(pytest.param("full", fused, marks=pytest.mark.slow) for fused in (False, True)),
    ],
)
def test_replayed_parts_need_as_much_as_executed_parts(tuning, fused, monkeypatch):
    replayed, run = workload(tuning, fused), workload(tuning, fused)
    monkeypatch.setattr("dj2mgm.models.loss.ROWS_AT_ONCE", 10)  # five chunks, the last one with fewer rows
    replays, plain = [], LiveMemory.replay
    monkeypatch.setattr(LiveMemory, "replay", lambda *args: replays.append(args) or plain(*args))
    traces = [trace_memory(replayed, interval, 4) for interval in (0, 1, 2)]
    assert len(replays) > 3 * 2, "both passes of a layer, and frozen layers"
    monkeypatch.setattr("dj2mgm.planning.step.replay_layers", lambda model: None)
    monkeypatch.setattr("dj2mgm.planning.step.replay_chunks", nullcontext)
    for trace, interval in zip(traces, (0, 1, 2), strict=True):
        assert_equal_peaks(trace, trace_memory(run, interval, 4))


def test_a_trace_does_not_depend_on_earlier_ones():
    case, again = workload("lora"), workload("lora")
    first = trace_memory(case, 0, 4)
    trace_memory(again, 1, 2)
    second = trace_memory(again, 0, 4)
    assert (first.sizes == second.sizes).all() and first.flops == second.flops
    assert (first.accumulated == second.accumulated).all()


def test_logits_are_proportional_to_tokens_with_loss():
    case = workload("lora")
    fewer = Workload(case.architecture, "lora", 40, 2, torch.float32, lora=LORA)
    logits = [trace_memory(workload, 0, 4).sizes[:, 1].max() for workload in (case, fewer)]
    assert logits[0] == pytest.approx(6 * logits[1], rel=0.05)


@pytest.mark.parametrize("tuning", ["stage1", "lora", "full"])
def test_every_trained_parameter_gets_its_gradient(tuning):
    case = workload(tuning)
    step = trace_memory(case, 1, 2)
    assert step.accumulated[-1] == sum(count_parameters(case).trained_sizes)
    assert step.latest.sum() == step.accumulated[-1]


def test_a_text_model_and_the_scan_of_mamba_are_planned():
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=2)
    case = Workload(Architecture("mamba", config), "full", 12, 12, torch.float32)
    states = 32 * 12 * 4 * 4  # inner size × tokens × states × bytes, of one sample
    assert peak(case, micro_batch=1) > 2 * 2 * states, "two layers keep decay and states of every token"
    assert peak(case, checkpointing_interval=1) < peak(case)
