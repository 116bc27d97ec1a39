"""Batch sizes, settings files, and the number of steps of a training."""

import itertools
import math
import re

import pytest
import yaml

from dj2mgm.errors import InputError
from dj2mgm.settings.training_stages import (
    LoraSettings,
    count_steps,
    describe_steps,
    find_steps,
    solve_batch,
    solve_training_batch,
)
from dj2mgm.settings.validation import load_settings
from dj2mgm.training.settings import TrainingSettings
from training_values import LORA, SETTINGS

FACTORS = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "gpus")


def solve(*sizes: int | None) -> tuple[int, ...]:
    """Return global batch, micro batch, accumulation and GPUs, and solve for the open one."""
    return tuple(solve_batch("here", dict(zip(FACTORS, sizes, strict=True)))[key] for key in FACTORS)


def refusal(*sizes: int | None) -> str | None:
    try:
        solve(*sizes)
    except InputError as error:
        return str(error)
    return None


def test_only_factorizations_of_the_global_batch_are_accepted():
    for global_batch, micro, accumulation, gpus in itertools.product((1, 8, 12, 64), *[(1, 2, 3, 4, 8)] * 3):
        accepted = refusal(global_batch, micro, accumulation, gpus) is None
        assert accepted == (global_batch == micro * accumulation * gpus)


def test_the_message_about_accumulation_has_a_valid_value():
    for global_batch, micro, gpus in itertools.product((8, 24, 64, 128), (1, 2, 4), (1, 2)):
        message = refusal(global_batch, micro, 1000, gpus)
        assert f"{micro * 1000 * gpus}" in message
        remedy = int(re.search(r"set gradient_accumulation_steps: (\d+)$", message)[1])
        assert refusal(global_batch, micro, remedy, gpus) is None


def test_any_single_open_size_is_solved_for():
    for micro, accumulation, gpus in itertools.product((1, 3, 8), (1, 5, 128), (1, 6)):
        sizes = (micro * accumulation * gpus, micro, accumulation, gpus)
        for index in range(3):
            assert solve(*sizes[:index], None, *sizes[index + 1 :]) == sizes


def test_messages_suggest_the_nearest_global_batches():
    assert refusal(100, None, 4, 6) == (
        "here: global_batch_size 100 is not micro_batch_size ? × gradient_accumulation_steps 4 × gpus 6; "
        "with gradient_accumulation_steps 4 × gpus 6, choose a global_batch_size of 96 or 120"
    )
    assert refusal(32, 4, None, 6).endswith("with micro_batch_size 4 × gpus 6, choose a global_batch_size of 24 or 48")


def test_the_advice_for_four_stated_sizes_works():
    sizes = dict(zip(FACTORS, (128, 7, 3, 1), strict=True))
    with pytest.raises(InputError) as error:
        solve_training_batch("finetune", sizes)
    assert str(error.value) == (
        "finetune: global_batch_size 128 is not micro_batch_size 7 × gradient_accumulation_steps 3 × gpus 1 = 21; "
        "set global_batch_size: 21, or set gradient_accumulation_steps: auto"
    )
    assert solve_training_batch("finetune", sizes | {"global_batch_size": 21})["gradient_accumulation_steps"] == 3
    assert solve_training_batch("finetune", sizes | {"gradient_accumulation_steps": "auto"})
    assert refusal(128, 7, 3, 1).endswith("set global_batch_size: 21")


def test_two_open_sizes_are_refused_by_name():
    assert "micro_batch_size and gradient_accumulation_steps are null" in refusal(32, None, None, 1)


def test_auto_leaves_batch_to_plan_and_checks_given_sizes():
    sizes = dict(zip(FACTORS, (32, "auto", "auto", 4), strict=True))
    assert solve_batch("here", sizes) == sizes
    assert solve_batch("here", sizes | {"gradient_accumulation_steps": None}) == sizes
    assert solve_batch("here", sizes | {"gradient_accumulation_steps": 2})["micro_batch_size"] == 4
    assert solve_batch("here", sizes | {"micro_batch_size": 2})["gradient_accumulation_steps"] == 4
    assert refusal(30, "auto", "auto", 4).endswith("choose a global_batch_size of 28 or 32")
    assert "global_batch_size is null while micro_batch_size is auto" in refusal(None, "auto", "auto", 4)


@pytest.mark.parametrize("sizes", [(100, 8, 12, 1), (7, 2, 1, 2), (3, 8, 1, 1), (250, 16, 1, 2)])
def test_an_impossible_global_batch_is_corrected_to_the_product(sizes):
    message, product = refusal(*sizes), math.prod(sizes[1:])
    assert message.startswith(f"here: global_batch_size {sizes[0]} is not micro_batch_size {sizes[1]} × ")
    assert message.endswith(f"set global_batch_size: {product}") and refusal(product, *sizes[1:]) is None


def test_a_settings_file_loads_with_and_without_lora(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(SETTINGS))
    assert load_settings(TrainingSettings, path).lora is None
    path.write_text(yaml.safe_dump(SETTINGS | {"lora": LORA}))
    settings = load_settings(TrainingSettings, path)
    assert settings.lora == LoraSettings(**LORA)
    assert settings.deepspeed == SETTINGS["deepspeed"] and settings.learning_rate == 1e-3


def test_invalid_settings_are_refused_before_loading(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | {"gradient_accumulation_steps": 2}))
    with pytest.raises(InputError, match="set gradient_accumulation_steps: 4"):
        load_settings(TrainingSettings, path)


@pytest.mark.parametrize(
    ("rows", "changed", "planned", "steps"),
    [
        (216, {}, 7, 31),  # 30, and the first warm-up step, whose learning rate is zero
        (216, {"warmup_ratio": 0}, 7, 30),
        (216, {"lr_scheduler": "constant"}, 7, 30),
        (216, {"min_steps": 0}, 7, 7),
        (216, {"max_steps": 3}, 3, 3),
        (216, {"epochs": 5}, 35, 35),
        (10_000, {}, 313, 313),
    ],
)
def test_small_datasets_get_additional_epochs(rows, changed, planned, steps):
    settings = TrainingSettings(**SETTINGS | {"gpus": 1, "gradient_accumulation_steps": 8} | changed)
    assert count_steps(settings, rows) == planned and find_steps(settings, rows) == steps
    assert count_steps(settings.with_enough_steps(rows), rows) == steps
    assert bool(describe_steps("pretrain", settings, rows)) == (steps > planned)


@pytest.mark.parametrize(("batch", "passes"), [(216, 31), (32, 4.4), (16, 0)])
def test_many_passes_over_few_rows_are_a_risk(batch, passes):
    settings = TrainingSettings(
        **SETTINGS
        | {"gpus": 1, "global_batch_size": batch, "micro_batch_size": 1, "gradient_accumulation_steps": batch}
    )
    risk = f"About {passes:.0f} passes over the same 216 rows may memorize them" if passes else ""
    text = describe_steps("finetune", settings, 216)
    assert risk in text and bool(risk) == ("memorize" in text)
