"""One training stage, from settings to saved weights; `pretrain.py` and `finetune.py` choose the trained parameters."""

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from torch import nn
from transformers import TrainingArguments

from dj2mgm.cli.messages import note, report_activity
from dj2mgm.compute import set_seed, use_cpu_threads, use_own_gpu
from dj2mgm.errors import InputError
from dj2mgm.models.generators import load_family
from dj2mgm.models.trained_weights import read_full_shapes
from dj2mgm.models.tuning import Tuning
from dj2mgm.models.vision_language import ModelFamily, ModelParts
from dj2mgm.monitoring.memory_files import join_seconds, read_memory_rows
from dj2mgm.monitoring.readings import MemorySampler
from dj2mgm.planning.architecture import PlanningError
from dj2mgm.planning.prediction import read_free_memory
from dj2mgm.planning.step import Workload
from dj2mgm.settings.training_stages import AUTO, FROZEN, count_steps, describe_steps, find_fixed_sizes
from dj2mgm.training.arguments import build_training_arguments, choose_optimizer
from dj2mgm.training.build_locks import remove_stale_locks
from dj2mgm.training.checkpoints import discard_checkpoints, find_checkpoint
from dj2mgm.training.frozen_layers import replace_frozen_layers, require_fp8
from dj2mgm.training.memory_plan import (
    build_architecture,
    build_workload,
    can_halve_micro_batch,
    choose_plan,
    halve_micro_batch,
    is_halved,
    is_out_of_memory,
    keep_plan,
    require_explicit_settings,
    require_memory,
    reserve_memory_for_kernels,
)
from dj2mgm.training.model_preparation import (
    choose_attention,
    compile_layers,
    disable_cudnn_attention,
    gather_whole_layers,
    plan_convolutions,
)
from dj2mgm.training.outputs import check_weights, gather_weights, write_metrics
from dj2mgm.training.processes import (
    decide_together,
    gather_early,
    is_first_process,
    join_process_group,
    leave_process_group,
    restart_training,
)
from dj2mgm.training.scoring import HeldOutQuestions, Scorer, count_scored_questions, read_held_out_questions
from dj2mgm.training.settings import TrainingSettings, compute_fingerprint, compute_input_digest, run_in_background
from dj2mgm.training.trackers import PROJECT_NAME, Trackers, check_trackers, read_row_counts
from dj2mgm.training.trainer import StageTrainer
from dj2mgm.training.training_data import Collator, ConversationDataset

PLAN_WATCH_S = 1.0  # seconds between two readings of the plan, which another process with a full GPU may have halved
SLOW_FP8 = (
    "precision: fp8 made Qwen3-VL, SmolVLM2 and PaliGemma slower, and InternVL3.5 8 % faster (docs/performance.md); "
    "set bf16 unless your own measurement differs"
)


def locate_held_out_files(args: Namespace) -> tuple[Path, Path] | None:
    """Return the evaluation split and its settings, or None; `score_while_training` decides whether they are used."""
    return (args.evaluation, args.generate_config) if args.evaluation and args.generate_config else None


def _find_fixed_batch(settings: TrainingSettings) -> list[str]:
    """Return the keys of the DeepSpeed file that fix the micro batch."""
    return [key for key in find_fixed_sizes(settings.deepspeed) if key != "train_batch_size"]


@dataclass(frozen=True)
class StageData:
    """Data of a stage, encoded for its model."""

    family: ModelFamily
    dataset: ConversationDataset
    questions: HeldOutQuestions | None  # None: nothing is scored

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return max(self.dataset.lengths)


@dataclass(frozen=True)
class StagePlan:
    """Settings of a stage without "auto", and the workload that they were chosen for."""

    settings: TrainingSettings
    workload: Workload
    memory: dict | None  # predicted memory by part, for the run's record; None: it cannot be predicted


@dataclass(frozen=True)
class StageModel:
    """Loaded model, and the parameters that the stage trains."""

    model: nn.Module
    parts: ModelParts
    trained: dict[str, nn.Parameter]
    shapes: dict[str, torch.Size]  # whole shapes of `trained`


@dataclass(frozen=True)
class StageRun:
    """A training stage, from its settings to its declared outputs, which are written last.

    Args:
        tuning: tuning of the stage (models/tuning.py).
        requested: settings of the stage, possibly with "auto".
        inputs: `data` (jsonl), `model` (folder), possibly `pairs` (jsonl), and other files that decide the result.
        output_dir: folder of the outputs.
        prepare: function that freezes and wraps the base model, after which only trained parameters require gradients.
        save: function that writes the trained weights (whole tensors by name) of a model into a folder, on the first
            process.
        held_out: the evaluation split and the settings of the stage `generate`; the weights do not depend on them.
    """

    tuning: Tuning
    requested: TrainingSettings
    inputs: dict[str, Path]
    output_dir: Path
    prepare: Callable[[nn.Module, ModelParts], nn.Module]
    save: Callable[[nn.Module, dict[str, torch.Tensor], Path], None]
    held_out: tuple[Path, Path] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"

    @property
    def plan_file(self) -> Path:
        return self.checkpoints / "training_plan.json"

    @property
    def progress_file(self) -> Path:
        return self.output_dir / "progress.json"

    def run(self) -> None:
        """Train and write the outputs."""
        self.prepare_process()
        attention, attention_note = choose_attention(self.requested)
        digest = run_in_background(compute_input_digest, self.inputs)
        data = self.read_data()
        plan = self.plan_memory(data)
        settings = plan.settings  # with a micro batch, activation checkpointing and a DeepSpeed configuration
        fingerprint = compute_fingerprint(settings, digest.result())
        arguments = self.join_processes(settings, data.family)
        checkpoint, reason = decide_together(lambda: find_checkpoint(self.checkpoints, fingerprint, settings.gpus))
        memory = MemorySampler(self.checkpoints / "memory.csv", resumed=checkpoint is not None)
        memory.start()
        if is_first_process():
            self.print_notes(data, reason, attention_note)
            self.prepare_checkpoints(plan, checkpoint)
        report_activity("loading the model")
        model = self.load_model(settings, data.family, attention)  # computes the loss in its head (models/loss.py)
        trainer = self.build_trainer(settings, data, model, arguments, fingerprint)
        if is_first_process():
            self.add_trackers(trainer, resumed=checkpoint is not None)
        memory.phase = "training"
        compiles = settings.compile and torch.cuda.is_available()
        report_activity("compiling layers for the first step" if compiles else "first step")
        self.train(trainer, checkpoint, settings)
        memory.phase = "saving"
        self.save_checked(model, self.output_dir, trainer.applied_steps)
        memory_limits = memory.finish(self.output_dir)
        if is_first_process():
            self.write_metrics(trainer, data, plan, model, checkpoint, memory_limits)
        leave_process_group()

    def prepare_process(self) -> None:
        """Check settings that depend on this machine, and set GPU, threads, locks and seed."""
        use_own_gpu()
        use_cpu_threads(self.requested.cpu_threads)
        check_trackers(self.requested.trackers)
        if self.requested.precision == "fp8":
            require_fp8()
        remove_stale_locks()
        set_seed(self.requested.seed)

    def read_data(self) -> StageData:
        """Read conversations and held-out questions."""
        settings, family = self.requested, load_family(self.inputs["model"])
        files = [self.inputs[name] for name in ("pairs", "data") if name in self.inputs]
        dataset = ConversationDataset(files, family.make_encoder(settings.template, settings.max_length))
        questions = None
        if self.held_out and settings.score_while_training:
            count = count_scored_questions(settings, len(dataset))
            questions = read_held_out_questions(*self.held_out, self.tuning, dataset.encoder, count)
        return StageData(family, dataset, questions)

    def plan_memory(self, data: StageData) -> StagePlan:
        """Choose "auto" settings, and check that the stage fits into memory."""
        settings = self.requested.with_enough_steps(len(data.dataset))
        projector = self.tuning != "lora" or "projector" in self.inputs
        architecture = build_architecture(data.family, data.dataset)
        workload = build_workload(self.tuning, settings, architecture, data.dataset, projector)
        report_activity("planning memory")
        own_memory = read_free_memory(settings.gpus, settings.nodes)
        reserve_memory_for_kernels()
        disable_cudnn_attention()
        # all processes must make the same choice, so they plan for the least free memory of all processes
        free_gib = zip(*gather_early([own_memory.gpu_gib, own_memory.host_gib]), strict=True)
        gpu_gib, host_gib = (None if None in gib else min(gib) for gib in free_gib)
        free = replace(own_memory, gpu_gib=gpu_gib, host_gib=host_gib)
        memory = None
        try:
            settings = choose_plan(settings, workload, free, self.plan_file)
            memory = require_memory(settings, workload, free)
        except PlanningError as problem:
            require_explicit_settings(problem, settings)
        return StagePlan(settings, workload, memory)

    def join_processes(self, settings: TrainingSettings, family: ModelFamily) -> TrainingArguments:
        """Join the process group, before the model: transformers then loads it into ZeRO-3's partitions."""
        arguments = build_training_arguments(settings, self.checkpoints, family.config.get_text_config().hidden_size)
        join_process_group()
        if decide_together(lambda: settings) != settings:
            raise InputError(
                "auto: the processes chose different settings, because their nodes differ. Set deepspeed, "
                "micro_batch_size and activation_checkpointing"
            )
        return arguments

    def print_notes(self, data: StageData, checkpoint_note: str, attention_note: str | None) -> None:
        """Print notes about the choices of the stage and about its data."""
        truncation = data.dataset.describe_truncation()
        steps = describe_steps(self.output_dir.name, self.requested, len(data.dataset))
        slow = SLOW_FP8 if self.requested.precision == "fp8" and data.family.has_stock_class else None
        for sentence in filter(None, (checkpoint_note, attention_note, truncation, steps, slow)):
            note(sentence)

    def prepare_checkpoints(self, plan: StagePlan, checkpoint: Path | None) -> None:
        """Discard checkpoints that a resumed stage cannot need, and write the plan for later starts."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        discard_checkpoints(self.checkpoints, newest=checkpoint)
        keep_plan(self.requested, plan.settings, plan.workload, self.plan_file)
        if checkpoint is None:
            self.progress_file.unlink(missing_ok=True)

    def load_model(self, settings: TrainingSettings, family: ModelFamily, attention: str) -> StageModel:
        """Load the model, freeze and wrap it, and compile its layers."""
        base = family.load(settings.dtype, attention)
        parts = family.find_parts(base)
        model = self.prepare(base, parts)
        gather_whole_layers(model, parts)
        if settings.precision in FROZEN:
            replace_frozen_layers(parts.decoder, settings.precision)
        if settings.compile and torch.cuda.is_available():
            compile_layers(parts)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        return StageModel(model, parts, trained, read_full_shapes(trained))

    def build_trainer(
        self,
        settings: TrainingSettings,
        data: StageData,
        model: StageModel,
        arguments: TrainingArguments,
        fingerprint: str,
    ) -> StageTrainer:
        """Build the trainer, with scores of held-out questions."""
        scorer = None
        if data.questions:
            scorer = Scorer(
                held_out=data.questions,
                head=model.parts.head,
                prepare_inputs=data.family.prepare_inputs,
                micro_batch_size=settings.micro_batch_size,
                longest=data.longest,
                workers=settings.workers,
                dtype=settings.dtype,
            )
        prepare_kernels = partial(
            plan_convolutions, model.parts.depthwise_convolutions, device=arguments.device, dtype=settings.dtype
        )
        return StageTrainer(
            model=model.model,
            args=arguments,
            train_dataset=data.dataset,
            data_collator=Collator(data.dataset.encoder, data.longest, settings.dtype),
            prepare_inputs=data.family.prepare_inputs,
            save_checked=partial(self.save_checked, model),
            fingerprint=fingerprint,
            global_batch_size=settings.global_batch_size,
            progress_file=self.progress_file,
            projector_learning_rate=settings.projector_learning_rate,
            prepare_kernels=prepare_kernels if torch.cuda.is_available() else None,
            scorer=scorer,
            optimizer_cls_and_kwargs=choose_optimizer(settings),
        )

    def add_trackers(self, trainer: StageTrainer, resumed: bool) -> None:
        """Add the callbacks of the experiment trackers."""
        row_counts = read_row_counts(self.inputs["data"].parent / "summary.json")
        labels = {**self.requested.labels, "stage": self.output_dir.name} | row_counts
        trackers = Trackers(self.requested.trackers, labels, self.checkpoints, resumed)
        trainer.args.project, trainer.args.run_name = PROJECT_NAME, trackers.run_name
        for callback in trackers.make_callbacks():
            trainer.add_callback(callback)

    def save_checked(self, model: StageModel, folder: Path, steps: int) -> None:
        """Gather the weights on all processes after a number of applied steps; check and save them on the first one."""
        weights = gather_weights(model.trained, keep=is_first_process())
        if is_first_process():
            check_weights(weights, model.shapes, steps)
            self.save(model.model, weights, folder)

    def train(self, trainer: StageTrainer, checkpoint: Path | None, settings: TrainingSettings) -> None:
        """Train; if a GPU runs out of memory, start again with half of the micro batch if it was "auto".

        Only the process whose GPU is full gets an error. The others wait for it in a collective operation, so a thread
        of theirs watches the plan. Processes on several nodes end instead, and the same command resumes.
        """
        halvable = decide_together(lambda: self._can_halve(settings))
        restartable = halvable and settings.nodes == 1
        if restartable and settings.gpus > 1:
            Thread(target=self._restart_when_halved, name="restart after a full GPU", daemon=True).start()
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._halve_micro_batch(settings, halvable)
            if restartable and is_halved(self.plan_file):  # also if another process was lost
                restart_training()
            raise
        trainer.score()  # no score yet if the resumed checkpoint was scored on other questions

    def _can_halve(self, settings: TrainingSettings) -> bool:
        is_auto = self.requested.micro_batch_size == AUTO
        return is_auto and not _find_fixed_batch(settings) and can_halve_micro_batch(self.plan_file)

    def _halve_micro_batch(self, settings: TrainingSettings, halvable: bool) -> None:
        """Halve the micro batch for the next start, or note why that is not possible."""
        if self.requested.micro_batch_size == AUTO and (fixed := _find_fixed_batch(settings)):
            note(
                f"the GPU ran out of memory, and the DeepSpeed file fixes {' and '.join(fixed)}. Set auto there, so "
                "that the stage can resume with half of the micro batch, or set a smaller micro batch"
            )
        if halvable:
            halve_micro_batch(self.plan_file)
            resuming = "resuming from the last checkpoint" if settings.nodes == 1 else "the same command resumes"
            note(f"the GPU ran out of memory: {resuming} with half of the micro batch")

    def _restart_when_halved(self) -> None:
        while not is_halved(self.plan_file):
            time.sleep(PLAN_WATCH_S)
        restart_training()

    def write_metrics(
        self,
        trainer: StageTrainer,
        data: StageData,
        plan: StagePlan,
        model: StageModel,
        checkpoint: Path | None,
        memory_limits: dict | None,
    ) -> None:
        """Write metrics.json: rows, steps, memory and time of the training."""
        seconds = join_seconds(read_memory_rows(self.output_dir / "memory.csv"))
        record = {
            "rows": len(data.dataset),
            "planned_steps": count_steps(self.requested, len(data.dataset)),
            "without_answer": data.dataset.answers.count(0),
            "samples": trainer.batches.count_samples(trainer.state.global_step),
            "trained_parameters": sum(shape.numel() for shape in model.shapes.values()),
            "resumed_from": checkpoint.name if checkpoint else None,
            "memory": memory_limits,
            "memory_plan": plan.memory,
            "activation_checkpointing": plan.settings.activation_checkpointing,
            "train_seconds": round(seconds[-1], 1),
        }
        write_metrics(plan.settings, trainer, record, self.output_dir)
