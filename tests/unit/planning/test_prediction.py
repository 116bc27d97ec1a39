"""Predictions compared with measurements of MGM-2B's shape on one H200, and predictions for fictional machines."""

import sys
from dataclasses import replace
from functools import cache

import pytest

from dj2mgm.planning.architecture import find_architecture
from dj2mgm.planning.prediction import Machine, TrainingPlan, ZeroConfig, compute_model_states, predict
from dj2mgm.planning.search import find_fastest, list_candidates, suggest_remedies
from dj2mgm.planning.step import Parameters, Workload
from dj2mgm.settings.training_stages import LoraSettings
from dj2mgm.storage.files import read_json
from dj2mgm.training.deepspeed_config import complete_deepspeed_config
from paths import PROJECT
from plain_mgm import PlainArchitecture

sys.path.append(str(PROJECT / "benchmarks"))
from memory_plan import CONFIGURATIONS

LORA = LoraSettings(r=16, alpha=32, dropout=0.1, targets=["q_proj", "v_proj", "o_proj"])
STORY = Machine(gpus=1, gpu_gib=23.63, host_gib=62.6)
# Runs of benchmarks/memory_plan.py: GiB allocated on the GPU, and held by the host.
MEASURED = {
    "lora_plain_zero2": (10.02, 1.77),
    "lora_plain_zero3": (6.64, 8.98),
    "lora_zero0": (8.81, 1.88),
    "lora_zero2_recomputed": (12.02, 2.00),
    "lora_zero2_compiled": (8.58, 2.79),
    "lora_zero3": (12.66, 1.95),
    "lora_zero3_offload": (9.53, 9.17),
    "stage_1_plain": (17.82, 1.77),
    "stage_1": (18.99, 1.92),
    "stage_1_offload": (10.29, 2.18),
    "full_8bit": (19.98, 10.71),
    "full_zero2": (52.64, 6.63),
    "full_zero2_offload": (12.03, 71.03),
    "full_zero3_offload": (5.99, 67.71),
}
# one configuration per kind of training and per method that saves memory; the others are slow
TYPICAL = {
    "lora_plain_zero3",
    "lora_zero2_compiled",
    "lora_zero3_offload",
    "stage_1",
    "full_8bit",
    "full_zero2_offload",
}
RAN_OUT_OF_24_GIB = ["lora_zero2", "lora_too_large"]
SEQUENCE, ASKED, IMAGE = {"pretrain": 640, "finetune": 1024}, {"pretrain": 0, "finetune": 215}, 576


@pytest.fixture(scope="module", autouse=True)
def in_the_project():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(PROJECT)
        yield


@pytest.fixture(scope="module")
def mgm_2b():
    return find_architecture("mgm-2b")


def deepspeed(name: str, hidden_size: int = 2048) -> dict:
    return complete_deepspeed_config(read_json(PROJECT / f"config/deepspeed/{name}.json"), hidden_size)


@cache
def workload(architecture, tuning, sequence, answers):
    return Workload(architecture, tuning, sequence, answers, lora=LORA if tuning == "lora" else None)


def predicted(architecture, name: str):
    run = CONFIGURATIONS[name]
    sequence = SEQUENCE[run.stage]
    if run.plain:
        architecture = PlainArchitecture("plain", architecture.config)
    answers = sequence if run.plain else sequence - IMAGE - ASKED[run.stage]
    lora = LORA if run.tuning == "lora" else None
    case = Workload(architecture, run.tuning, sequence, answers, fused=run.compile, lora=lora)
    zero = ZeroConfig.from_deepspeed(deepspeed(run.deepspeed))
    checkpointing_interval, accumulation = int(run.activation_checkpointing), run.gradient_accumulation_steps
    return predict(case, TrainingPlan(name, zero, checkpointing_interval, run.micro_batch_size, accumulation), STORY)


@pytest.mark.parametrize(
    "name", [name if name in TYPICAL else pytest.param(name, marks=pytest.mark.slow) for name in MEASURED]
)
def test_predictions_are_within_error_bars_of_measurements(mgm_2b, name):
    gpu, host = MEASURED[name]
    prediction = predicted(mgm_2b, name)
    assert prediction.allocated_gib == pytest.approx(gpu, rel=0.10)
    assert prediction.host_gib == pytest.approx(host, rel=0.15)


@pytest.mark.parametrize("name", RAN_OUT_OF_24_GIB)
def test_runs_out_of_memory_were_predicted(mgm_2b, name):
    assert predicted(mgm_2b, name).gpu_gib > 24


def test_every_configuration_of_the_benchmark_was_measured():
    assert {*MEASURED, *RAN_OUT_OF_24_GIB} == set(CONFIGURATIONS)


def test_on_24_gib_lora_fits_and_full_fine_tuning_does_not(mgm_2b):
    full, lora = workload(mgm_2b, "full", 1024, 448), workload(mgm_2b, "lora", 1024, 448)
    zero2, zero3 = ({name: deepspeed(name)} for name in ("zero2_offload", "zero3_offload"))
    for candidate in list_candidates(full, STORY, zero2, 128, [1, 2, 4], [0, 1]):
        assert candidate.prediction.host_gib > 65
        assert "GiB of host memory are needed, 62.6 GiB are available" in candidate.shortage
    [fits] = list_candidates(lora, STORY, zero3, 128, [1], [1])
    assert fits.fits and fits.prediction.gpu_gib < 10 and fits.prediction.host_gib < 15


def test_each_loader_process_keeps_a_micro_batchs_images(mgm_2b):
    case, zero = workload(mgm_2b, "lora", 1024, 448), ZeroConfig.from_deepspeed(deepspeed("zero2"))
    images = [
        predict(replace(case, loader_workers=number), TrainingPlan("zero2", zero, 1, 2, 1), STORY).host["images"]
        for number in (4, 64)
    ]
    assert images[1] / images[0] == pytest.approx((1 + 64 + 1) / (1 + 4 + 1))


def test_remedies_name_sufficient_amounts(mgm_2b):
    small = Machine(gpus=1, gpu_gib=4.0, host_gib=62.6)
    case = workload(mgm_2b, "lora", 1024, 448)
    configs = {"zero3_offload": deepspeed("zero3_offload")}
    candidates = list_candidates(case, small, configs, 128, [1, 2], [0, 1])
    assert find_fastest(candidates) is None
    remedies = suggest_remedies(case, candidates, small)
    [needed] = [remedy for remedy in remedies if "of the GPU's memory instead of 4.0" in remedy]
    enough = Machine(1, float(needed.split(" GiB")[0]) + 0.05, 62.6)
    assert find_fastest(list_candidates(case, enough, configs, 128, [1, 2], [0, 1]))


def test_remedies_name_nf4_if_it_is_enough(mgm_2b):
    case, configs = workload(mgm_2b, "lora", 1024, 448), {"zero2": deepspeed("zero2"), "zero3": deepspeed("zero3")}
    remedies = {}
    for gib in (2.0, 9.0):
        machine = Machine(gpus=1, gpu_gib=gib, host_gib=62.6)
        candidates = list_candidates(case, machine, configs, 128, [1], [1])
        assert find_fastest(candidates) is None
        remedies[gib] = suggest_remedies(case, candidates, machine)
        # a plan that is in 4 bits already gets no such advice
        assert not any("nf4" in remedy for remedy in suggest_remedies(replace(case, nf4=True), candidates, machine))
    assert not any("nf4" in remedy for remedy in remedies[2.0])
    assert any("precision: nf4" in remedy and "fits by zero2" in remedy for remedy in remedies[9.0]), remedies


@pytest.fixture(scope="module")
def mamba_on_six_gpus():
    machine = Machine(gpus=6, gpu_gib=32.0, host_gib=512.0)
    architecture = find_architecture("7b_mamba")
    return Workload(architecture, "full", 1024, 1024), machine


def test_a_7b_mamba_is_refused_with_zero_2_and_fits_with_zero_3(mamba_on_six_gpus):
    case, machine = mamba_on_six_gpus
    for candidate in list_candidates(case, machine, {"zero2": deepspeed("zero2", 4096)}, None, [4], [0, 1]):
        assert "of GPU memory are needed, 32.0 GiB are available" in candidate.shortage
    [accepted] = list_candidates(case, machine, {"zero3_offload": deepspeed("zero3_offload", 4096)}, 48, [1], [1])
    assert accepted.fits and accepted.plan.accumulation == 8
    assert sum(accepted.prediction.gpu.values()) == accepted.prediction.gpu_gib


PARAMETERS = Parameters(all_sizes=(1000, 600), trained_sizes=(600,))


def test_zero_2_divides_and_offload_moves_optimizer_states():
    plain = ZeroConfig.from_deepspeed(deepspeed("zero2", 4))
    offloaded = ZeroConfig.from_deepspeed(deepspeed("zero2_offload", 4))
    for gpus in (1, 2, 6):
        assert compute_model_states(plain, PARAMETERS, 2, gpus, True).gpu["optimizer"] == 600 // gpus * 12
        states = compute_model_states(offloaded, PARAMETERS, 2, gpus, True)
        assert "optimizer" not in states.gpu
        # float32 weights, rounded up to a power of two because they are page-locked, and two moments
        assert states.host["optimizer"] == {1: 4096, 2: 2048, 6: 512}[gpus] + 600 // gpus * 8


def test_zero_3_stores_a_share_and_gathered_weights():
    config = deepspeed("zero3", 4)
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 700, "stage3_max_live_parameters": 100}
    zero = ZeroConfig.from_deepspeed(config)
    # the small weight stays complete; the large one is divided by four and gathered for its use
    assert compute_model_states(zero, PARAMETERS, 2, 4, False).gpu["weights"] == 2 * (600 + 250 + 1000)


def test_a_machine_of_unknown_size_refuses_nothing(mgm_2b):
    case = workload(mgm_2b, "lora", 1024, 448)
    prediction = predict(case, TrainingPlan("zero2", ZeroConfig.from_deepspeed(deepspeed("zero2")), 1, 64, 1), STORY)
    assert prediction.describe_shortage(STORY) and prediction.describe_shortage(Machine(1, None, None)) is None
