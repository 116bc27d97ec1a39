"""One training stage, from settings to saved weights; `pretrain.py` and `finetune.py` choose the trained parameters."""

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from dj2mgm.cli.messages import note
from dj2mgm.compute import set_seed, use_cpu_threads
from dj2mgm.errors import InputError
from dj2mgm.models.families import load_family
from dj2mgm.models.trained_weights import read_full_shapes
from dj2mgm.models.tuning import Tuning
from dj2mgm.models.vision_language import Parts
from dj2mgm.monitoring.memory_csv import join_seconds, read_memory_rows
from dj2mgm.monitoring.sampler import MemorySampler
from dj2mgm.planning.architecture import PlanningError
from dj2mgm.planning.prediction import read_free_memory
from dj2mgm.settings.batch_sizes import AUTO, count_steps, describe_steps
from dj2mgm.settings.deepspeed_files import find_fixed_sizes
from dj2mgm.settings.frozen_precision import FROZEN
from dj2mgm.training.arguments import build_training_arguments, choose_optimizer
from dj2mgm.training.build_locks import remove_stale_locks
from dj2mgm.training.checkpoints import discard_checkpoints, find_checkpoint
from dj2mgm.training.fingerprint import compute_fingerprint, compute_input_digest, run_in_background
from dj2mgm.training.frozen_layers import replace_frozen_layers, require_fp8
from dj2mgm.training.gpu_memory import is_out_of_memory, reserve_memory_for_kernels
from dj2mgm.training.memory_plan import (
    build_architecture,
    build_workload,
    choose_plan,
    halve_micro_batch,
    keep_plan,
    require_explicit_settings,
    require_memory,
)
from dj2mgm.training.model_preparation import (
    choose_attention,
    compile_layers,
    disable_cudnn_attention,
    gather_whole_layers,
)
from dj2mgm.training.outputs import check_weights, gather_weights, write_metrics
from dj2mgm.training.processes import (
    decide_together,
    gather_early,
    join_process_group,
    leave_process_group,
    restart_training,
)
from dj2mgm.training.scoring import HeldOutQuestions, Scorer, read_held_out_questions
from dj2mgm.training.settings import TrainingSettings
from dj2mgm.training.trackers import PROJECT, Trackers, check_trackers, read_row_counts
from dj2mgm.training.trainer import StageTrainer
from dj2mgm.training.training_data import Collator, ConversationDataset

SLOW_FP8 = (
    "precision: fp8 made Qwen3-VL, SmolVLM2 and PaliGemma slower, and InternVL3.5 8 % faster (docs/models.md); set "
    "bf16 unless your own measurement differs"
)


def locate_held_out_files(args: Namespace) -> tuple[Path, Path] | None:
    """Return the evaluation split and its settings, or None; `score_while_training` decides whether they are used."""
    return (args.evaluation, args.generate_config) if args.evaluation and args.generate_config else None


class StageRun:
    """A training stage, from its settings to its declared outputs, which are written last.

    Args:
        tuning: tuning of the stage (models/tuning.py).
        settings: settings of the stage, possibly with "auto".
        inputs: `data` (jsonl), `model` (folder), possibly `pairs` (jsonl), and other files that decide the result.
        output_dir: folder of the outputs.
        prepare: function that freezes and wraps the base model: only trained parameters require gradients afterwards.
        save: function that writes the trained weights (whole tensors by name) of a model into a folder, on the first
            process.
        held_out: the evaluation split and the settings of the stage `generate`; the weights do not depend on them.
    """

    def __init__(
        self,
        tuning: Tuning,
        settings: TrainingSettings,
        inputs: dict[str, Path],
        output_dir: Path,
        prepare: Callable[[nn.Module, Parts], nn.Module],
        save: Callable[[nn.Module, dict[str, torch.Tensor], Path], None],
        held_out: tuple[Path, Path] | None = None,
    ):
        self.tuning, self.inputs, self.output_dir, self.held_out = tuning, inputs, output_dir, held_out
        self.requested = self.settings = settings
        self.prepare, self.save = prepare, save
        self.checkpoints, self.progress_file = output_dir / "checkpoints", output_dir / "progress.json"
        self.plan_file = self.checkpoints / "training_plan.json"

    def run(self) -> None:
        """Train and write the outputs."""
        self.prepare_process()
        self.read_data()
        self.plan_memory()
        self.join_processes()
        self.select_checkpoint()
        self.load_model()
        self.build_trainer()
        self.train()
        self.write_outputs()
        leave_process_group()

    def prepare_process(self) -> None:
        """Check settings that depend on this machine, and set threads, locks and seed."""
        use_cpu_threads(self.settings.cpu_threads)
        check_trackers(self.settings.trackers)
        if self.settings.precision == "fp8":
            require_fp8()
        self.attention, self.attention_note = choose_attention(self.settings)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            remove_stale_locks()
        set_seed(self.settings.seed)

    def read_data(self) -> None:
        """Read conversations and held-out questions, while the digest of the inputs is computed."""
        settings = self.settings
        self.digest = run_in_background(compute_input_digest, self.inputs)
        self.family = load_family(self.inputs["model"])
        files = [self.inputs[name] for name in ("pairs", "data") if name in self.inputs]
        self.dataset = ConversationDataset(files, self.family.make_encoder(settings.template, settings.max_length))
        self._add_epochs()
        self.questions: HeldOutQuestions | None = None
        if self.held_out and settings.score_while_training:
            count = settings.score_while_training.questions
            self.questions = read_held_out_questions(
                *self.held_out, self.tuning, self.dataset.encoder, settings.max_length, count
            )

    def _add_epochs(self) -> None:
        """Train at least `min_steps` steps."""
        rows = len(self.dataset)
        self.planned_steps = count_steps(self.settings, rows)
        self.steps_note = describe_steps(self.output_dir.name, self.settings, rows)
        self.requested = self.settings = self.settings.with_enough_steps(rows)

    def plan_memory(self) -> None:
        """Choose "auto" settings, and check that the stage fits into memory."""
        projector = self.tuning != "lora" or "projector" in self.inputs
        architecture = build_architecture(self.family, self.dataset)
        self.workload = build_workload(self.tuning, self.settings, architecture, self.dataset, projector)
        gpus, nodes = self.settings.gpus, self.settings.nodes
        own_memory = read_free_memory(gpus, nodes)
        reserve_memory_for_kernels()
        disable_cudnn_attention()
        # all processes must make the same choice, so they plan for the least free memory of all processes
        free_gib = zip(*gather_early([own_memory.gpu_gib, own_memory.host_gib]), strict=True)
        gpu_gib, host_gib = (None if None in gib else min(gib) for gib in free_gib)
        free = replace(own_memory, gpu_gib=gpu_gib, host_gib=host_gib)
        self.memory_plan = None
        try:
            self.settings = choose_plan(self.requested, self.workload, free, self.plan_file)
            self.memory_plan = require_memory(self.settings, self.workload, free)
        except PlanningError as problem:
            require_explicit_settings(problem, self.settings)

    def join_processes(self) -> None:
        """Join the process group, before the model: transformers then loads it into ZeRO-3's partitions."""
        self.fingerprint = compute_fingerprint(self.settings, self.digest.result())
        hidden_size = self.family.config.get_text_config().hidden_size
        self.arguments = build_training_arguments(self.settings, self.checkpoints, hidden_size)
        join_process_group()
        if decide_together(lambda: self.settings) != self.settings:
            raise InputError(
                "auto: the processes chose different settings, because their nodes differ. Set deepspeed, "
                "micro_batch_size and activation_checkpointing"
            )
        self.is_first = self.arguments.process_index == 0

    def select_checkpoint(self) -> None:
        """Select the checkpoint to resume from, discard others, and start recording memory."""
        self.checkpoint, reason = decide_together(
            lambda: find_checkpoint(self.checkpoints, self.fingerprint, self.settings.gpus)
        )
        self.memory = MemorySampler(self.checkpoints / "memory.csv", resumed=self.checkpoint is not None)
        self.memory.start()
        if not self.is_first:
            return
        truncation = self.dataset.truncation_note(self.settings.max_length)
        slow = SLOW_FP8 if self.settings.precision == "fp8" and self.family.has_stock_class else None
        for sentence in filter(None, (reason, self.attention_note, truncation, self.steps_note, slow)):
            note(sentence)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        discard_checkpoints(self.checkpoints, newest=self.checkpoint)
        keep_plan(self.requested, self.settings, self.workload, self.plan_file)
        if self.checkpoint is None:
            self.progress_file.unlink(missing_ok=True)

    def load_model(self) -> None:
        """Load the model, freeze and wrap it, and compile its layers."""
        model = self.family.load(self.settings.dtype, self.attention)
        self.parts = self.family.find_parts(model)
        self.model = self.prepare(model, self.parts)
        gather_whole_layers(self.model, self.parts)
        if self.settings.precision in FROZEN:
            replace_frozen_layers(self.parts.decoder, self.settings.precision)
        if self.settings.compile and torch.cuda.is_available():
            compile_layers(self.parts)
        parameters = self.model.named_parameters()
        self.trained = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.shapes = read_full_shapes(self.trained)

    def build_trainer(self) -> None:
        """Build the trainer, with scores of held-out questions and trackers."""
        settings, longest = self.settings, max(self.dataset.lengths)
        scorer = None
        if self.questions:
            loading = settings.micro_batch_size, longest, settings.workers, settings.dtype
            scoring = settings.score_while_training
            scorer = Scorer(self.questions, scoring, self.parts.head, self.family.prepare_inputs, *loading)
        self.trainer = StageTrainer(
            model=self.model,
            args=self.arguments,
            train_dataset=self.dataset,
            data_collator=Collator(self.dataset.encoder, longest, settings.dtype),
            prepare_inputs=self.family.prepare_inputs,
            save_checked=self.save_checked,
            fingerprint=self.fingerprint,
            global_batch_size=settings.global_batch_size,
            progress_file=self.progress_file,
            projector_learning_rate=settings.projector_learning_rate,
            scorer=scorer,
            optimizer_cls_and_kwargs=choose_optimizer(settings),
        )
        if self.is_first:
            row_counts = read_row_counts(self.inputs["data"].parent / "summary.json")
            labels = {**settings.labels, "stage": self.output_dir.name} | row_counts
            trackers = Trackers(settings.trackers, labels, self.checkpoints, resumed=self.checkpoint is not None)
            self.arguments.project, self.arguments.run_name = PROJECT, trackers.run_name
            for callback in trackers.callbacks():
                self.trainer.add_callback(callback)

    def save_checked(self, folder: Path) -> None:
        """Gather the trained weights on all processes; check and save them on the first one."""
        weights = gather_weights(self.trained, keep=self.is_first)
        if self.is_first:
            check_weights(weights, self.shapes, self.trainer.state.global_step)
            self.save(self.model, weights, folder)

    def train(self) -> None:
        """Train; after a GPU ran out of memory, start again with half of the micro batch if it was "auto"."""
        self.memory.phase = "training"
        try:
            self.trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        except RuntimeError as error:
            if is_out_of_memory(error) and self.requested.micro_batch_size == AUTO:
                self._halve_micro_batch()
            raise
        self.trainer.score()  # missing if the last checkpoint was scored on other questions

    def _halve_micro_batch(self) -> None:
        """Halve the micro batch for the next start; start again at once if this process trains alone."""
        fixed_sizes = find_fixed_sizes(self.settings.deepspeed)
        if fixed := [key for key in fixed_sizes if key != "train_batch_size"]:
            note(
                f"the GPU ran out of memory, and the DeepSpeed file fixes {' and '.join(fixed)}. Set auto there, so "
                "that the stage can resume with half of the micro batch, or set a smaller micro batch"
            )
        elif halve_micro_batch(self.plan_file):
            if self.arguments.world_size == 1:
                note("the GPU ran out of memory: resuming from the last checkpoint with half of the micro batch")
                restart_training()
            note("the GPU ran out of memory: the same command resumes with half of the micro batch")

    def write_outputs(self) -> None:
        """Save the weights, then the metrics."""
        self.memory.phase = "saving"
        self.save_checked(self.output_dir)
        record = {
            "rows": len(self.dataset),
            "planned_steps": self.planned_steps,  # fewer than `steps` if `min_steps` added epochs
            "without_answer": self.dataset.answers.count(0),  # the answer lies beyond max_length
            "samples": self.trainer.batches.samples_in(self.trainer.state.global_step),
            "trained_parameters": sum(shape.numel() for shape in self.shapes.values()),
            "resumed_from": self.checkpoint.name if self.checkpoint else None,
            "memory": self.memory.finish(self.output_dir),
            "memory_plan": self.memory_plan,
            "activation_checkpointing": self.settings.activation_checkpointing,
        }
        if self.is_first:
            seconds = join_seconds(read_memory_rows(self.output_dir / "memory.csv"))
            record["train_seconds"] = round(seconds[-1], 1)
            write_metrics(self.settings, self.trainer, record, self.output_dir)
