"""Write the metrics of a training stage: metrics.json, metrics.jsonl, scores.jsonl and scored.jsonl."""

import importlib.metadata
import resource
from pathlib import Path

import torch

from dj2mgm.files import write_json, write_jsonl
from dj2mgm.training.deepspeed_config import describe_engine
from dj2mgm.training.settings import TrainingSettings
from dj2mgm.training.trainer import StageTrainer

VERSIONS = ("torch", "transformers", "deepspeed", "peft", "accelerate")


def write_metrics(settings: TrainingSettings, trainer: StageTrainer, record: dict, output_dir: Path) -> None:
    """Write metrics.jsonl, scores.jsonl, scored.jsonl, and last metrics.json with `record`."""
    history = [row for row in trainer.state.log_history if "loss" in row]
    kept = ("step", "epoch", "loss", "learning_rate", "projector_learning_rate", "grad_norm", "seconds")
    write_jsonl(output_dir / "metrics.jsonl", ({key: row[key] for key in kept if key in row} for row in history))
    record |= {"scores": _write_scores(trainer, record["train_seconds"], output_dir)}
    write_json(
        output_dir / "metrics.json",
        {
            "engine": describe_engine(trainer.model_wrapped),
            "steps": trainer.state.global_step,
            "loss_first": history[0]["loss"],
            "loss_last": history[-1]["loss"],
            **record,
            "peak_host_rss_gib": _gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10),
            "peak_gpu_gib": _gib(torch.cuda.max_memory_allocated()),
            "peak_gpu_reserved_gib": _gib(torch.cuda.max_memory_reserved()),
            "seed": settings.seed,
            "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        },
    )


def _write_scores(trainer: StageTrainer, train_seconds: float, output_dir: Path) -> dict | None:
    """Write scores.jsonl, a row for each checkpoint, and scored.jsonl, the scored rows; both may be empty.

    Return a record of the kind and number of questions, and of the time that they took; None without scores.
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
    write_jsonl(output_dir / "scored.jsonl", held_out.described(correct))
    seconds = sum(row["eval_seconds"] for row in scores)
    share = {"seconds": round(seconds, 1), "share": round(seconds / train_seconds, 4)}
    return {"asked": held_out.kind, "questions": len(correct)} | share


def _gib(size: int) -> float:
    return round(size / 2**30, 2)
