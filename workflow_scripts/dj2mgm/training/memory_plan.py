"""A training stage's plan, before anything is loaded: what is `auto` is decided, and what cannot fit is refused."""

import os
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch

from dj2mgm.config.training import AUTO, NF4_SCALES
from dj2mgm.data.images import image_size
from dj2mgm.errors import InputError
from dj2mgm.files import read_json, write_json
from dj2mgm.memory.architecture import Architecture, MGMArchitecture, NoPlan, VLMArchitecture
from dj2mgm.memory.prediction import Arrangement, Machine, Prediction, predict
from dj2mgm.memory.search import MICRO_BATCHES, RECOMPUTATIONS, candidates, describe, fastest, remedies
from dj2mgm.memory.step import Workload, count_parameters
from dj2mgm.memory.zero import Zero
from dj2mgm.messages import note
from dj2mgm.mgm.family import MGM
from dj2mgm.training.batches import CROWDED
from dj2mgm.training.checkpoints import MARK
from dj2mgm.training.datasets import ConversationDataset
from dj2mgm.training.deepspeed_config import complete_deepspeed_config
from dj2mgm.training.settings import TrainingSettings
from dj2mgm.vision_language import Family
from dj2mgm.vlm.encoder import BLANK

CONFIGURED = "the configured DeepSpeed file"


def workload_of(
    tuning: str,
    settings: TrainingSettings,
    architecture: Architecture,
    dataset: ConversationDataset,
    projector: bool = True,
) -> Workload:
    """What the stage trains, on its longest conversation, with as many images as shorter ones bring along.

    Args:
        projector: whether LoRA also trains what connects towers and language model.
    """
    longest = max(dataset.lengths)
    workload = workload_at(tuning, settings, architecture, longest, max(dataset.answers), projector)
    shortest = max(min(dataset.lengths), workload.architecture.image_tokens)
    return replace(workload, images=min(CROWDED, longest / shortest))


def architecture_of(family: Family, dataset: ConversationDataset) -> Architecture:
    """With the largest images that a conversation has; for texts, with the blank one that a batch of them gets."""
    if isinstance(family, MGM):
        return MGMArchitecture("the model", family.config)
    sizes = [image_size(image) for image in dataset.largest_images] or [BLANK]
    return VLMArchitecture("the model", family.config, dataset.encoder, dataset.encoder.sample(*sizes))


def workload_at(
    tuning: str,
    settings: TrainingSettings,
    architecture: Architecture,
    sequence: int,
    answers: int,
    projector: bool = True,
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
        projector=projector,
        nf4=settings.precision == "nf4",
    )


def choose_arrangement(
    settings: TrainingSettings, workload: Workload, machine: Machine, kept: Path | None = None
) -> TrainingSettings:
    """What is "auto" decided: the fastest arrangement that fits. Settings without "auto" stay as they are.

    Args:
        kept: the file of `keep_arrangement`, for a resumed run, which may be on another machine.

    Raises:
        InputError: none fits; with what would help.
    """
    if not settings.has_auto:
        return settings
    request, choices = _request(settings, workload), settings.deepspeed_choices or {CONFIGURED: settings.deepspeed}
    before = kept and _read_kept(kept)
    if before and before["request"] == request:
        _note(f"auto: micro batch {before['arrangement']['micro_batch']} and the rest as this stage chose before")
        return arranged(settings, before["arrangement"])
    if before and before["request"]["trained"] == request["trained"]:
        name = before["arrangement"]["deepspeed"]  # its checkpoints go with this configuration
        choices = {name: choices[name]} if name in choices else choices
    hidden_size = workload.architecture.hidden_size
    given = settings.micro_batch_size, settings.activation_checkpointing
    found = candidates(
        workload,
        machine,
        {name: complete_deepspeed_config(config, hidden_size) for name, config in choices.items()},
        settings.global_batch_size,
        MICRO_BATCHES if given[0] == AUTO else [given[0]],
        RECOMPUTATIONS if given[1] == AUTO else [int(given[1])],
    )
    best = fastest(found)
    if best is None:
        raise InputError(f"auto: nothing fits; what would help: {'; '.join(remedies(workload, found, machine))}")
    _note(f"auto: {describe(best.arrangement)} is the fastest arrangement that fits")
    return arranged(settings, {key: value for key, value in vars(best.arrangement).items() if key != "zero"})


def go_without_plan(problem: NoPlan, settings: TrainingSettings) -> None:
    """
    Raises:
        InputError: the plan would have to choose.
    """
    if settings.has_auto:
        raise InputError(
            f"auto: {problem}; state deepspeed, micro_batch_size, gradient_accumulation_steps and "
            "activation_checkpointing, none of them auto"
        )
    _note(f"{problem}; going on without one")


def keep_arrangement(requested: TrainingSettings, settings: TrainingSettings, workload: Workload, kept: Path) -> None:
    """For a stage that goes on: what was chosen for `requested`."""
    request = _request(requested, workload)
    before = _read_kept(kept)
    if not requested.has_auto or (before and before["request"] == request):
        return
    choices = requested.deepspeed_choices or {CONFIGURED: requested.deepspeed}
    [name] = [name for name, config in choices.items() if config == settings.deepspeed][:1]
    arrangement = {
        "deepspeed": name,
        "micro_batch": settings.micro_batch_size,
        "accumulation": settings.gradient_accumulation_steps,
        "recomputation": int(settings.activation_checkpointing),
    }
    write_json(kept, {"request": request, "arrangement": arrangement, "halved": False})


def halve_micro_batch(kept: Path) -> bool:
    """After the GPU ran out of memory: let the next start of this stage take half of the kept micro batch, once.
    It is a power of two (`MICRO_BATCHES`) where no DeepSpeed file fixes it.

    Returns:
        Whether there is a choice that can still be halved.
    """
    values = read_json(kept) if kept.exists() else {"halved": True}
    if values["halved"] or values["arrangement"]["micro_batch"] == 1:
        return False
    arrangement = values["arrangement"]
    arrangement |= {"micro_batch": arrangement["micro_batch"] // 2, "accumulation": arrangement["accumulation"] * 2}
    write_json(kept, values | {"arrangement": arrangement, "halved": True})
    return True


def _request(settings: TrainingSettings, workload: Workload) -> dict:
    """What a choice depends on beside the machine; `trained` is what its checkpoints depend on, too."""
    return {
        "trained": [
            workload.tuning,
            str(workload.precision),
            vars(settings.lora) if settings.lora else None,
            sha256(workload.architecture.config.to_json_string(use_diff=False).encode()).hexdigest(),
        ],
        "deepspeed": sorted(settings.deepspeed_choices) if settings.deepspeed_choices else settings.deepspeed,
        "batch": [settings.global_batch_size, settings.micro_batch_size, settings.gpus, settings.nodes],
        "recomputation": settings.activation_checkpointing,
        "compile": workload.fused,
        "nf4": workload.nf4,
        "tokens": [workload.sequence, workload.answers, workload.images],
    }


def _read_kept(kept: Path) -> dict | None:
    """What an earlier start chose, if a checkpoint goes with it, or the GPU ran out of memory; None otherwise."""
    try:
        values = read_json(kept)
        values["request"]["trained"], values["arrangement"]["deepspeed"]
        return values if values["halved"] or any(kept.parent.glob(f"checkpoint-*/{MARK}")) else None
    except (OSError, InputError, KeyError, TypeError):
        return None


def arranged(settings: TrainingSettings, arrangement: dict) -> TrainingSettings:
    """Settings with a chosen arrangement: `deepspeed`, `micro_batch`, `accumulation`, `recomputation`."""
    recomputation = arrangement["recomputation"]
    return replace(
        settings,
        deepspeed=(settings.deepspeed_choices or {}).get(arrangement["deepspeed"], settings.deepspeed),
        deepspeed_choices=None,
        micro_batch_size=arrangement["micro_batch"],
        gradient_accumulation_steps=arrangement["accumulation"],
        activation_checkpointing=recomputation if recomputation > 1 else bool(recomputation),
    )


def check_memory(settings: TrainingSettings, workload: Workload, machine: Machine) -> dict:
    """Refuse what cannot fit into what is free on the machine.

    Returns:
        The prediction for the run's record: `gpu_gib`, `host_gib`, both part by part, and what was free.

    Raises:
        InputError: it cannot fit, and `check_memory` is true.
    """
    if workload.nf4 and not count_parameters(workload).in_4_bits:
        raise InputError(f"precision: nf4 finds no frozen layer of a multiple of {NF4_SCALES} weights; set bf16")
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
        deepspeed=CONFIGURED,
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
    if _is_first():
        note(sentence)


def _is_first() -> bool:
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
