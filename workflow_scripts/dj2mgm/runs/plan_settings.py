"""Settings of `snakemake plan`, from a run's configuration and the rows that are counted so far."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER
from dj2mgm.model_files.missing_models import compute_download_gb, find_downloads, find_missing_models
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.command_messages import RowCount, build_command, count_training_rows
from dj2mgm.runs.stages import Run
from dj2mgm.settings.training_stages import count_samples, describe_steps
from dj2mgm.storage.files import read_json


def build_plan_settings(runs: Runs, run: Run, arguments: Iterable[str]) -> dict[str, Any]:
    """Return the settings of the memory plan of a run's stage 2, with sequences of at most `max_length` tokens.

    Stage 1 is planned if the run has it. Full fine-tuning needs more memory than LoRA, and is planned without it.

    Args:
        runs: all runs.
        run: the planned run.
        arguments: the values of `--config`, for the commands that follow the plan.
    """
    config, finetune = run.config, run.config.finetune
    values = {
        "model": config.model.name,
        "tunings": ["stage1"] * (len(run.training_stages) - 1) + ["lora" if finetune.lora else "full"],
        "gpus": config.gpus if config.gpus > 1 else None,
        "nodes": config.nodes,
        "gpu": runs.shared.gpu,
        "desktop_gib": runs.shared.plan.desktop_gib if runs.shared.gpu else None,
        "host_gib": runs.shared.plan.host_gib,
        "weights_gb": compute_download_gb(config.model) or None,
        "max_length": finetune.max_length,
        "global_batch": finetune.global_batch_size,
        "pretrain_batch": config.pretrain.global_batch_size,
        "lora": finetune.lora and finetune.lora.model_dump(),
        "precision": finetune.precision,
        "compile": finetune.compile,
        "next": _list_next_commands(run, arguments),
        **_count_data(runs, run),
    }
    return {key: value for key, value in values.items() if value is not None}


def _count_data(runs: Runs, run: Run) -> dict[str, Any]:
    """Return the settings that depend on the run's data; none before its dataset is made."""
    dataset = Path(DATASETS_FOLDER, run.dataset.name)
    counts = count_training_rows(runs, run) if (dataset / "summary.json").is_file() else {}
    if not counts:
        return {}
    samples = {stage: count_samples(run.settings[stage], count.rows) for stage, count in counts.items()}
    return {
        "dataset": str(dataset),
        "samples": samples,
        "held_out": read_json(dataset / "summary.json")["evaluation"],
        "notes": _list_notes(run, counts, samples),
    }


def _list_notes(run: Run, counts: Mapping[str, RowCount], samples: Mapping[str, int]) -> list[str]:
    """Return sentences about the samples of each stage, and about stages that add epochs."""
    notes = []
    for stage, count in counts.items():
        uses = samples[stage] / count.rows
        repeated = f", each used about {uses:.3g} times" if uses != 1 else ""
        notes.append(f"{stage}: {samples[stage]:,} samples from {count.describe()}{repeated}")
    notes += [describe_steps(stage, run.settings[stage], count.rows) for stage, count in counts.items()]
    return [f"{note[0].upper()}{note[1:]}." for note in notes if note]


def _list_next_commands(run: Run, arguments: Iterable[str]) -> list[str]:
    """Return the commands that follow the plan: a download if the model is missing, a dry run and the run."""
    model = run.config.model
    needs_download = not model.trained_by_workflow and find_downloads(model, find_missing_models(model))
    fetch = [build_command("fetch", [f"model={model.name}"])] if needs_download else []
    return fetch + [build_command(text, arguments) for text in (f"-n {run.experiment}", run.experiment)]
