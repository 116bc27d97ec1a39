"""Trainings in forked processes, killed and resumed in every DeepSpeed configuration, and shared by two processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dj2mgm.settings.training_stages import read_deepspeed
from dj2mgm.storage.files import read_json, read_yaml, write_yaml
from paths import PROJECT
from tiny_models import save_parts
from trained_stages import (
    KILLED_AT,
    MANY,
    SAMPLES,
    SAVED_AT,
    TUNINGS,
    assert_equal_outcomes,
    build_flags,
    make_inputs,
    read_outcome,
    shared,
)

# checkpoints as in zero2_offload (ZeRO 0 to 2) and zero3; other tests also kill zero2 and zero3_offload
LIKE_OTHERS = {"zero0", "zero1", "zero2", "zero3_offload", "zero3_offload_resident"}
CONFIGURATIONS = sorted(path.stem for path in (PROJECT / "config/deepspeed").glob("*.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Make a tiny model wide enough for 8-bit states, a projector, and conversations with and without an image."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def each_combination() -> Iterator:
    """Yield every configuration with every tuning; all but one tuning of some configurations are marked slow."""
    for number, configuration in enumerate(CONFIGURATIONS):
        for index, tuning in enumerate(TUNINGS):
            quick = number % len(TUNINGS) == index and configuration not in LIKE_OTHERS
            marks = () if quick else pytest.mark.slow
            yield pytest.param(configuration, tuning, marks=marks)


@pytest.mark.parametrize(("configuration", "tuning"), each_combination())
def test_a_killed_run_resumes_with_the_same_weights(folder, forks, tmp_path, configuration, tuning):
    stage = TUNINGS[tuning]
    changed = {"deepspeed": read_deepspeed(configuration, stage), "precision": "bf16"}
    ended = forks.run(f"{stage}.py", build_flags(folder, tmp_path / "undisturbed", tuning, **changed))
    assert ended.ok, ended.printed[-3000:]
    # a first start expects no checkpoint
    assert "step 0" not in ended.printed and "checkpoint found" not in ended.printed
    killed = build_flags(folder, tmp_path / "killed", tuning, **changed)
    ended = forks.run(f"{stage}.py", killed, kill_at=KILLED_AT)
    assert ended.statuses == [-9], ended.printed[-3000:]
    ended = forks.run(f"{stage}.py", killed)
    assert ended.ok and f"resuming from step {SAVED_AT}" in ended.printed, ended.printed[-3000:]
    assert read_json(tmp_path / "killed/metrics.json")["resumed_from"] == f"checkpoint-{SAVED_AT}"
    assert_equal_outcomes(tmp_path / "killed", tmp_path / "undisturbed")


def assert_same_training(stage: Path, reference: Path, start_file: Path) -> None:
    """Assert equality up to the effect of another order of summation."""
    (weights, rows), (expected, expected_rows) = read_outcome(stage), read_outcome(reference)
    for key in ("step", "learning_rate"):
        assert [row[key] for row in rows] == [row[key] for row in expected_rows]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected_rows], rel=2e-5)
    start = load_file(start_file)
    for name in expected:
        if "key" in name and name.endswith("bias"):  # without effect on softmax, so its gradient is rounding error
            continue
        moved = (expected[name] - start[name.removeprefix("projector.safetensors/")]).norm()
        assert (weights[name] - expected[name]).norm() < 1e-3 * moved, name


@pytest.mark.parametrize(
    ("micro", "total", "steps"),
    [pytest.param(8, 32, None, id="two epochs"), pytest.param(4, 24, 6, id="max_steps", marks=pytest.mark.slow)],
)
def test_an_incomplete_last_step_is_equal_on_two_processes(folder, forks, tmp_path, micro, total, steps):
    """There are 11 micro batches of 8, or 21 of 4, so that the second process has none in the last round."""
    sizes = {"whole": (1, total), "one": (1, micro), "two": (2, micro)}
    for name, (processes, size) in sizes.items():
        ended = forks.run(
            "pretrain.py", shared(folder, tmp_path / name, processes, size, total, max_steps=steps), processes
        )
        assert ended.ok, ended.printed[-3000:]
    assert len(read_outcome(tmp_path / "two")[1]) == (steps or 2 * -(-MANY // total))
    assert_same_training(tmp_path / "one", tmp_path / "whole", folder / "projector.safetensors")
    assert_same_training(tmp_path / "two", tmp_path / "whole", folder / "projector.safetensors")


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stage_out_of_memory_resumes_with_half_the_micro_batch(folder, forks, tmp_path, processes):
    settings = {"max_steps": 4, "micro_batch_size": "auto", "gradient_accumulation_steps": "auto", "save_steps": 1}
    undisturbed, disturbed = (
        shared(folder, tmp_path / name, processes, 8, 8 * processes, **settings)
        for name in ("undisturbed", "disturbed")
    )
    assert forks.run("pretrain.py", undisturbed, processes).ok
    ended = forks.run("pretrain.py", disturbed, processes, out_of_memory_at=3)
    assert ended.ok and "resuming from step 2" in ended.printed, ended.printed[-3000:]
    engines = [read_json(tmp_path / name / "metrics.json")["engine"] for name in ("undisturbed", "disturbed")]
    assert engines[0]["micro_batch_size"] == 2 * engines[1]["micro_batch_size"]
    assert_same_training(tmp_path / "disturbed", tmp_path / "undisturbed", folder / "projector.safetensors")


def test_sizes_fixed_by_a_deepspeed_file_are_not_halved(folder, forks, tmp_path):
    fixed = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    settings = {"max_steps": 4, "micro_batch_size": "auto", "gradient_accumulation_steps": "auto", "save_steps": 1}
    settings["deepspeed"] = read_deepspeed("zero2", "pretrain") | fixed
    stage = shared(folder, tmp_path, 1, 4, 8, **settings)
    ended = forks.run("pretrain.py", stage, out_of_memory_at=3)
    assert not ended.ok
    assert f"the DeepSpeed file fixes {' and '.join(fixed)}. Set auto there, so" in ended.printed
    ended = forks.run("pretrain.py", stage)
    assert ended.ok and "resuming from step 2" in ended.printed, ended.printed[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(("tuning", "configuration"), [("stage 1", "zero2"), ("LoRA", "adamw_8bit")])
def test_two_killed_processes_resume_bit_for_bit(folder, forks, tmp_path, tuning, configuration):
    """Each process draws its own dropout with LoRA, and rounds its own copy of the weights at random."""
    script = f"{TUNINGS[tuning]}.py"
    changed = {"save_steps": 1, "precision": "bf16", "deepspeed": read_deepspeed(configuration, TUNINGS[tuning])}
    undisturbed, killed = (
        shared(folder, tmp_path / name, 2, 8, 32, tuning, **changed) for name in ("undisturbed", "killed")
    )
    assert forks.run(script, undisturbed, 2).ok
    assert forks.run(script, killed, 2, kill_at=5).statuses == [-9, -9]
    refused = forks.run(script, shared(folder, tmp_path / "killed", 1, 16, 32, tuning, **changed))
    assert not refused.ok and "was written by 2 processes" in refused.printed
    assert "Set gpus: 2 to resume from step 4" in refused.printed
    killed = shared(folder, tmp_path / "killed", 2, 8, 32, tuning, **changed)  # rewrites its settings
    ended = forks.run(script, killed, 2)
    assert ended.ok and "resuming from step 4" in ended.printed, ended.printed[-3000:]
    assert_equal_outcomes(tmp_path / "killed", tmp_path / "undisturbed")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_logged_rows_are_the_same_after_a_resume(folder, forks, tmp_path, processes):
    """Steps 1 and 4 are logged, 2 and 4 saved, so that the second row covers steps before and after the resume."""
    undisturbed, killed = (
        build_flags(folder, tmp_path / name, "stage 1", gpus=processes, global_batch_size=2 * processes, log_steps=4)
        for name in ("undisturbed", "killed")
    )
    assert forks.run("pretrain.py", undisturbed, processes).ok
    assert not forks.run("pretrain.py", killed, processes, kill_at=KILLED_AT).ok
    assert forks.run("pretrain.py", killed, processes).ok
    assert [row["step"] for row in read_outcome(tmp_path / "killed")[1]] == [1, 4]
    assert_equal_outcomes(tmp_path / "killed", tmp_path / "undisturbed")


@pytest.mark.parametrize(
    "configuration",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("zero2_offload", "adamw_8bit")), "zero3_offload"],
)
def test_the_projectors_rate_scales_only_its_update(folder, forks, tmp_path, configuration):
    """Adam's first update is proportional to the rate."""
    start, updates = load_file(folder / "projector.safetensors"), {}
    settings = {"deepspeed": read_deepspeed(configuration, "finetune"), "warmup_ratio": 0, "lr_scheduler": "linear"}
    for rate in (None, 1e-2, 1e-3):
        output = tmp_path / str(rate)
        ended = forks.run(
            "finetune.py", build_flags(folder, output, "LoRA", **settings, max_steps=1, projector_learning_rate=rate)
        )
        assert ended.ok, ended.printed[-3000:]
        weights, [row] = read_outcome(output)
        assert row["learning_rate"] == pytest.approx(1e-2)
        assert row.get("projector_learning_rate") == pytest.approx(rate)
        projector = load_file(output / "projector.safetensors")
        updates[rate] = {name: projector[name] - start[name] for name in start}
        updates[rate] |= {name: tensor for name, tensor in weights.items() if "lora" in name}
    for name, update in updates[1e-2].items():
        # the gradient's norm is summed by parameter groups
        torch.testing.assert_close(update, updates[None][name], rtol=1e-4, atol=1e-7)
        if "lora" in name:
            assert torch.equal(updates[1e-3][name], update)
        else:
            torch.testing.assert_close(10 * updates[1e-3][name], update, rtol=0.01, atol=1e-6)
    assert any(update.any() for update in updates[1e-3].values())


@pytest.mark.parametrize("configuration", ["zero3_offload", pytest.param("adamw_8bit", marks=pytest.mark.slow)])
def test_weight_decay_spares_norms_and_biases(folder, forks, tmp_path, configuration):
    """AdamW subtracts the decay separately from its update, which is the same without decay after one step."""
    start, rate, decay = load_file(folder / "projector.safetensors"), 1e-3, 5.0
    settings = {
        "deepspeed": read_deepspeed(configuration, "finetune"),
        "warmup_ratio": 0,
        "projector_learning_rate": rate,
    }
    ends = []
    for weight_decay in (0.0, decay):
        output = tmp_path / str(weight_decay)
        ended = forks.run(
            "finetune.py", build_flags(folder, output, "LoRA", **settings, max_steps=1, weight_decay=weight_decay)
        )
        assert ended.ok, ended.printed[-3000:]
        ends.append(load_file(output / "projector.safetensors"))
    for name, weights in start.items():
        taken = rate * decay * weights if weights.ndim > 1 else torch.zeros_like(weights)
        torch.testing.assert_close(ends[0][name] - ends[1][name], taken, rtol=1e-3, atol=1e-6, msg=name)


def test_small_datasets_are_trained_for_enough_steps(folder, forks, tmp_path):
    ended = forks.run("pretrain.py", build_flags(folder, tmp_path, "stage 1", max_steps=None, epochs=1, min_steps=12))
    assert ended.ok, ended.printed[-3000:]
    record, (_, rows) = read_json(tmp_path / "metrics.json"), read_outcome(tmp_path)
    assert record["planned_steps"] < 12 and sum(row["learning_rate"] > 0 for row in rows) == 12
    assert f"{SAMPLES} samples give only {record['planned_steps']} step" in ended.printed
    assert f"adds epochs and takes 13 ({tmp_path.name}.min_steps: 12, because" in ended.printed


def test_the_projectors_rate_follows_the_schedule_of_the_others(folder, forks, tmp_path):
    settings = {"projector_learning_rate": 1e-3, "max_steps": 4}
    ended = forks.run("finetune.py", build_flags(folder, tmp_path, "LoRA", **settings))
    assert ended.ok, ended.printed[-3000:]
    rows = read_outcome(tmp_path)[1]
    assert [10 * row["projector_learning_rate"] for row in rows] == pytest.approx(
        [row["learning_rate"] for row in rows]
    )
    assert rows[1]["learning_rate"] > rows[3]["learning_rate"] > 0


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_resumes_before_a_damaged_checkpoint(folder, forks, tmp_path, processes):
    undisturbed, killed = (
        shared(folder, tmp_path / name, processes, 8, 32, save_steps=1) for name in ("undisturbed", "killed")
    )
    assert forks.run("pretrain.py", undisturbed, processes).ok
    assert not forks.run("pretrain.py", killed, processes, kill_at=5).ok
    checkpoints = tmp_path / "killed/checkpoints"
    assert {path.name for path in checkpoints.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    optimizer = sorted(checkpoints.glob("checkpoint-4/global_step*/*optim_states.pt"))[-1]
    contents = optimizer.read_bytes()
    middle = len(contents) // 2
    optimizer.write_bytes(
        contents[:middle] + bytes(byte ^ 255 for byte in contents[middle:][:64]) + contents[middle + 64 :]
    )
    ended = forks.run("pretrain.py", killed, processes)
    assert ended.ok and "was renamed to damaged-checkpoint-4; resuming from step 3" in ended.printed, ended.printed
    assert_equal_outcomes(tmp_path / "killed", tmp_path / "undisturbed")


# Diverging trainings


def diverging(folder: Path, output: Path, tuning: str, configuration: str, **changed) -> dict:
    stage = TUNINGS[tuning]
    settings = {"learning_rate": 1e12, "epochs": 10, "max_steps": 8, "save_steps": 1, "projector_learning_rate": None}
    settings["deepspeed"] = read_deepspeed(configuration, stage)
    return build_flags(folder, output / stage, tuning, **settings | changed)


@pytest.mark.parametrize(
    ("tuning", "configuration", "precision", "processes"),
    [
        ("stage 1", "zero2", "fp32", 1),
        pytest.param("stage 1", "zero3_offload", "bf16", 1, marks=pytest.mark.slow),
        pytest.param("LoRA", "zero2", "bf16", 1, marks=pytest.mark.slow),
        ("full", "zero2_offload", "fp32", 2),
    ],
)
def test_a_diverging_training_stops_without_results(
    folder, forks, tmp_path, tuning, configuration, precision, processes
):
    """Training stops at the first non-finite gradient, and keeps checkpoints that a healthy step followed."""
    sizes = {"gpus": processes, "gradient_accumulation_steps": 2 // processes, "precision": precision}
    arguments, stage = diverging(folder, tmp_path, tuning, configuration, **sizes), TUNINGS[tuning]
    for resumes in (False, True):  # the second start diverges at the same step again
        ended = forks.run(f"{stage}.py", arguments, processes)
        assert ended.statuses == [2] * processes, ended.printed[-3000:]
        assert ("resuming from step 1 " in ended.printed) == resumes
        [error] = [line for line in ended.printed.splitlines() if line.startswith("error: ")]
        assert error == (
            f"error: {stage}: training diverged by step 3: the gradient's norm is inf. The learning rate of 1e+12 is "
            f"probably too high; set learning_rate of {stage} to a third of it or less. Nothing was written; the "
            "same command goes on from checkpoint-1"
        )
        left = {path.name for path in (tmp_path / stage).iterdir()}
        assert left == {"checkpoints", "config.yaml", "progress.json", "tensorboard"}
        assert [path.name for path in (tmp_path / stage / "checkpoints").glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_loss_that_ends_far_above_its_start_is_refused(folder, forks, tmp_path):
    arguments = diverging(folder, tmp_path, "full", "zero2", learning_rate=1.0, precision="fp32")
    ended = forks.run("finetune.py", arguments)
    assert ended.statuses == [2] and "8 of 8 steps" in ended.printed
    assert "finetune: training diverged by step 8: the loss ended at " in ended.printed
    assert "far above the 6.454 of step 1" in ended.printed and "the same command starts over" in ended.printed
    assert not list((tmp_path / "finetune").glob("*.safetensors")) and not (tmp_path / "finetune/metrics.json").exists()
    assert not list((tmp_path / "finetune/checkpoints").glob("checkpoint-*"))
    lower = diverging(folder, tmp_path, "full", "zero2", learning_rate=1e-2, precision="fp32")
    assert forks.run("finetune.py", lower).ok


def test_a_diverging_text_model_is_stopped(folder, forks, tmp_path):
    settings = read_yaml(build_flags(folder, tmp_path / "stage", "stage 1")["--config"])
    settings |= {"learning_rate": 1e12, "max_length": 8, "save_steps": 1, "precision": "fp32"}
    write_yaml(tmp_path / "config.yaml", settings)
    (tmp_path / "corpus.jsonl").write_text('{"text": "What color is the circle? a red circle at the top left"}\n' * 40)
    save_parts(tmp_path)
    arguments = {
        "--config": tmp_path / "config.yaml",
        "--data": tmp_path / "corpus.jsonl",
        "--model": tmp_path / "gemma",
    }
    ended = forks.run("train_text_model.py", arguments | {"--output-dir": tmp_path / "preset"})
    assert ended.statuses == [2], ended.printed[-3000:]
    assert "error: preset: training diverged by step 3: the gradient's norm is inf" in ended.printed
    assert not (tmp_path / "preset/metrics.json").exists() and not (tmp_path / "preset/model").exists()


def test_variables_of_other_launchers_change_nothing(folder, forks, tmp_path):
    """Accelerate would train in fp16 with them, in which DeepSpeed skips every step of this training."""
    variables = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    for name, environment in {"plain": {}, "left over": variables}.items():
        flags = build_flags(folder, tmp_path / name, "stage 1", precision="fp32")
        ended = forks.run("pretrain.py", flags, environment=environment)
        assert ended.ok, ended.printed[-3000:]
    assert_equal_outcomes(tmp_path / "left over", tmp_path / "plain")
    engines = [read_json(tmp_path / name / "metrics.json")["engine"] for name in ("plain", "left over")]
    assert engines[0] == engines[1] and not engines[1]["fp16"]
