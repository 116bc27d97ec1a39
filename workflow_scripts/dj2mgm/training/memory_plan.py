"""A training stage's plan, before anything is loaded: `deepspeed: auto` is decided, and what cannot fit is refused."""

import os
from dataclasses import replace

import torch

from dj2mgm.errors import InputError
from dj2mgm.memory.architecture import Architecture
from dj2mgm.memory.prediction import Arrangement, Machine, Prediction, predict
from dj2mgm.memory.search import candidates, describe, fastest, remedies
from dj2mgm.memory.step import Workload
from dj2mgm.memory.zero import Zero
from dj2mgm.messages import note
from dj2mgm.mgm import MGMConfig
from dj2mgm.training.datasets import ConversationDataset
from dj2mgm.training.deepspeed_config import complete_deepspeed_config
from dj2mgm.training.settings import TrainingSettings


def workload_of(tuning: str, settings: TrainingSettings, config: MGMConfig, dataset: ConversationDataset) -> Workload:
    """What the stage trains, on its longest conversation."""
    return workload_at(tuning, settings, Architecture("the model", config), max(dataset.lengths), max(dataset.answers))


def workload_at(
    tuning: str, settings: TrainingSettings, architecture: Architecture, sequence: int, answers: int
) -> Workload:
    """What a stage with these settings trains, on conversations of `sequence` tokens of which `answers` carry loss."""
    return Workload(
        architecture=architecture,
        tuning=tuning,
        sequence=sequence,
        answers=answers,
        precision=settings.dtype,
        fused=settings.compile and torch.cuda.is_available(),
        lora=settings.lora,
    )


def choose_deepspeed(settings: TrainingSettings, workload: Workload, machine: Machine) -> TrainingSettings:
    """With `deepspeed: auto`, the settings with the fastest configuration that fits; other settings as they are.

    Args:
        machine: as a whole, not what happens to be free, so that every process and every resumed run chooses the same.

    Raises:
        InputError: none fits; with what would help.
    """
    if not settings.deepspeed_choices:
        return settings
    hidden_size = workload.architecture.hidden_size
    choices = {
        name: complete_deepspeed_config(config, hidden_size) for name, config in settings.deepspeed_choices.items()
    }
    arrangements = candidates(
        workload,
        machine,
        choices,
        settings.global_batch_size,
        [settings.micro_batch_size],
        [int(settings.activation_checkpointing)],
    )
    best = fastest(arrangements)
    if best is None:
        raise InputError(
            f"deepspeed: auto: nothing fits; what would help: {'; '.join(remedies(workload, arrangements, machine))}"
        )
    _note(f"deepspeed: auto: {describe(best.arrangement)} is the fastest that fits")
    return replace(settings, deepspeed=settings.deepspeed_choices[best.arrangement.deepspeed], deepspeed_choices=None)


def check_memory(settings: TrainingSettings, workload: Workload, machine: Machine) -> dict:
    """Refuse what cannot fit into what is free on the machine.

    Returns:
        The prediction for the run's record: `gpu_gib`, `host_gib`, both part by part, and what was free.

    Raises:
        InputError: it cannot fit, and `check_memory` is true.
    """
    prediction = predict(workload, arrangement_of(settings, workload), machine)
    if machine.host_gib is None or (machine.gpus and machine.gpu_gib is None):
        _note("memory plan: this machine does not say how much memory is free; going on without the check")
    if shortage := prediction.shortage(machine):
        if settings.check_memory:
            raise InputError(
                f"this stage does not fit: {shortage}. `python workflow_scripts/plan_memory.py --help` says how to "
                "find what does; `check_memory: false` in the stage's settings tries anyway"
            )
        _note(f"memory plan: {shortage}; trying anyway (check_memory: false)")
    return _record(prediction, machine)


def arrangement_of(settings: TrainingSettings, workload: Workload) -> Arrangement:
    config = complete_deepspeed_config(settings.deepspeed, workload.architecture.hidden_size)
    return Arrangement(
        deepspeed="configured",
        zero=Zero.of(config),
        recomputation=int(settings.activation_checkpointing),
        micro_batch=settings.micro_batch_size,
        accumulation=settings.gradient_accumulation_steps,
    )


def _record(prediction: Prediction, machine: Machine) -> dict:
    def rounded(parts: dict[str, float]) -> dict[str, float]:
        return {part: round(size, 3) for part, size in parts.items()}

    return {
        "gpu_gib": round(prediction.gpu_gib, 2) if machine.gpus else None,
        "host_gib": round(prediction.host_gib, 2),
        "gpu": rounded(prediction.gpu),
        "host": rounded(prediction.host),
        "free_gpu_gib": machine.gpu_gib,
        "free_host_gib": machine.host_gib,
    }


def _note(sentence: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        note(sentence)
