"""Predicted minutes and disk of the stages, compared with runs on H100 and H200 (docs/measurements/training.md)."""

import re
import sys
from dataclasses import replace

import pytest
import torch

import plan_memory
from dj2mgm.planning.architecture import find_architecture
from dj2mgm.planning.plan_table import (
    Amounts,
    PlannedTraining,
    compute_slowdown,
    estimate_rate,
    predict_disk,
    predict_times,
    shorten_workload,
)
from dj2mgm.planning.prediction import Machine, TrainingPlan, ZeroConfig
from dj2mgm.planning.search import find_fastest, list_candidates, rate_plan
from dj2mgm.planning.step import Workload
from dj2mgm.settings.targets import CARDS, find_card
from dj2mgm.settings.training_stages import LoraSettings, read_deepspeed
from dj2mgm.training.deepspeed_config import complete_deepspeed_config
from paths import PROJECT
from run_main import run_main

sys.path.append(str(PROJECT / "benchmarks"))
import predicted_times

MEASURED_GPU = Machine(1, 22.0, 100.0)  # GiB free in the measured runs
LORA = LoraSettings(r=16, alpha=32, dropout=0.1, targets=["q_proj", "v_proj", "o_proj"])
BATCHES = {"stage1": 256, "lora": 128}


def make_workload(model: str, tuning: str) -> Workload:
    architecture = find_architecture(model)
    lora = LORA if tuning == "lora" else None
    return shorten_workload(
        Workload(architecture, tuning, architecture.image_tokens + 2000, 2000, torch.bfloat16, True, lora)
    )


def complete(workload: Workload, name: str = "zero2") -> dict:
    return complete_deepspeed_config(read_deepspeed(name, "deepspeed"), workload.architecture.hidden_size)


def predict_rate(model, tuning, deepspeed, micro_batch, interval, card, gpus=1):
    workload, batch = make_workload(model, tuning), BATCHES[tuning]
    zero = ZeroConfig.from_deepspeed(complete(workload, deepspeed))
    plan = TrainingPlan(deepspeed, zero, interval, micro_batch, -(-batch // micro_batch // gpus))
    candidate = rate_plan(workload, plan, replace(MEASURED_GPU, gpus=gpus), batch)
    return estimate_rate(PlannedTraining(workload, candidate, batch, workload.architecture), gpus, CARDS[card])


@pytest.mark.parametrize(
    ("model", "tuning", "micro_batch", "interval", "card", "measured", "error"),
    [
        ("mgm-2b", "lora", 8, 18, "h200", 61.2, 0.03),
        pytest.param("mgm-2b", "lora", 7, 16, "h100", 54.0, 0.03, marks=pytest.mark.slow),
        pytest.param("mgm-2b", "stage1", 16, 8, "h200", 74.6, 0.03, marks=pytest.mark.slow),
        ("mgm-2b", "stage1", 14, 0, "h100", 72.7, 0.07),
        ("qwen3-vl-2b", "lora", 12, 0, "h200", 110.9, 0.03),
        pytest.param("qwen3-vl-2b", "lora", 10, 0, "h100", 83.3, 0.18, marks=pytest.mark.slow),
        pytest.param("smolvlm2-2.2b", "lora", 5, 0, "h100", 22.2, 0.10, marks=pytest.mark.slow),
        pytest.param("paligemma2-3b", "lora", 8, 16, "h200", 96.3, 0.08, marks=pytest.mark.slow),
        pytest.param("internvl3.5-2b", "lora", 2, 0, "h100", 10.6, 0.10, marks=pytest.mark.slow),
    ],
)
def test_rates_are_near_the_measured_ones(model, tuning, micro_batch, interval, card, measured, error):
    assert predict_rate(model, tuning, "zero2", micro_batch, interval, card) == pytest.approx(measured, rel=error)


@pytest.mark.parametrize(
    ("model", "micro_batch", "interval", "measured"),
    [("mgm-2b", 8, 18, 117.9), pytest.param("qwen3-vl-2b", 14, 16, 218.4, marks=pytest.mark.slow)],
)
def test_rates_of_two_gpus_are_near_the_measured_ones(model, micro_batch, interval, measured):
    assert predict_rate(model, "lora", "zero1", micro_batch, interval, "h200", 2) == pytest.approx(measured, rel=0.06)


def test_minutes_are_near_the_measured_ones():
    # MGM-2B, 10 000 pairs and 12 000 instructions on one H100
    workloads = {"pretrain": make_workload("mgm-2b", "stage1"), "finetune": make_workload("mgm-2b", "lora")}
    configs = {"zero2": complete(workloads["pretrain"])}
    trainings = {}
    for stage, batch in (("pretrain", 256), ("finetune", 128)):
        workload = workloads[stage]
        candidate = find_fastest(list_candidates(workload, MEASURED_GPU, configs, batch))
        trainings[stage] = PlannedTraining(workload, candidate, batch, workload.architecture)
    amounts = Amounts({"pretrain": 10_000, "finetune": 12_000}, 500)
    times = predict_times(trainings, 1, CARDS["h100"], amounts)
    seconds = [time.seconds for time in times]
    print([f"{second:.0f} s" for second in seconds])
    assert seconds == pytest.approx([220.6, 313.9, 49], rel=0.06)
    assert trainings["finetune"].candidate.plan.micro_batch == 7
    disk = predict_disk(workloads, None)
    assert disk["downloaded weights"] == disk["assembled model"] == pytest.approx(5.6, abs=0.1)


def test_the_bandwidth_makes_an_h100_slower_than_an_h200():
    assert compute_slowdown(CARDS["h200"]) == 1
    assert compute_slowdown(CARDS["h100"]) == pytest.approx(1.12, abs=0.01)


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA A10G", None)],
)
def test_only_the_same_card_has_its_rates(device, name):
    assert find_card(device) is (CARDS[name] if name else None)


@pytest.fixture
def plan(monkeypatch, capsys):
    monkeypatch.chdir(PROJECT)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it, and the plan would have this width
    flags = ["model=smolvlm2-500m", "tunings=[lora]", "deepspeed=[zero2]", "global_batch=128"]

    def run(*further: str):
        return run_main(plan_memory, *flags, "sequence=2048", *further, capture=capsys)

    return run


def test_a_plan_for_another_card_states_assumptions(plan, monkeypatch):
    monkeypatch.setattr(plan_memory, "find_architecture", lambda name: find_architecture("smolvlm2-2.2b"))
    done = plan("gpu=rtx-3090", "samples={finetune: 1000}", "held_out=50")
    assert done.status == 0, done.stderr
    assert "RTX 3090: 23.68 GiB, 71 TFLOP/s in bf16, 936 GB/s, PCIe 32 GB/s (data sheet, not measured)" in done.stdout
    assert "1 × 22.68 GiB of GPU memory, 60.00 GiB of host memory" in done.stdout
    [finetune] = re.findall(r"^ finetune +1,000 samples +([\d.]+) +([\d.]+) *$", done.stdout, flags=re.MULTILINE)
    rate, minutes = map(float, finetune)
    assert minutes == pytest.approx((80 + 1000 / rate) / 60, abs=0.2)
    assert "50 held-out images" in done.stdout and "disk " in done.stdout


def test_an_unknown_card_is_refused_with_the_nearest_name(plan):
    done = plan("gpu=rtx-409")
    assert done.status == 2 and done.stderr.startswith("error: the command line: gpu: expected rtx-3090, ")
    assert "did you mean 'rtx-4090'?" in done.stderr


@pytest.mark.parametrize(
    "model",
    [
        "qwen3-vl-2b",
        pytest.param("mgm-2b", marks=pytest.mark.slow),
        pytest.param("smolvlm2-2.2b", marks=pytest.mark.slow),
    ],
)
def test_the_tables_of_both_readmes_are_what_the_plan_predicts(model):
    assert model in predicted_times.MODELS
    row = predicted_times.build_row(model)
    for page in predicted_times.PAGES:
        lines = (PROJECT / page).read_text(encoding="utf-8").splitlines()
        assert row in lines, "run python benchmarks/predicted_times.py --write"
