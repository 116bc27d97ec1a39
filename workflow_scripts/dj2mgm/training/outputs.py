"""Outputs of a training stage: trained weights, collected from a (possibly partitioned) model and checked, and metrics.

Both stages train projector and patch info mining; stage 2 also trains LoRA matrices or the language model. Frozen
weights are not written again.
"""

import importlib.metadata
import resource
from pathlib import Path

import deepspeed
import torch
from safetensors.torch import save_file
from torch import nn

from dj2mgm.models.trained_weights import PROJECTOR_FILE, find_projector_parameters
from dj2mgm.records import ScoringRecord, TrainingRecord
from dj2mgm.storage.files import replace_file, write_json, write_jsonl
from dj2mgm.training.deepspeed_config import describe_engine
from dj2mgm.training.settings import TrainingSettings
from dj2mgm.training.trainer import StageTrainer


class BrokenWeightsError(Exception):
    """Weights that must not be saved: missing, incomplete, not finite, or never trained."""


ELEMENTS_AT_ONCE = 2**24  # elements tested at a time, because a test for finite values makes copies


def gather_weights(parameters: dict[str, torch.nn.Parameter], keep: bool = True) -> dict[str, torch.Tensor]:
    """Return whole CPU copies of parameters that ZeRO may have partitioned.

    Every rank must call it. Only ranks with `keep` get the copies, which take host memory.
    """
    whole = {}
    for name, parameter in parameters.items():
        with deepspeed.zero.GatheredParameters([parameter]):
            if keep:
                whole[name] = parameter.detach().to("cpu", copy=True).contiguous()
    return whole


def check_weights(weights: dict[str, torch.Tensor], shapes: dict[str, torch.Size], steps: int) -> None:
    """Check that all weights are there, whole and finite, and that LoRA's B matrices are not all zero.

    `shapes` are the expected shapes by name, `steps` the steps that were applied. After a single step, B may be zero,
    because its learning rate may be zero.

    Raises:
        BrokenWeightsError: a weight is not valid, and the message names the tensor; or no step was applied.
    """
    if steps < 1:
        raise BrokenWeightsError("every step was skipped because its gradient overflowed: nothing was trained")
    if missing := sorted(set(shapes) - set(weights)):
        raise BrokenWeightsError(f"tensor {missing[0]} is missing ({len(missing)} in all)")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise BrokenWeightsError(f"tensor {name} has shape {tuple(weights[name].shape)} instead of {tuple(shape)}")
        if not all(torch.isfinite(part).all() for part in weights[name].flatten().split(ELEMENTS_AT_ONCE)):
            raise BrokenWeightsError(f"tensor {name} holds values that are not finite")
    lora_b = [tensor for name, tensor in weights.items() if "lora_B" in name]
    if steps > 1 and lora_b and not any(tensor.any() for tensor in lora_b):
        raise BrokenWeightsError("every lora_B matrix is zero: nothing was trained")


def save_projector(model: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write projector and mining, out of all trained weights, under their names inside `MGMModel`."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    projector = {name: weights[by_id[id(parameter)]] for name, parameter in find_projector_parameters(model).items()}
    save_weights(projector, folder / PROJECTOR_FILE)


def save_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    with replace_file(path, "wb") as file:
        save_file(weights, file.name)  # not as bytes, which would be a second copy of all weights


RECORDED_PACKAGES = ("torch", "transformers", "deepspeed", "peft", "accelerate")


def write_metrics(settings: TrainingSettings, trainer: StageTrainer, record: dict, output_dir: Path) -> None:
    """Write metrics.jsonl, scores.jsonl, scored.jsonl, and last metrics.json with the stage's part of its record."""
    history = [row for row in trainer.state.log_history if "loss" in row]
    columns = ("step", "epoch", "loss", "learning_rate", "projector_learning_rate", "grad_norm", "seconds")
    write_jsonl(output_dir / "metrics.jsonl", ({key: row[key] for key in columns if key in row} for row in history))
    whole_record = TrainingRecord(
        **record,
        scores=_write_scores(trainer, record["train_seconds"], output_dir),
        engine=describe_engine(trainer.model_wrapped, trainer.global_batch_size),
        steps=trainer.applied_steps,
        loss_first=history[0]["loss"],
        loss_last=history[-1]["loss"],
        peak_host_rss_gib=_to_gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10),
        peak_gpu_gib=_to_gib(torch.cuda.max_memory_allocated()),
        peak_gpu_reserved_gib=_to_gib(torch.cuda.max_memory_reserved()),
        seed=settings.seed,
        versions={name: importlib.metadata.version(name) for name in RECORDED_PACKAGES},
    )
    write_json(output_dir / "metrics.json", whole_record.as_dict())


def _write_scores(trainer: StageTrainer, train_seconds: float, output_dir: Path) -> ScoringRecord | None:
    """Write scores.jsonl, a row for each checkpoint, and scored.jsonl, the scored rows; both may be empty.

    Return None without scores.
    """
    scores, names = trainer.scores, ("loss", "accuracy", "questions", "seconds")
    write_jsonl(
        output_dir / "scores.jsonl",
        (
            {"step": row["step"]} | {name: row[f"eval_{name}"] for name in names if f"eval_{name}" in row}
            for row in scores
        ),
    )
    if not scores:
        write_jsonl(output_dir / "scored.jsonl", ())
        return None
    held_out, correct = trainer.scorer.held_out, scores[-1]["correct"]
    write_jsonl(output_dir / "scored.jsonl", held_out.describe_rows(correct))
    seconds = sum(row["eval_seconds"] for row in scores)
    return ScoringRecord(held_out.kind, len(correct), round(seconds, 1), round(seconds / train_seconds, 4))


def _to_gib(size: int) -> float:
    return round(size / 2**30, 2)
