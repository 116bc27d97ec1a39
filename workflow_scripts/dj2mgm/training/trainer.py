"""transformers' Trainer, saving only what is trained and saying how far it is."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import cpuinfo
import torch
import transformers.masking_utils
import transformers.trainer
from accelerate.utils import DeepSpeedSchedulerWrapper, DummyOptim
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import TrainOutput

from dj2mgm.divergence import Diverged, check_end, check_finite, diverged, last_healthy_step
from dj2mgm.mgm.trained_weights import projector_parameters
from dj2mgm.training.batches import StepBatches
from dj2mgm.training.checkpoints import discard_checkpoints, mark_complete, newest_before
from dj2mgm.training.optimizer import repeat_products_of_betas, set_apart
from dj2mgm.training.progress import ProgressLines
from dj2mgm.training.scoring import Scorer

_load_checkpoint = transformers.trainer.deepspeed_load_checkpoint


def _load_trained_weights_only(engine, path, load_module_strict=True):
    # To say "into host memory" DeepSpeed passes a function, which torch.load refuses for torchao's 8-bit states
    load = engine.checkpoint_engine.load
    engine.checkpoint_engine.load = lambda file, map_location=None: load(file, map_location="cpu")
    # Trainer is lenient only for a PeftModel; our checkpoints leave the frozen base out in stage 1 too
    _load_checkpoint(engine, path, load_module_strict=False)
    if isinstance(engine.basic_optimizer, DeepSpeedCPUAdam):
        repeat_products_of_betas(engine.basic_optimizer)


transformers.trainer.deepspeed_load_checkpoint = _load_trained_weights_only

# StepBatches begins where a resumed epoch goes on.
transformers.trainer.skip_first_batches = lambda loader, steps: loader

# Batches are padded, never packed. To find that out, transformers waits for the GPU at every micro batch.
transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None

# It starts a Python to ask the processor; DeepSpeed asks three times for its optimizer on the CPU.
cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)

SCALE_AT_MINIMUM = "loss scale already at minimum"  # DeepSpeed's exception when fp16 does not recover

UNLOGGED = "UnloggedLoss"  # among what Trainer's state keeps of others


class ResumableTrainer(Trainer):
    """Computes each step in the micro batches of `StepBatches`. Marks a checkpoint complete when every process has
    written its part, and only then removes the older ones. Where that of the last step is resumed, nothing is trained.

    A training that diverges is stopped on every process, and checkpoints whose weights had diverged are removed. The
    norm of all gradients is on the host at every step in any case, and equal on all processes, so nothing waits for it.

    Args:
        fingerprint: of settings, inputs and code, stored in each checkpoint.
    """

    def __init__(self, *args, fingerprint: str, **kwargs):
        super().__init__(*args, **kwargs)
        self.fingerprint = fingerprint
        self.args.save_total_limit = None  # Trainer would remove them before the new one counts
        self.global_batch_size = self.get_total_train_batch_size(self.args)
        # Trainer goes through whole steps; how many micro batches one has, is decided step by step
        self.args.gradient_accumulation_steps = 1

    def train(self, *args, **kwargs) -> TrainOutput:
        """Train, and raise Diverged if the training diverges."""
        try:
            output = super().train(*args, **kwargs)
            check_end(self._stage, self._losses, self.global_batch_size, self.args.learning_rate)
        except Diverged as error:
            raise self._without_diverged_checkpoints(error) from None
        except Exception as error:
            if SCALE_AT_MINIMUM not in str(error):
                raise
            step, problem = self.state.global_step, "the gradient is not finite at the lowest loss scale of fp16"
            error = diverged(self._stage, step + 1, problem, self.args.learning_rate)
            raise self._without_diverged_checkpoints(error) from None
        return output

    @property
    def _stage(self) -> str:
        return Path(self.args.output_dir).parent.name

    @property
    def _losses(self) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.state.log_history if "loss" in row]

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args, **kwargs) -> None:
        """Stop at the first gradient that is not finite, before the step is logged or saved."""
        engine = self.model_wrapped
        # a dynamic loss scale of fp16 skips such steps until gradients fit, and DeepSpeed raises if they never do
        if grad_norm is not None and not (engine.fp16_enabled() and engine.dynamic_loss_scale()):
            self._check_finite(grad_norm, "gradient's norm")
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log finite values only; stop at a loss that is not finite."""
        for name in {"loss", "eval_loss"} & logs.keys():
            self._check_finite(logs[name], "loss of held-out answers" if name == "eval_loss" else name)
        logs = {name: value for name, value in logs.items() if name != "grad_norm" or math.isfinite(value)}
        super().log(logs, start_time)

    def _check_finite(self, value: float, name: str) -> None:
        check_finite(self._stage, self.state.global_step, value, self.args.learning_rate, name)

    def _without_diverged_checkpoints(self, error: Diverged) -> Diverged:
        """Remove checkpoints after which no healthy loss was logged; return the error with how the command goes on."""
        folder = Path(self.args.output_dir)
        healthy = newest_before(folder, last_healthy_step(self._losses, self.global_batch_size))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            discard_checkpoints(folder, newest=healthy)
        again = f"goes on from {healthy.name}" if healthy else "starts over"
        return Diverged(f"{error}. Nothing was written; the same command {again}")

    def create_optimizer(self, model=None) -> torch.optim.Optimizer | DummyOptim:
        """DeepSpeed's own gets groups too: it spares norms and biases from weight decay, as Trainer's do."""
        optimizer = super().create_optimizer(model)
        if isinstance(optimizer, DummyOptim):
            optimizer.params = [{"params": optimizer.params}]
            if decay := self.args.weight_decay:
                decaying = set(self.get_decay_parameter_names(self.model))
                spared = [parameter for name, parameter in self.model.named_parameters() if name not in decaying]
                optimizer.params = set_apart([optimizer.params[0] | {"weight_decay": decay}], spared, weight_decay=0.0)
        return optimizer

    def get_train_dataloader(self) -> DataLoader:
        """Micro batches stay in host memory until their turn comes."""
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
        self._steps = (self.batches.step(epoch, number) for number in range(self.batches.first_step, len(self.batches)))
        if kwargs["resume_from_checkpoint"] and epoch == kwargs["epochs_trained"]:
            self._restore_unlogged_loss()
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict], num_batches: int, device: torch.device
    ) -> tuple[list[list[dict]], torch.Tensor]:
        """One item, the step's micro batches; and how many tokens carry its loss, over all processes."""
        micro_batches = [next(epoch_iterator) for _ in next(self._steps)]
        # none at all where max_length cuts off every answer of a step: its loss is then 0, not 0 / 0
        return [micro_batches], self._get_num_items_in_batch(micro_batches, device).clamp(min=1)

    def training_step(self, model: nn.Module, inputs: list[dict], *args, **kwargs) -> torch.Tensor:
        """A step's micro batches one after another: the sum of their losses; gradients are applied with the last."""
        # DeepSpeed's engine goes on to the next rate within the step, before Trainer asks for what it logs
        self._rate = super()._get_learning_rate()
        losses = []
        for number, micro_batch in enumerate(inputs, start=1):
            self.accelerator.gradient_state._set_sync_gradients(number == len(inputs))
            losses.append(super().training_step(model, micro_batch, *args, **kwargs))
        return torch.stack(losses).sum()

    def floating_point_ops(self, inputs: list[dict]) -> int:
        return 0  # nobody reads the sum, and the GPU waits while every micro batch counts the parameters

    def _get_learning_rate(self) -> float:
        return self._rate

    def _keep_unlogged_loss(self) -> None:
        """For the next row of the log, which is a mean over all steps since the last one."""
        losses = self.accelerator.gather(self._tr_loss).reshape(-1).tolist()  # of each process
        self.state.stateful_callbacks[UNLOGGED] = {"since": self._globalstep_last_logged, "losses": losses}

    def _restore_unlogged_loss(self) -> None:
        kept = self.state.stateful_callbacks[UNLOGGED]
        self._globalstep_last_logged = kept["since"]
        self._tr_loss += kept["losses"][self.args.process_index]

    def _save_checkpoint(self, model, trial) -> None:
        self._keep_unlogged_loss()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            step, folder = self.state.global_step, Path(self.args.output_dir)
            mark_complete(folder / f"checkpoint-{step}", step, self.fingerprint, self.args.world_size)
            discard_checkpoints(folder, newest=folder / f"checkpoint-{step}")


class StageTrainer(ResumableTrainer):
    """Saves checkpoints without the frozen base, after `save_checked` approved their weights, each with how well its
    model answers held-out questions.

    Scores are rows of the history that is saved with a checkpoint, so a resumed training has each once.

    Args:
        inputs_of: a batch as the loader hands it over → as the model takes it, on the device.
        save_checked: called on every rank with the checkpoint folder; writes the trained weights and raises if they
            must not count as saved.
        progress_file: where the newest progress is, for watch.py.
        projector_learning_rate: of projector and mining, under the same schedule; None: that of the rest.
        scorer: asks the questions; None: none are asked.
    """

    def __init__(
        self,
        *args,
        inputs_of: Callable[[dict[str, torch.Tensor], torch.device], dict[str, torch.Tensor]],
        save_checked: Callable[[Path], None],
        progress_file: Path,
        projector_learning_rate: float | None = None,
        scorer: Scorer | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.scorer = scorer
        self._step_began: list[float] = []
        self.projector_learning_rate = projector_learning_rate
        self.inputs_of = inputs_of
        self.save_checked = save_checked
        self.start = time.monotonic()
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(ProgressLines(progress_file))

    def create_optimizer(self, model=None) -> torch.optim.Optimizer | DummyOptim:
        """Trainer calls it twice where the optimizer is not DeepSpeed's own."""
        optimizer = super().create_optimizer(model)
        if self.projector_learning_rate:
            own = isinstance(optimizer, DummyOptim)
            groups = optimizer.params if own else optimizer.param_groups
            groups = set_apart(groups, projector_parameters(self.model).values(), lr=self.projector_learning_rate)
            if own:
                optimizer.params = groups
            else:
                optimizer.param_groups.clear()
                for group in groups:
                    optimizer.add_param_group(group)
        return optimizer

    def get_batch_samples(self, *args, **kwargs) -> tuple[list[list[dict]], torch.Tensor]:
        self._step_began.append(time.monotonic())
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        if self.projector_learning_rate:
            self._projector_rate = float(self.lr_scheduler.get_last_lr()[-1])
        return super().training_step(*args, **kwargs)

    @property
    def scores(self) -> list[dict]:
        """Rows of the history: eval_loss, eval_accuracy where there are questions, eval_questions, eval_seconds,
        correct. Those of other questions, which an earlier start asked, are left out."""
        return [
            row for row in self.state.log_history if self.scorer and row.get("asked") == self.scorer.held_out.digest
        ]

    def score(self) -> None:
        """The model as it is, once at each step."""
        scores, step = self.scores, self.state.global_step
        if self.scorer is None or (scores and scores[-1]["step"] == step):
            return
        count = scores[0]["eval_questions"] if scores else None
        score = self.scorer.score(self.model_wrapped, self.args.device, count, self._seconds_for_scores())
        accuracy = {"eval_accuracy": score.accuracy} if self.scorer.held_out.kind == "questions" else {}
        logs = {"eval_loss": score.loss} | accuracy | {"eval_questions": len(score.correct)}
        self.log(logs | {"eval_seconds": round(score.seconds, 3)})
        self.state.log_history[-1] |= {"correct": score.correct, "asked": self.scorer.held_out.digest}

    def _seconds_for_scores(self) -> float:
        """At each checkpoint; without end where this process has trained nothing."""
        steps = [end - start for start, end in pairwise([*self._step_began, time.monotonic()])]
        checkpoints = -(-self.state.max_steps // self.state.save_steps)
        training = statistics.median(steps) * self.state.max_steps if steps else math.inf
        return self.scorer.settings.share * training / checkpoints

    def _save_checkpoint(self, model, trial) -> None:
        self.score()
        super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "learning_rate" in logs and self.projector_learning_rate:
            logs = logs | {"projector_learning_rate": self._projector_rate}
        super().log(logs | {"seconds": round(time.monotonic() - self.start, 3)}, start_time)

    def _prepare_inputs(self, inputs: dict) -> dict:
        return self.inputs_of(
            inputs, self.args.device
        )  # not by Trainer, which casts what is float to the engine's bf16

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.save_checked(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.model_wrapped.save_checkpoint(output_dir, exclude_frozen_parameters=True)
        if self.args.should_save and not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper):  # not DeepSpeed's
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
