"""What a training stage does with its memory plan, on a tiny model."""

import pytest
import torch
from places import PROJECT
from test_training_settings import LORA, SETTINGS
from tiny_models import mgm_config

from dj2mgm.errors import InputError
from dj2mgm.files import read_json
from dj2mgm.memory.prediction import Machine, predict
from dj2mgm.training.memory_plan import arrangement_of, check_memory, choose_arrangement, halve_micro_batch, workload_of
from dj2mgm.training.settings import LoraSettings, TrainingSettings

NAMES = ("zero2", "zero2_offload", "zero3", "zero3_offload")
CHOICES = {name: read_json(PROJECT / f"config/deepspeed/{name}.json") for name in NAMES}
ROOM, NO_ROOM = Machine(0, None, 64.0), Machine(0, None, 0.25)


class Conversations:
    """Tokens of two conversations, and those that carry loss."""

    lengths, answers = [30, 40], [12, 8]


def settings(**changes) -> TrainingSettings:
    values = SETTINGS | {"gpus": 1, "global_batch_size": 16, "deepspeed": CHOICES["zero3_offload"]} | changes
    return TrainingSettings(**values, lora=LoraSettings(**LORA))


@pytest.fixture
def workload():
    return workload_of("lora", settings(), mgm_config(), Conversations())


def test_the_workload_is_the_stages_own(workload):
    assert (workload.tuning, workload.sequence, workload.answers) == ("lora", 40, 12)
    assert workload.precision == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def test_what_fits_goes_on_with_a_record_whose_parts_add_up(workload):
    plan = check_memory(settings(), workload, ROOM)
    assert plan["host_gib"] == pytest.approx(sum(plan["host"].values()), abs=0.02) and plan["gpu_gib"] is None
    assert plan["free_host_gib"] == 64.0


def test_what_cannot_fit_is_refused_with_the_numbers_and_the_way_around(workload):
    with pytest.raises(InputError, match=r"does not fit: 0\.\d GiB of host memory are needed, 0\.2 GiB are there"):
        check_memory(settings(), workload, NO_ROOM)
    check_memory(settings(check_memory=False), workload, NO_ROOM)


def test_a_machine_that_cannot_be_read_is_said_so_and_not_refused(workload, capsys):
    check_memory(settings(), workload, Machine(1, None, None))
    assert "does not say how much memory is free" in capsys.readouterr().err


def test_auto_takes_the_fastest_that_fits(workload, capsys):
    chosen = choose_arrangement(settings(deepspeed=None, deepspeed_choices=CHOICES), workload, ROOM)
    assert chosen.deepspeed == CHOICES["zero2"] and chosen.deepspeed_choices is None
    assert (
        "auto: zero2, micro batch 4, every layer recomputed is the fastest arrangement that fits"
        in capsys.readouterr().err
    )


def test_auto_says_what_would_help_where_nothing_fits(workload):
    with pytest.raises(InputError, match="nothing fits; what would help: .* GiB of the host's memory would do"):
        choose_arrangement(settings(deepspeed=None, deepspeed_choices=CHOICES), workload, NO_ROOM)


def test_a_configuration_that_was_chosen_by_hand_stays(workload):
    assert choose_arrangement(settings(), workload, ROOM) == settings()


ALL_AUTO = {
    "micro_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "activation_checkpointing": "auto",
    "deepspeed": None,
    "deepspeed_choices": CHOICES,
}


def test_auto_takes_the_largest_micro_batch_before_it_recomputes(workload):
    chosen = choose_arrangement(settings(**ALL_AUTO), workload, ROOM)
    assert (chosen.micro_batch_size, chosen.gradient_accumulation_steps) == (16, 1)
    assert chosen.activation_checkpointing is False and not chosen.for_the_plan


def test_less_memory_makes_auto_recompute_and_then_take_less_at_a_time(workload):
    arranged = choose_arrangement(settings(**ALL_AUTO), workload, ROOM)
    whole = predict(workload, arrangement_of(arranged, workload), ROOM).host_gib
    chosen = []
    for share in (1.06, 1.046, 1.043, 1.037):
        machine = Machine(0, None, share * whole)
        arranged = choose_arrangement(settings(**ALL_AUTO), workload, machine)
        assert predict(workload, arrangement_of(arranged, workload), machine).shortage(machine) is None
        assert arranged.micro_batch_size * arranged.gradient_accumulation_steps == 16
        chosen.append((arranged.micro_batch_size, bool(arranged.activation_checkpointing)))
    assert chosen[:2] == [(16, False), (16, True)]
    assert chosen[3][0] < chosen[2][0] < 16


def test_a_stage_that_goes_on_keeps_its_choice_on_another_machine(workload, tmp_path, capsys):
    kept = tmp_path / "arrangement.json"
    first = choose_arrangement(settings(**ALL_AUTO), workload, Machine(0, None, 1.2), kept)
    assert choose_arrangement(settings(**ALL_AUTO), workload, ROOM, kept) == first
    assert "as this stage chose before" in capsys.readouterr().err
    other = ALL_AUTO | {"activation_checkpointing": False}
    assert choose_arrangement(settings(**other), workload, ROOM, kept).micro_batch_size == 16


def test_after_running_out_of_memory_half_of_the_micro_batch_is_taken_once(workload, tmp_path):
    kept = tmp_path / "arrangement.json"
    assert not halve_micro_batch(kept)
    choose_arrangement(settings(**ALL_AUTO), workload, ROOM, kept)
    assert halve_micro_batch(kept)
    again = choose_arrangement(settings(**ALL_AUTO), workload, ROOM, kept)
    assert (again.micro_batch_size, again.gradient_accumulation_steps) == (8, 2)
    assert not halve_micro_batch(kept)
