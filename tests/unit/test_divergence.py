"""Divergence of a training, detected by gradients and logged losses."""

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer
from transformers.training_args import ParallelMode

from dj2mgm.divergence import TrainingDivergedError, check_end, check_finite, find_last_healthy_step
from dj2mgm.features.foundation.tiny_parts import train_clip, train_language_model
from dj2mgm.settings.models import LanguageModelRecipe
from dj2mgm.training.trainer import ResumableTrainer
from tiny_models import clip_spec


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_non_finite_value_is_named_with_remedy(value):
    with pytest.raises(TrainingDivergedError) as error:
        check_finite("pretrain", 3, value, 1e12)
    assert str(error.value) == (
        f"pretrain: training diverged by step 3: the loss is {value}. The learning rate of 1e+12 is probably too "
        "high; set learning_rate of pretrain to a third of it or less"
    )
    check_finite("pretrain", 3, 1e30, 1e12)


@pytest.mark.parametrize("samples", [1, 128])
@pytest.mark.parametrize("steps", [1, 2, 200])
def test_ordinary_trainings_do_not_count_as_diverged(samples, steps):
    """Losses vary by 1.5 nats between samples, some are nearly 0 for short answers, and learning is slow."""
    rng = random.Random(f"{samples}/{steps}")
    for _ in range(200):
        level, spread = rng.choice([0.3, 1.0, 2.5, 6.0]), 1.5 / math.sqrt(samples)
        means = [max(0.0, rng.gauss(level * (1 - 0.3 * step / steps), spread)) for step in range(steps)]
        check_end("finetune", list(enumerate(means, start=1)), samples, 1e-3)


@pytest.mark.parametrize("losses", [[0.05, 6.0, 7.0], [0.05, *[5.0] * 100]])
def test_one_easy_sample_does_not_determine_the_initial_loss(losses):
    check_end("finetune", list(enumerate(losses, start=1)), 1, 1e-3)


@pytest.mark.parametrize(("samples", "end"), [(2, 60.0), (2, 1e4), (128, 20.0), (128, 1e4)])
def test_a_loss_far_above_its_start_has_diverged(samples, end):
    rows = [(1, 2.5), (2, 2.4), *((step, 1e5) for step in range(3, 60)), *((step, end) for step in range(60, 101))]
    with pytest.raises(
        TrainingDivergedError, match=r"by step 100: the loss ended at \S+, far above the 2\.5 of step 1"
    ):
        check_end("finetune", rows, samples, 1.0)
    assert find_last_healthy_step(rows, samples) == 2


def test_one_bad_batch_at_the_end_does_not_count():
    rows = [(step, 2.0) for step in range(1, 40)] + [(40, 500.0)]
    check_end("finetune", rows, 128, 1e-3)
    assert find_last_healthy_step(rows, 128) == 39


def test_a_diverged_tiny_language_model_is_not_written(tmp_path):
    spec = LanguageModelRecipe(
        seed=0, patches_per_side=4, hidden_size=16, num_layers=1, num_heads=2, steps=9, batch_size=2, learning_rate=1e12
    )
    with pytest.raises(TrainingDivergedError, match="language_model: training diverged by step "):
        train_language_model(spec, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_diverged_tiny_clip_is_not_written(tmp_path):
    with pytest.raises(TrainingDivergedError, match="clip: training diverged by step "):
        train_clip(clip_spec(learning_rate=1e30), tmp_path / "clip", tmp_path / "convnext")
    assert not (tmp_path / "clip").exists() and not (tmp_path / "convnext").exists()


def fp16_trainer(folder: Path) -> ResumableTrainer:
    """Return a trainer without a model, with the attributes that a step and its end read."""
    trainer = object.__new__(ResumableTrainer)
    trainer.args = SimpleNamespace(output_dir=str(folder / "finetune/checkpoints"), learning_rate=0.5, should_save=True)
    trainer.state = SimpleNamespace(global_step=17, log_history=[{"step": 1, "loss": 2.0}])
    trainer.accelerator = SimpleNamespace(wait_for_everyone=lambda: None)
    trainer.args.parallel_mode = ParallelMode.NOT_PARALLEL
    trainer.model_wrapped = SimpleNamespace(fp16_enabled=lambda: True, dynamic_loss_scale=lambda: True)
    trainer.global_batch_size = 8
    trainer._rate, trainer._reading, trainer._globalstep_last_logged, trainer._total_loss_scalar = 0.1, None, 15, 0.0
    return trainer


def end_step(trainer: ResumableTrainer, loss: float, norm: float, save: bool = True) -> None:
    """End a step that is logged; a step without a checkpoint is logged during the next one."""
    trainer.control = SimpleNamespace(
        should_log=True, should_save=save, should_evaluate=False, should_training_stop=False
    )
    trainer._maybe_log_save_evaluate(torch.tensor(loss), torch.tensor(norm))


def test_steps_skipped_by_a_loss_scale_do_not_stop_training(tmp_path, monkeypatch):
    trainer, logged = fp16_trainer(tmp_path), []
    monkeypatch.setattr(Trainer, "_maybe_log_save_evaluate", lambda *_: None)
    monkeypatch.setattr(Trainer, "log", lambda self, logs, start_time: logged.append(logs))
    end_step(trainer, 1.0, math.inf)
    trainer.state.global_step = 18
    end_step(trainer, 3.0, 2.5)
    rates = {"learning_rate": 0.1}
    assert logged == [{"loss": 0.5} | rates, {"grad_norm": 2.5, "loss": 3.0} | rates]  # JSON has no infinity
    trainer.model_wrapped.fp16_enabled = lambda: False
    with pytest.raises(
        TrainingDivergedError, match="finetune: training diverged by step 18: the gradient's norm is inf"
    ):
        end_step(trainer, 1.0, math.inf)


def test_a_step_is_logged_while_the_next_one_runs(tmp_path, monkeypatch):
    trainer, logged = fp16_trainer(tmp_path), []
    trainer.accelerator.gradient_state = SimpleNamespace(_set_sync_gradients=lambda _: None)
    monkeypatch.setattr(Trainer, "_maybe_log_save_evaluate", lambda *_: None)
    monkeypatch.setattr(Trainer, "_get_learning_rate", lambda _: 0.2)
    monkeypatch.setattr(Trainer, "log", lambda self, logs, start_time: logged.append(logs))
    monkeypatch.setattr(Trainer, "training_step", lambda *_: torch.tensor(len(logged)))
    end_step(trainer, 4.0, 1.0, save=False)
    assert logged == []
    assert trainer.training_step(None, [{}, {}]) == 1  # logged between the two micro batches
    assert logged == [{"grad_norm": 1.0, "loss": 2.0, "learning_rate": 0.1}]


def test_a_loss_scale_at_its_minimum_is_a_divergence(tmp_path, monkeypatch):
    def train(self):
        raise Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")

    monkeypatch.setattr(Trainer, "train", train)
    with pytest.raises(
        TrainingDivergedError, match="step 18: the gradient is not finite at the lowest loss scale .*starts over"
    ):
        fp16_trainer(tmp_path).train()


@pytest.mark.parametrize("name", ["loss", "eval_loss"])
def test_only_finite_losses_are_logged(tmp_path, name):
    with pytest.raises(TrainingDivergedError, match="step 17: the loss (of held-out answers )?is nan"):
        fp16_trainer(tmp_path).log({name: math.nan})
