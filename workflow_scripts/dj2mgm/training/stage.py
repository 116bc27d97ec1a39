"""One training stage, from settings to saved weights; `pretrain.py` and `finetune.py` choose the trained parameters."""

import math
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import nn
from transformers import TrainingArguments

from dj2mgm.code import modules_of
from dj2mgm.compute import set_seed, use_cpu_threads
from dj2mgm.config.training import AUTO, FROZEN
from dj2mgm.errors import InputError
from dj2mgm.families import load_family
from dj2mgm.files import sha256_of
from dj2mgm.memory.architecture import PlanningError
from dj2mgm.memory.memory_csv import joined_seconds, read_rows
from dj2mgm.memory.prediction import read_free_memory, read_total_memory
from dj2mgm.memory.sampler import MemorySampler
from dj2mgm.messages import note
from dj2mgm.mgm.trained_weights import full_shapes
from dj2mgm.training.build_locks import remove_stale_locks
from dj2mgm.training.checkpoints import discard_checkpoints, find_checkpoint
from dj2mgm.training.datasets import Collator, ConversationDataset
from dj2mgm.training.deepspeed_config import complete_deepspeed_config, find_fixed_sizes
from dj2mgm.training.fp8 import check_fp8
from dj2mgm.training.frozen import replace_frozen_layers
from dj2mgm.training.held_out_questions import read_held_out_questions
from dj2mgm.training.memory_plan import (
    build_architecture,
    build_workload,
    check_memory,
    choose_plan,
    halve_micro_batch,
    keep_plan,
    require_explicit_settings,
)
from dj2mgm.training.metrics import write_metrics
from dj2mgm.training.model import (
    choose_attention,
    compile_layers,
    disable_cudnn_attention,
    gather_whole_layers,
)
from dj2mgm.training.optimizer import choose_optimizer
from dj2mgm.training.out_of_memory import is_out_of_memory, reserve_memory_for_kernels
from dj2mgm.training.processes import decide_together, join_process_group, leave_process_group, start_process_again
from dj2mgm.training.scoring import Scorer
from dj2mgm.training.settings import TrainingSettings
from dj2mgm.training.trackers import PROJECT, Trackers, check_trackers, read_row_counts
from dj2mgm.training.trained_weights import check_weights, gather_weights
from dj2mgm.training.trainer import StageTrainer
from dj2mgm.vision_language import Parts


def held_out_paths(args: Namespace) -> tuple[Path, Path] | None:
    """Return the evaluation split and its settings, or None; `score_while_training` decides whether they are used."""
    return (args.evaluation, args.asking) if args.evaluation and args.asking else None


def run_stage(
    tuning: str,
    settings: TrainingSettings,
    inputs: dict[str, Path],
    output_dir: Path,
    prepare: Callable[[nn.Module, Parts], nn.Module],
    save: Callable[[nn.Module, dict[str, torch.Tensor], Path], None],
    held_out: tuple[Path, Path] | None = None,
) -> None:
    """Train and write the declared outputs last.

    Args:
        tuning: what is trained, as memory.step.TUNINGS names it.
        inputs: `data` (jsonl), perhaps `pairs` (jsonl too), `model` (folder), and whatever else the result depends on.
        prepare: freezes and wraps the base model so that exactly what is trained requires gradients.
        save: writes the trained weights (whole tensors by name) of a model into a folder, on the first process.
        held_out: the evaluation split and the settings of the stage that asks it; the weights do not depend on them.
    """
    use_cpu_threads(settings.cpu_threads)
    check_trackers(settings.trackers)
    if settings.precision == "fp8":
        check_fp8()
    attention, remark = choose_attention(settings)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        remove_stale_locks()
    set_seed(settings.seed)
    digest = run_in_background(compute_digest, inputs)  # of some gigabytes of weights, while the stage is planned
    family = load_family(inputs["model"])
    files = [inputs[name] for name in ("pairs", "data") if name in inputs]
    dataset = ConversationDataset(files, family.encoder(settings.template, settings.max_length))
    asked = None
    if held_out and settings.score_while_training:
        count = settings.score_while_training.questions
        asked = read_held_out_questions(*held_out, tuning, dataset.encoder, settings.max_length, count)
    projector = tuning != "lora" or "projector" in inputs
    workload = build_workload(tuning, settings, build_architecture(family, dataset), dataset, projector)
    checkpoints, progress_file = output_dir / "checkpoints", output_dir / "progress.json"
    kept, requested = checkpoints / "arrangement.json", settings
    free = read_free_memory(settings.gpus, settings.nodes)
    reserve_memory_for_kernels()
    disable_cudnn_attention()
    # several processes must choose alike, and may find different amounts to be free
    machine = read_total_memory(settings.gpus, settings.nodes) if settings.gpus > 1 else free
    plan = None
    try:
        settings = choose_plan(requested, workload, machine, kept)
        plan = check_memory(settings, workload, free)
    except PlanningError as problem:
        require_explicit_settings(problem, settings)

    fingerprint = compute_fingerprint(settings, digest.result())
    # before the model: transformers then loads it straight into ZeRO-3's partitions
    arguments = build_training_arguments(settings, checkpoints, family.config.get_text_config().hidden_size)
    join_process_group()
    if decide_together(lambda: settings) != settings:
        raise InputError(
            "auto: the processes chose differently, because their nodes do; state deepspeed, micro_batch_size and "
            "activation_checkpointing"
        )
    checkpoint, reason = decide_together(lambda: find_checkpoint(checkpoints, fingerprint, settings.gpus))
    memory = MemorySampler(checkpoints / "memory.csv", resumed=checkpoint is not None)
    memory.start()

    first = arguments.process_index == 0
    if first:
        for sentence in filter(None, (reason, remark, dataset.truncation_note(settings.max_length))):
            note(sentence)
        checkpoints.mkdir(parents=True, exist_ok=True)
        discard_checkpoints(checkpoints, newest=checkpoint)
        keep_plan(requested, settings, workload, kept)
        if checkpoint is None:
            progress_file.unlink(missing_ok=True)

    model = family.load(settings.dtype, attention)
    parts = family.parts(model)
    model = prepare(model, parts)
    gather_whole_layers(model, parts)
    if settings.precision in FROZEN:
        replace_frozen_layers(parts.decoder, settings.precision)
    if settings.compile and torch.cuda.is_available():
        compile_layers(parts)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    shapes = full_shapes(trained)

    def save_checked(folder: Path) -> None:
        weights = gather_weights(trained, keep=first)
        if first:
            check_weights(weights, shapes, trainer.state.global_step)
            save(model, weights, folder)

    scorer = None
    if asked:
        sizes = settings.micro_batch_size, max(dataset.lengths), settings.loader_workers
        scorer = Scorer(asked, settings.score_while_training, parts.head, family.inputs, *sizes)
    trainer = StageTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=Collator(dataset.encoder, max(dataset.lengths)),
        prepare_inputs=family.inputs,
        save_checked=save_checked,
        fingerprint=fingerprint,
        progress_file=progress_file,
        projector_learning_rate=settings.projector_learning_rate,
        scorer=scorer,
        optimizer_cls_and_kwargs=choose_optimizer(settings),
    )
    if first:
        labels = {**settings.labels, "stage": output_dir.name} | read_row_counts(inputs["data"].parent / "summary.json")
        trackers = Trackers(settings.trackers, labels, checkpoints, resumed=checkpoint is not None)
        arguments.project, arguments.run_name = PROJECT, trackers.run_name
        for callback in trackers.callbacks():
            trainer.add_callback(callback)
    memory.phase = "training"
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except RuntimeError as error:
        if not is_out_of_memory(error) or requested.micro_batch_size != AUTO:
            raise
        if fixed := find_fixed_sizes(settings.deepspeed):
            note(
                f"the GPU ran out of memory, and the DeepSpeed file fixes {' and '.join(fixed)}: set auto there, so "
                "that the stage can go on with half of the micro batch, or a smaller micro batch"
            )
        elif halve_micro_batch(kept):
            if arguments.world_size == 1:
                note("the GPU ran out of memory: going on from the last checkpoint with half of the micro batch")
                start_process_again()
            note("the GPU ran out of memory: the same command goes on with half of the micro batch")
        raise

    trainer.score()  # where the last checkpoint comes from a start that asked other questions
    memory.phase = "saving"
    save_checked(output_dir)
    record = {
        "rows": len(dataset),
        "without_answer": dataset.answers.count(0),  # whose answer lies beyond max_length
        "samples": trainer.batches.samples_in(trainer.state.global_step),
        "trained_parameters": sum(shape.numel() for shape in shapes.values()),
        "resumed_from": checkpoint.name if checkpoint else None,
        "memory": memory.finish(output_dir),
        "memory_plan": plan,
        "activation_checkpointing": settings.activation_checkpointing,
    }
    if first:
        record["train_seconds"] = round(joined_seconds(read_rows(output_dir / "memory.csv"))[-1], 1)
        write_metrics(settings, trainer, record, output_dir)
    leave_process_group()


def build_training_arguments(settings: TrainingSettings, folder: Path, hidden_size: int) -> TrainingArguments:
    recomputed, workers = settings.activation_checkpointing, settings.loader_workers
    # a step asks for all of its micro batches at once: they are decoded while the step before is computed
    prefetched = max(1, math.ceil(settings.gradient_accumulation_steps / workers)) if workers else None
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder.parent / "tensorboard")
    return TrainingArguments(
        output_dir=str(folder),
        deepspeed=complete_deepspeed_config(settings.deepspeed, hidden_size),
        use_cpu=not torch.cuda.is_available(),
        # DeepSpeed's mixed precision, which keeps a float32 copy of what is trained
        bf16=settings.bf16 and settings.deepspeed["bf16"]["enabled"] == "auto",
        per_device_train_batch_size=settings.micro_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_scheduler,
        warmup_steps=settings.warmup_ratio,  # a share of all steps when below 1
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        activation_checkpointing=bool(recomputed),
        activation_checkpointing_kwargs={"use_reentrant": False, "every_n_layers": int(recomputed)},
        save_strategy="steps",
        save_steps=settings.save_steps,
        logging_steps=settings.log_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it waits for the GPU at every micro batch, and hides what went wrong
        dataloader_num_workers=workers,
        dataloader_prefetch_factor=prefetched,
        remove_unused_columns=False,
        report_to=[name for name in settings.trackers if name == "tensorboard"],
        disable_tqdm=True,
        seed=settings.seed,
        data_seed=settings.seed,
    )


def compute_fingerprint(settings: TrainingSettings, digest: str) -> str:
    """Return a fingerprint of settings, inputs and code.

    It is equal for two trainings that give the same weights except for rounding.

    Args:
        settings: settings of the stage; those without effect on the weights are left out.
        digest: digest of inputs and code.
    """
    return f"{digest}:{settings.retraining()!r}"


def run_in_background(function: Callable, *args) -> Future:
    """Run a function in a daemon thread and return its future result."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def compute_digest(inputs: dict[str, Path]) -> str:
    """Return a digest of the stage's code and inputs, on which its weights depend in addition to its settings."""
    files = modules_of(Path(sys.argv[0]))
    for path in inputs.values():
        files += list_model_files(path) if path.is_dir() else [path]
    return sha256_of(*files)


def list_model_files(folder: Path) -> list[Path]:
    """Return the files of a model folder: weights, configuration, tokenizer and its chat template."""
    return [
        file
        for suffix in ("safetensors", "json", "jinja", "model", "txt")
        for file in sorted(folder.rglob(f"*.{suffix}"))
    ]
