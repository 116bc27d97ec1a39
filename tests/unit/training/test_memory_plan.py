"""The memory plan of a training stage, on a tiny model."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dj2mgm.errors import InputError
from dj2mgm.planning.architecture import MGMArchitecture
from dj2mgm.planning.prediction import Machine, predict
from dj2mgm.planning.search import LAUNCH_SECONDS, list_candidates
from dj2mgm.planning.step import trace_memory
from dj2mgm.settings.training_stages import LoraSettings, solve_training_batch
from dj2mgm.storage.files import read_json
from dj2mgm.training.checkpoints import COMPLETE_FILE
from dj2mgm.training.deepspeed_config import complete_deepspeed_config
from dj2mgm.training.memory_plan import (
    build_workload,
    can_halve_micro_batch,
    choose_plan,
    halve_micro_batch,
    is_halved,
    is_out_of_memory,
    keep_plan,
    plan_from_settings,
    require_memory,
)
from dj2mgm.training.settings import TrainingSettings
from dj2mgm.training.training_data import MAX_CROWDING
from paths import PROJECT
from tiny_models import mgm_config
from training_values import LORA, SETTINGS

NAMES = ("zero2", "zero2_offload", "zero3", "zero3_offload")
CHOICES = {name: read_json(PROJECT / f"config/deepspeed/{name}.json") for name in NAMES}
ROOM, NO_ROOM = Machine(0, None, 64.0), Machine(0, None, 0.25)


class Conversations:
    """Lengths of two conversations, and their numbers of tokens with loss."""

    lengths, answers = [30, 40], [12, 8]

    @property
    def longest(self):
        return max(self.lengths)


def settings(**changes) -> TrainingSettings:
    values = SETTINGS | {"gpus": 1, "global_batch_size": 16, "deepspeed": CHOICES["zero3_offload"]} | changes
    return TrainingSettings(**values, lora=LoraSettings(**LORA))


@pytest.fixture(scope="module")
def workload():
    """Return the workload of all tests, whose traces are kept."""
    return build_workload("lora", settings(), MGMArchitecture("a", mgm_config()), Conversations())


def test_the_workload_equals_that_of_the_stage(workload):
    assert (workload.tuning, workload.sequence_length, workload.answer_tokens) == ("lora", 40, 12)
    assert workload.precision == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def test_the_record_of_a_fitting_stage_is_consistent(workload):
    plan = require_memory(settings(), workload, ROOM)
    assert plan["host_gib"] == pytest.approx(sum(plan["host"].values()), abs=0.02) and plan["gpu_gib"] is None
    assert plan["free_host_gib"] == 64.0


def test_a_stage_that_does_not_fit_is_refused_with_numbers(workload):
    with pytest.raises(InputError, match=r"does not fit: 0\.\d GiB of host memory are needed, 0\.2 GiB are available"):
        require_memory(settings(), workload, NO_ROOM)
    require_memory(settings(check_memory=False), workload, NO_ROOM)


def test_unreadable_memory_is_noted_but_accepted(workload, capsys):
    require_memory(settings(), workload, Machine(1, None, None))
    assert "the free memory of this machine cannot be read" in capsys.readouterr().err


def test_auto_selects_the_fastest_fitting_plan(workload, capsys):
    chosen = choose_plan(settings(deepspeed=None, deepspeed_choices=CHOICES), workload, ROOM)
    assert chosen.deepspeed == CHOICES["zero2"] and chosen.deepspeed_choices is None
    assert (
        "auto: the fastest training plan that fits is zero2, micro batch 4, activation checkpointing of every layer"
        in capsys.readouterr().err
    )


def test_auto_names_remedies_if_nothing_fits(workload):
    with pytest.raises(InputError, match="no training plan fits this machine. .* GiB of the host's memory instead of"):
        choose_plan(settings(deepspeed=None, deepspeed_choices=CHOICES), workload, NO_ROOM)


def test_a_stated_configuration_stays(workload):
    assert choose_plan(settings(), workload, ROOM) == settings()


ALL_AUTO = {
    "micro_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "activation_checkpointing": "auto",
    "deepspeed": None,
    "deepspeed_choices": CHOICES,
}


def test_auto_prefers_large_micro_batches_to_no_checkpointing(workload):
    chosen = choose_plan(settings(**ALL_AUTO), workload, ROOM)
    assert (chosen.micro_batch_size, chosen.gradient_accumulation_steps) == (16, 1)
    assert chosen.activation_checkpointing is False and not chosen.has_auto


def test_less_memory_adds_checkpointing_then_reduces_batches(workload):
    arranged = choose_plan(settings(**ALL_AUTO), workload, ROOM)
    whole = predict(workload, plan_from_settings(arranged, workload), ROOM).host_gib
    chosen = []
    for share in (1.046, 1.043, 1.037):
        machine = Machine(0, None, share * whole)
        arranged = choose_plan(settings(**ALL_AUTO), workload, machine)
        assert predict(workload, plan_from_settings(arranged, workload), machine).describe_shortage(machine) is None
        micro_batch = arranged.micro_batch_size
        assert arranged.gradient_accumulation_steps == math.ceil(16 / micro_batch)
        chosen.append((arranged.micro_batch_size, bool(arranged.activation_checkpointing)))
    assert chosen[0] == (16, True)
    assert chosen[2][0] < chosen[1][0] < 16


def test_micro_batches_between_powers_of_two_are_tried(workload):
    fixed = {"activation_checkpointing": True, "deepspeed": CHOICES["zero2"], "deepspeed_choices": None}
    needs = {}
    for size in (12, 14):
        sizes = {"micro_batch_size": size, "gradient_accumulation_steps": 2}
        needs[size] = predict(workload, plan_from_settings(settings(**fixed | sizes), workload), ROOM)
    machine = Machine(0, None, needs[12].host_gib * 1.0501)  # 5 % stay free
    assert needs[14].describe_shortage(machine) and not needs[12].describe_shortage(machine)
    chosen = choose_plan(settings(**ALL_AUTO | fixed), workload, machine)
    assert (chosen.micro_batch_size, chosen.gradient_accumulation_steps) == (12, 2)


def test_a_fitting_step_is_one_micro_batch(workload):
    arranged = choose_plan(settings(**ALL_AUTO | {"global_batch_size": 24}), workload, ROOM)
    assert (arranged.micro_batch_size, arranged.gradient_accumulation_steps) == (24, 1)


@pytest.mark.parametrize(("batch", "gpus"), [pytest.param(128, 1, marks=pytest.mark.slow), (24, 2), (33, 1)])
def test_every_plan_can_be_stated_in_settings(workload, batch, gpus):
    configs = {name: complete_deepspeed_config(config, 64) for name, config in CHOICES.items()}
    small = Machine(gpus, 0.1, 64.0) if gpus > 1 else Machine(0, None, 0.61)
    for candidate in list_candidates(workload, small, configs, batch):
        plan = candidate.plan
        sizes = {"micro_batch_size": plan.micro_batch, "gradient_accumulation_steps": plan.accumulation}
        solved = solve_training_batch("here", {"global_batch_size": batch, "gpus": gpus} | sizes)
        assert solved | sizes == solved
        arranged = {"activation_checkpointing": plan.checkpointing_interval or False}
        values = {"deepspeed": None, "deepspeed_choices": {plan.deepspeed: CHOICES[plan.deepspeed]}}
        result = choose_plan(settings(**solved | arranged | values), workload, Machine(small.gpus, 64.0, 64.0))
        assert plan_from_settings(result, workload).micro_batch == plan.micro_batch
        assert result.gradient_accumulation_steps == plan.accumulation


def test_accumulation_follows_from_a_stated_micro_batch():
    sizes = {"global_batch_size": 128, "micro_batch_size": 48, "gradient_accumulation_steps": "auto", "gpus": 1}
    assert solve_training_batch("here", sizes)["gradient_accumulation_steps"] == 3
    for wrong in (2, 4):
        with pytest.raises(InputError, match="global_batch_size 128 is not"):
            solve_training_batch("here", sizes | {"gradient_accumulation_steps": wrong})


def test_incomplete_micro_batches_do_not_count_as_full(workload):
    config = complete_deepspeed_config(CHOICES["zero2"], 64)
    candidates = list_candidates(workload, Machine(0, None, 0.61), {"zero2": config}, 33)
    assert {candidate.plan.micro_batch * candidate.plan.accumulation for candidate in candidates} - {33}
    for candidate in candidates:
        assert candidate.samples_per_second * candidate.plan.accumulation * LAUNCH_SECONDS[False] < 33


def test_a_fixed_global_batch_stays_a_product_of_the_sizes(workload):
    config = complete_deepspeed_config(CHOICES["zero2"], 64) | {"train_batch_size": 24}
    for machine in (ROOM, Machine(0, None, 0.61)):
        candidates = list_candidates(workload, machine, {"zero2": config}, 24)
        assert {candidate.plan.micro_batch * candidate.plan.accumulation for candidate in candidates} == {24}


def test_gpus_exchange_gradients_once_per_step_if_possible(workload):
    names = ("zero1", "zero2")
    choices = {name: read_json(PROJECT / f"config/deepspeed/{name}.json") for name in names}
    for gpus, name in ((1, "zero2"), (2, "zero1")):
        requested = settings(**ALL_AUTO | {"deepspeed_choices": choices, "gpus": gpus})
        arranged = choose_plan(requested, workload, Machine(gpus, 64.0, 64.0))
        assert arranged.deepspeed == choices[name]


@pytest.fixture
def start(workload, tmp_path):
    """Return a function that chooses and stores a plan, like a starting stage."""

    def choose(machine: Machine, **changes) -> TrainingSettings:
        requested = settings(**ALL_AUTO | changes)
        chosen = choose_plan(requested, workload, machine, tmp_path / "training_plan.json")
        keep_plan(requested, chosen, workload, tmp_path / "training_plan.json")
        return chosen

    return choose


def save_checkpoint(folder: Path) -> None:
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / COMPLETE_FILE).touch()


SMALL = Machine(0, None, 0.602)


def test_a_resumed_stage_keeps_its_plan(start, tmp_path, capsys):
    first = start(SMALL)
    save_checkpoint(tmp_path)
    assert start(ROOM) == first != settings(**ALL_AUTO)
    assert "as this stage chose before" in capsys.readouterr().err


def test_another_model_or_no_checkpoint_needs_a_new_plan(start, tmp_path):
    assert start(SMALL).micro_batch_size < start(ROOM).micro_batch_size == 16
    save_checkpoint(tmp_path)
    assert start(SMALL).micro_batch_size < 16, "a plan that does not fit is not kept"
    lora = LoraSettings(**LORA | {"r": 2})
    other = TrainingSettings(**vars(settings(**ALL_AUTO)) | {"lora": lora})
    workload = replace(build_workload("lora", other, MGMArchitecture("a", mgm_config()), Conversations()), lora=lora)
    assert choose_plan(other, workload, SMALL, tmp_path / "training_plan.json").micro_batch_size < 16


def test_checkpoints_keep_their_deepspeed_configuration(start, tmp_path):
    offload = {"zero2_offload": CHOICES["zero2_offload"]}
    assert start(ROOM, deepspeed_choices=offload).deepspeed == CHOICES["zero2_offload"]
    save_checkpoint(tmp_path)
    restarted = start(ROOM, micro_batch_size=2)
    assert restarted.deepspeed == CHOICES["zero2_offload"] and restarted.micro_batch_size == 2


def test_the_micro_batch_is_halved_once(start, tmp_path):
    plan_file = tmp_path / "training_plan.json"
    assert not can_halve_micro_batch(plan_file) and not is_halved(plan_file)
    assert start(ROOM).micro_batch_size == 16
    assert can_halve_micro_batch(plan_file) and not is_halved(plan_file)
    for _ in range(2):  # by two processes
        halve_micro_batch(plan_file)
    again = start(ROOM)
    assert (again.micro_batch_size, again.gradient_accumulation_steps) == (8, 2)
    assert not can_halve_micro_batch(plan_file) and is_halved(plan_file)


def test_errors_of_a_full_gpu_are_recognized():
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(torch.OutOfMemoryError()) and is_out_of_memory(RuntimeError(cublas))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_8_bit_states_are_chosen_only_if_nothing_else_fits(workload):
    choices = CHOICES | {"adamw_8bit": read_json(PROJECT / "config/deepspeed/adamw_8bit.json")}
    chosen = choose_plan(settings(**ALL_AUTO | {"deepspeed_choices": choices}), workload, SMALL)
    assert chosen.deepspeed != choices["adamw_8bit"]


def test_images_of_shorter_conversations_are_planned_for():
    short = Conversations()
    short.lengths = [18, 40]
    crowded = build_workload("lora", settings(), MGMArchitecture("a", mgm_config()), short)
    assert crowded.images_per_sample == MAX_CROWDING
    peaks = [trace_memory(case, 0, 4).sizes.sum(1).max() for case in (replace(crowded, images_per_sample=1.0), crowded)]
    assert peaks[0] < peaks[1]


def test_fixed_sizes_of_a_deepspeed_file_are_kept_or_refused(workload):
    fixed = CHOICES["zero2"] | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    chosen = choose_plan(settings(**ALL_AUTO | {"deepspeed_choices": {"fixed": fixed}}), workload, ROOM)
    assert (chosen.micro_batch_size, chosen.gradient_accumulation_steps) == (2, 8)
    other = {"fixed": fixed | {"gradient_accumulation_steps": 3}}
    with pytest.raises(InputError, match="cannot be made of micro batches"):
        choose_plan(settings(**ALL_AUTO | {"deepspeed_choices": other}), workload, ROOM)
