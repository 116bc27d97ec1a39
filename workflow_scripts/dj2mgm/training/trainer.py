"""Trainers for resumable training, built on transformers' Trainer.

- `ProgressLines`: training progress, for the console and `watch.py`.
- `ResumableTrainer`: micro batches of `StepBatches`, complete checkpoints, stop at divergence.
- `StageTrainer`: saves trained weights only, and scores held-out answers at each checkpoint.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import DeepSpeedSchedulerWrapper, DummyOptim
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import TrainOutput

from dj2mgm.cli.messages import report_progress
from dj2mgm.divergence import (
    TrainingDivergedError,
    check_end,
    check_finite,
    find_last_healthy_step,
    make_divergence_error,
)
from dj2mgm.errors import InputError, pluralize
from dj2mgm.models.trained_weights import find_projector_parameters
from dj2mgm.storage.files import write_json
from dj2mgm.training.arguments import split_groups
from dj2mgm.training.checkpoints import discard_checkpoints, find_checkpoint_before, mark_complete
from dj2mgm.training.library_patches import are_patches_applied
from dj2mgm.training.scoring import Scorer
from dj2mgm.training.training_data import StepBatches


class ProgressLines(TrainerCallback):
    """Callback that prints a line of progress at each logging step, and writes it as JSON to `file`."""

    def __init__(self, file: Path):
        self.file = file

    def on_train_begin(self, args, state, control, **kwargs):
        self.start, self.first_step = time.monotonic(), state.global_step
        if state.max_steps <= args.get_warmup_steps(state.max_steps):
            raise InputError(
                f"the samples are enough for only {pluralize(state.max_steps, 'step')}, all of which are warm-up, so "
                "nothing would be trained. Use more samples, lower global_batch_size together with micro_batch_size, "
                "or set warmup_ratio: 0 for pretrain and finetune"
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Report the loss, the learning rate and the seconds left, in the first process only."""
        if not state.is_world_process_zero or "loss" not in logs:
            return
        seconds = time.monotonic() - self.start
        progress = {
            "step": state.global_step,
            "max_steps": state.max_steps,
            "loss": float(logs["loss"]),
            "learning_rate": float(logs["learning_rate"]),
            "seconds": round(seconds, 1),
            "seconds_left": round(
                seconds / max(1, state.global_step - self.first_step) * (state.max_steps - state.global_step), 1
            ),
        }
        write_json(self.file, progress)
        detail = f"loss {progress['loss']:.4f}"  # with the learning rate, a line would have more than 80 columns
        report_progress("steps", progress["step"], progress["max_steps"], detail, progress["seconds_left"])


PREPARED_STEPS = 20  # for whose micro batches kernels are prepared; later ones seldom have another number of images
SCALE_AT_MINIMUM = "loss scale already at minimum"  # DeepSpeed's exception when fp16 does not recover

UNLOGGED_LOSS_KEY = "UnloggedLoss"  # key in the state that Trainer saves for callbacks


@dataclass(frozen=True)
class StepReading:
    """Loss and gradient norm of a step, on their way from the GPU to the host.

    Args:
        values: scalars on the host, valid after `copied`.
        copied: event after the copies; None on a CPU.
        steps: steps of which `values["loss"]` is the sum.
        rates: learning rates of the step by name.
    """

    values: dict[str, torch.Tensor]
    copied: torch.cuda.Event | None
    steps: int
    rates: dict[str, float]

    def wait(self) -> dict[str, float]:
        """Return the values when the GPU has computed them."""
        if self.copied:
            self.copied.synchronize()
        return {name: value.item() for name, value in self.values.items()}


class ResumableTrainer(Trainer):
    """Trainer that computes each step in the micro batches of `StepBatches`, and resumes exactly.

    A checkpoint is marked complete, with the fingerprint of settings, inputs and code, when every process has written
    its part, and only then are older ones removed. If the checkpoint of the last step is resumed, nothing is trained.

    A diverging training is stopped on every process, and checkpoints with diverged weights are removed.

    Loss and gradient norm of a step are read and logged when the GPU has work of the next step, and at once before a
    checkpoint and at the end. If the host waited for them, the GPU would be idle until the host has launched the next
    kernels.

    The entry point must call `apply_library_patches` before.

    Args:
        fingerprint: fingerprint of settings, inputs and code.
        global_batch_size: samples of a step, over all processes.
    """

    def __init__(self, *args, fingerprint: str, global_batch_size: int, **kwargs):
        if not are_patches_applied():
            raise RuntimeError("training needs changes to transformers; call apply_library_patches first")
        super().__init__(*args, **kwargs)
        self.fingerprint = fingerprint
        self.args.save_total_limit = None  # Trainer would remove old checkpoints before the new one is complete
        self.global_batch_size = global_batch_size
        # Trainer counts whole steps; StepBatches decides the number of micro batches of each step
        self.args.gradient_accumulation_steps = 1
        self._reading: StepReading | None = None  # of the last step, until it is logged

    def train(self, *args, **kwargs) -> TrainOutput:
        """Train, and raise TrainingDivergedError if the training diverges."""
        try:
            output = super().train(*args, **kwargs)
            check_end(self._stage, self._losses, self.global_batch_size, self.args.learning_rate)
        except TrainingDivergedError as error:
            raise self._remove_diverged_checkpoints(error) from None
        except Exception as error:
            if SCALE_AT_MINIMUM not in str(error):
                raise
            step, problem = self.state.global_step, "the gradient is not finite at the lowest loss scale of fp16"
            error = make_divergence_error(self._stage, step + 1, problem, self.args.learning_rate)
            raise self._remove_diverged_checkpoints(error) from None
        return output

    @property
    def _stage(self) -> str:
        return Path(self.args.output_dir).parent.name

    @property
    def applied_steps(self) -> int:
        """Steps that changed the weights; DeepSpeed skips steps whose gradient overflows."""
        return self.state.global_step - self.model_wrapped.skipped_steps

    @property
    def _losses(self) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.state.log_history if "loss" in row]

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing, because DeepSpeed has clipped the gradients."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: None = None) -> torch.Tensor | float | None:
        """Return DeepSpeed's gradient norm without waiting for it; it is equal on all processes."""
        return self.model_wrapped.get_global_grad_norm()

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: torch.Tensor | float | None, *args, **kwargs
    ) -> None:
        """Start to read the step's loss and gradient norm; log them now only before a checkpoint and at the end."""
        self._log_reading()
        self._reading = self._start_reading(tr_loss, grad_norm)
        control = self.control
        control.should_log = False
        if control.should_save or control.should_evaluate or control.should_training_stop:
            self._log_reading()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _start_reading(self, tr_loss: torch.Tensor, grad_norm: torch.Tensor | float | None) -> StepReading:
        """Copy the gradient norm and, if the step is logged, the loss since the last row to the host."""
        values, steps = {}, self.state.global_step - self._globalstep_last_logged
        if grad_norm is not None:
            values["grad_norm"] = torch.as_tensor(grad_norm, dtype=torch.float64)
        if self.control.should_log and steps:
            values["loss"] = nested_gather(tr_loss, self.args.parallel_mode).mean()
            tr_loss.zero_()
            self._globalstep_last_logged = self.state.global_step
        host_values = {name: value.to("cpu", non_blocking=True) for name, value in values.items()}
        copied = torch.cuda.Event() if tr_loss.is_cuda else None
        if copied:
            copied.record()
        return StepReading(host_values, copied, steps, self._read_rates())

    def _log_reading(self) -> None:
        """Check and log the last step's loss and gradient norm, unless they are already logged."""
        reading, self._reading = self._reading, None
        if reading is None:
            return
        values, engine = reading.wait(), self.model_wrapped
        # a dynamic loss scale of fp16 skips steps until gradients are finite, and DeepSpeed raises if they never are
        if "grad_norm" in values and not (engine.fp16_enabled() and engine.dynamic_loss_scale()):
            self._check_finite(values["grad_norm"], "gradient's norm")
        if "loss" in values:
            self._total_loss_scalar += values["loss"]
            self.log(values | {"loss": values["loss"] / reading.steps} | reading.rates)

    def _read_rates(self) -> dict[str, float]:
        """Return the learning rates of the current step by name."""
        return {"learning_rate": self._rate}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log finite values only; stop at a non-finite loss."""
        for name in {"loss", "eval_loss"} & logs.keys():
            self._check_finite(logs[name], "loss of held-out answers" if name == "eval_loss" else name)
        logs = {name: value for name, value in logs.items() if name != "grad_norm" or math.isfinite(value)}
        super().log(logs, start_time)

    def _check_finite(self, value: float, name: str) -> None:
        check_finite(self._stage, self.state.global_step, value, self.args.learning_rate, name)

    def _remove_diverged_checkpoints(self, error: TrainingDivergedError) -> TrainingDivergedError:
        """Remove checkpoints without a healthy loss after them; return the error and what the same command will do."""
        folder = Path(self.args.output_dir)
        healthy = find_checkpoint_before(folder, find_last_healthy_step(self._losses, self.global_batch_size))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            discard_checkpoints(folder, newest=healthy)
        again = f"goes on from {healthy.name}" if healthy else "starts over"
        return TrainingDivergedError(f"{error}. Nothing was written; the same command {again}")

    def create_optimizer(self, model=None) -> torch.optim.Optimizer | DummyOptim:
        """Create the optimizer; DeepSpeed's optimizer gets parameter groups too, without decay of norms and biases."""
        optimizer = super().create_optimizer(model)
        if isinstance(optimizer, DummyOptim):
            optimizer.params = [{"params": optimizer.params}]
            if decay := self.args.weight_decay:
                decayed_names = set(self.get_decay_parameter_names(self.model))
                undecayed = [
                    parameter for name, parameter in self.model.named_parameters() if name not in decayed_names
                ]
                optimizer.params = split_groups(
                    [optimizer.params[0] | {"weight_decay": decay}], undecayed, weight_decay=0.0
                )
        return optimizer

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of micro batches, which stay in host memory until they are computed."""
        args = self.args
        self.batches = StepBatches(
            self.train_dataset.lengths,
            args.train_batch_size,
            self.global_batch_size,
            args.data_seed,
            args.world_size,
            args.process_index,
        )
        return DataLoader(
            self.train_dataset,
            batch_sampler=self.batches,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory,
        )

    def _run_epoch(self, **kwargs) -> None:
        self.batches.epoch = epoch = kwargs["epoch"]
        self.batches.first_step = kwargs["steps_trained_in_current_epoch"] if epoch == kwargs["epochs_trained"] else 0
        self._steps = iter(range(self.batches.first_step, len(self.batches)))
        if kwargs["resume_from_checkpoint"] and epoch == kwargs["epochs_trained"]:
            self._restore_unlogged_loss()
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict], num_batches: int, device: torch.device
    ) -> tuple[list[list[dict]], int]:
        """Return the step's micro batches as one item, and its number of tokens with loss over all processes.

        Trainer would count the tokens of the batches, gather the counts and wait for the GPU.
        """
        number = next(self._steps)
        micro_batches = [next(epoch_iterator) for _ in self.batches.step(self.batches.epoch, number)]
        rows = self.batches.list_samples(self.batches.epoch, number)
        # if max_length truncates every answer of a step, its loss is 0, not 0 / 0
        return [micro_batches], max(1, sum(self.train_dataset.answers[row] for row in rows))

    def training_step(self, model: nn.Module, inputs: list[dict], *args, **kwargs) -> torch.Tensor:
        """Compute the step's micro batches and return the sum of their losses; the last one applies the gradients."""
        # DeepSpeed's engine sets the next learning rate within the step, before Trainer reads the rate that it logs
        self._rate = super()._get_learning_rate()
        losses = []
        for number, micro_batch in enumerate(inputs, start=1):
            self.accelerator.gradient_state._set_sync_gradients(number == len(inputs))
            losses.append(super().training_step(model, micro_batch, *args, **kwargs))
            self._log_reading()  # of the step before; the GPU is busy with this micro batch
        return torch.stack(losses).sum()

    def floating_point_ops(self, inputs: list[dict]) -> int:
        """Return 0, because the sum is not used, and counting parameters at every micro batch delays the GPU."""
        return 0

    def _get_learning_rate(self) -> float:
        return self._rate

    def _keep_unlogged_loss(self) -> None:
        """Save the losses since the last row of the log in the state; the next row is a mean over all of them."""
        losses = self.accelerator.gather(self._tr_loss).reshape(-1).tolist()  # one loss for each process
        self.state.stateful_callbacks[UNLOGGED_LOSS_KEY] = {"since": self._globalstep_last_logged, "losses": losses}

    def _restore_unlogged_loss(self) -> None:
        unlogged = self.state.stateful_callbacks[UNLOGGED_LOSS_KEY]
        self._globalstep_last_logged = unlogged["since"]
        self._tr_loss += unlogged["losses"][self.args.process_index]

    def _save_checkpoint(self, model, trial) -> None:
        self._keep_unlogged_loss()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            step, folder = self.state.global_step, Path(self.args.output_dir)
            mark_complete(folder / f"checkpoint-{step}", step, self.fingerprint, self.args.world_size)
            discard_checkpoints(folder, newest=folder / f"checkpoint-{step}")


class StageTrainer(ResumableTrainer):
    """Trainer of a stage, whose checkpoints hold no frozen weights and come with scores of held-out answers.

    Scores are rows of the history that is saved with a checkpoint, so a resumed training has each score once.

    Args:
        prepare_inputs: function that converts a batch of the loader to the model's inputs on the device.
        save_checked: function (folder, steps) that writes the trained weights into a checkpoint folder, on every rank,
            and raises if they are not valid after this number of steps.
        progress_file: file of the newest progress, for watch.py.
        projector_learning_rate: learning rate of projector and mining, under the same schedule; None: the learning rate
            of the other parameters.
        prepare_kernels: function that prepares the GPU's kernels for micro batches with these numbers of images.
        scorer: scorer of held-out answers; None: no scores.
    """

    def __init__(
        self,
        *args,
        prepare_inputs: Callable[[dict[str, torch.Tensor], torch.device], dict[str, torch.Tensor]],
        save_checked: Callable[[Path, int], None],
        progress_file: Path,
        projector_learning_rate: float | None = None,
        prepare_kernels: Callable[[list[int]], None] | None = None,
        scorer: Scorer | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.scorer = scorer
        self.projector_learning_rate = projector_learning_rate
        self.prepare_inputs = prepare_inputs
        self._prepare_kernels = prepare_kernels
        self.save_checked = save_checked
        self.start = time.monotonic()
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(ProgressLines(progress_file))

    def create_optimizer(self, model=None) -> torch.optim.Optimizer | DummyOptim:
        """Create the optimizer, with a group of its own for the projector if it has its own learning rate.

        Trainer calls it twice if the optimizer is not DeepSpeed's.
        """
        optimizer = super().create_optimizer(model)
        if self.projector_learning_rate:
            is_deepspeed = isinstance(optimizer, DummyOptim)
            groups = optimizer.params if is_deepspeed else optimizer.param_groups
            groups = split_groups(
                groups, find_projector_parameters(self.model).values(), lr=self.projector_learning_rate
            )
            if is_deepspeed:
                optimizer.params = groups
            else:
                optimizer.param_groups.clear()
                for group in groups:
                    optimizer.add_param_group(group)
        return optimizer

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        if self.projector_learning_rate:
            self._projector_rate = float(self.lr_scheduler.get_last_lr()[-1])
        return super().training_step(*args, **kwargs)

    @property
    def scores(self) -> list[dict]:
        """Rows of the history: eval_loss, eval_accuracy (of questions), eval_questions, eval_seconds and correct.

        Rows of other questions, which an earlier start scored, are left out.
        """
        return [
            row for row in self.state.log_history if self.scorer and row.get("asked") == self.scorer.held_out.digest
        ]

    def score(self) -> None:
        """Score the current model, once at each step."""
        scores, step = self.scores, self.state.global_step
        if self.scorer is None or (scores and scores[-1]["step"] == step):
            return
        score = self.scorer.score(self.model_wrapped, self.args.device)
        accuracy = {"eval_accuracy": score.accuracy} if self.scorer.held_out.kind == "questions" else {}
        logs = {"eval_loss": score.loss} | accuracy | {"eval_questions": len(score.correct)}
        self.log(logs | {"eval_seconds": round(score.seconds, 3)})
        self.state.log_history[-1] |= {"correct": score.correct, "asked": self.scorer.held_out.digest}

    def _save_checkpoint(self, model, trial) -> None:
        self.score()
        super()._save_checkpoint(model, trial)

    def get_batch_samples(self, *args) -> tuple[list[list[dict]], int]:
        """Return the step's micro batches and tokens; prepare kernels before the first step."""
        if self._prepare_kernels:  # the loader's processes start meanwhile
            self._prepare_kernels(self._list_numbers_of_images())
            self._prepare_kernels = None
        return super().get_batch_samples(*args)

    def _list_numbers_of_images(self) -> list[int]:
        """Return the different numbers of images in this process's micro batches of the next steps, in order."""
        batches, images = self.batches, self.train_dataset.images
        steps = range(batches.first_step, min(batches.first_step + PREPARED_STEPS, len(batches)))
        micro_batches = (micro_batch for number in steps for micro_batch in batches.step(batches.epoch, number))
        numbers = {sum(images[row] for row in rows if row is not None) for rows in micro_batches}
        return sorted(numbers - {0})

    def _read_rates(self) -> dict[str, float]:
        rates = super()._read_rates()
        return rates | {"projector_learning_rate": self._projector_rate} if self.projector_learning_rate else rates

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs | {"seconds": round(time.monotonic() - self.start, 3)}, start_time)

    def _prepare_inputs(self, inputs: dict) -> dict:
        # Trainer's own method would cast float tensors to the engine's bf16
        return self.prepare_inputs(inputs, self.args.device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.save_checked(folder, self.applied_steps)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.model_wrapped.save_checkpoint(output_dir, exclude_frozen_parameters=True)
        if self.args.should_save and not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper):  # not DeepSpeed's
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
