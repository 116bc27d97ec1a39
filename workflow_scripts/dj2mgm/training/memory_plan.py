"""Choice of a stage's `auto` settings by the memory plan, and recognition of a full GPU.

A training that cannot fit is refused before it loads.
"""

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

from dj2mgm.cli.messages import note
from dj2mgm.data.images import read_image_size
from dj2mgm.errors import InputError
from dj2mgm.models.tuning import Tuning
from dj2mgm.models.vision_language import ModelFamily
from dj2mgm.models.vlm.encoder import BLANK_IMAGE_SIZE
from dj2mgm.planning.architecture import Architecture, MGMArchitecture, PlanningError, VLMArchitecture
from dj2mgm.planning.prediction import NCCL_AND_KERNELS, Machine, Prediction, TrainingPlan, ZeroConfig, predict
from dj2mgm.planning.search import (
    CHECKPOINTING_INTERVALS,
    describe_plan,
    find_fastest,
    list_candidates,
    suggest_remedies,
)
from dj2mgm.planning.step import Workload, count_parameters
from dj2mgm.settings.training_stages import AUTO, NF4_SCALES
from dj2mgm.storage.files import read_json, write_json
from dj2mgm.training.checkpoints import COMPLETE_FILE
from dj2mgm.training.deepspeed_config import complete_deepspeed_config
from dj2mgm.training.processes import is_first_process
from dj2mgm.training.settings import TrainingSettings
from dj2mgm.training.training_data import MAX_CROWDING, ConversationDataset

CONFIGURED = "the configured DeepSpeed file"
# Messages of CUDA libraries that allocate memory outside of PyTorch.
FULL_GPU_MESSAGES = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Cuda failure 'out of",
)


@dataclass(frozen=True)
class KeptPlan:
    """A chosen training plan, as training_plan.json keeps it for later starts of a stage."""

    deepspeed: str  # name of the DeepSpeed configuration
    micro_batch: int  # samples
    checkpointing: int  # activation checkpointing of every n-th layer; 0: none


def build_workload(
    tuning: Tuning,
    settings: TrainingSettings,
    architecture: Architecture,
    dataset: ConversationDataset,
    projector: bool = True,
) -> Workload:
    """Build the workload of a stage from its longest conversation.

    The workload has as many images as a micro batch of short conversations with one image each would have.

    Args:
        tuning: tuning of the stage (models/tuning.py).
        settings: the stage's settings.
        architecture: the model's shape.
        dataset: the training data.
        projector: whether LoRA also trains the projector.
    """
    longest = dataset.longest
    workload = build_workload_at(tuning, settings, architecture, longest, max(dataset.answers), projector)
    shortest = max(min(dataset.lengths), workload.architecture.image_tokens)
    return replace(workload, images_per_sample=min(MAX_CROWDING, longest / shortest))


def build_architecture(family: ModelFamily, dataset: ConversationDataset) -> Architecture:
    """Build the model's architecture, with the largest images of a conversation.

    Without images, it uses the blank image that a batch of texts gets.
    """
    if not family.has_stock_class:
        return MGMArchitecture("the model", family.config)
    sizes = [read_image_size(image) for image in dataset.largest_images] or [BLANK_IMAGE_SIZE]
    return VLMArchitecture("the model", family.config, dataset.encoder, dataset.encoder.build_sample(*sizes))


def build_workload_at(
    tuning: Tuning,
    settings: TrainingSettings,
    architecture: Architecture,
    sequence_length: int,
    answer_tokens: int,
    projector: bool = True,
) -> Workload:
    """Build a workload of conversations of `sequence_length` tokens. `answer_tokens` of them carry loss."""
    return Workload(
        architecture=architecture,
        tuning=tuning,
        sequence_length=sequence_length,
        answer_tokens=answer_tokens,
        precision=settings.dtype,
        fused=settings.compile and torch.cuda.is_available(),
        lora=settings.lora,
        projector=projector,
        nf4=settings.precision == "nf4",
        loader_workers=settings.workers,
    )


def choose_plan(
    settings: TrainingSettings, workload: Workload, machine: Machine, plan_file: Path | None = None
) -> TrainingSettings:
    """Replace "auto" settings by the settings of the fastest training plan that fits; change no other settings.

    `plan_file` is the file of `keep_plan`, for a resumed run, which may be on another machine.
    """
    if not settings.has_auto:
        return settings
    request = _build_request(settings, workload)
    choices = settings.deepspeed_choices or {CONFIGURED: settings.deepspeed}
    earlier = None if plan_file is None else _read_plan_file(plan_file)
    if earlier and earlier["request"] == request:
        kept_settings = _apply(KeptPlan(**earlier["plan"]), settings)
        if not predict(workload, plan_from_settings(kept_settings, workload), machine).describe_shortage(machine):
            _note_plan(
                f"auto: micro batch {kept_settings.micro_batch_size} and the other settings as this stage chose before"
            )
            return kept_settings
    if earlier and earlier["request"]["trained"] == request["trained"]:
        name = earlier["plan"]["deepspeed"]  # the stage's checkpoints need this configuration
        choices = {name: choices[name]} if name in choices else choices
    hidden_size = workload.architecture.hidden_size
    micro_batch, checkpointing = settings.micro_batch_size, settings.activation_checkpointing
    candidates = list_candidates(
        workload,
        machine,
        {name: complete_deepspeed_config(config, hidden_size) for name, config in choices.items()},
        settings.global_batch_size,
        None if micro_batch == AUTO else [micro_batch],
        CHECKPOINTING_INTERVALS if checkpointing == AUTO else [int(checkpointing)],
    )
    best = find_fastest(candidates)
    if best is None:
        raise InputError(
            "auto: no training plan fits this machine. One of these would help: "
            f"{'; '.join(suggest_remedies(workload, candidates, machine))}"
        )
    plan = best.plan
    _note_plan(f"auto: the fastest training plan that fits is {describe_plan(plan)}")
    return _apply(KeptPlan(plan.deepspeed, plan.micro_batch, plan.checkpointing_interval), settings)


def require_explicit_settings(problem: PlanningError, settings: TrainingSettings) -> None:
    """Note that there is no memory plan, or refuse settings that need one."""
    if settings.has_auto:
        raise InputError(
            f"auto: {problem}. Set deepspeed, micro_batch_size, gradient_accumulation_steps and "
            "activation_checkpointing to values other than auto"
        )
    _note_plan(f"{problem}; training goes on without a memory plan")


def keep_plan(requested: TrainingSettings, settings: TrainingSettings, workload: Workload, plan_file: Path) -> None:
    """Write the plan that was chosen for `requested`, for later starts of the stage."""
    request = _build_request(requested, workload)
    if not requested.has_auto:
        return
    choices = requested.deepspeed_choices or {CONFIGURED: requested.deepspeed}
    [name] = [name for name, config in choices.items() if config == settings.deepspeed][:1]
    plan = vars(KeptPlan(name, settings.micro_batch_size, int(settings.activation_checkpointing)))
    earlier = _read_plan_file(plan_file)
    if not (earlier and earlier["request"] == request and earlier["plan"] == plan):
        write_json(plan_file, {"request": request, "plan": plan, "halved": False})


def reserve_memory_for_kernels() -> None:
    """Keep PyTorch from reserving the GPU's last memory for its cache.

    cuBLAS, NCCL and kernels that are loaded during the run allocate from the driver, and fail if nothing is left.
    """
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        tensors = max(0, free - NCCL_AND_KERNELS)
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + tensors) / total)


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(message in str(error) for message in FULL_GPU_MESSAGES)


def is_halved(plan_file: Path) -> bool:
    """Return whether a process has halved the micro batch in `plan_file`; False without the file."""
    return plan_file.exists() and read_json(plan_file)["halved"]


def can_halve_micro_batch(plan_file: Path) -> bool:
    """Return whether `plan_file` has a micro batch that was not halved yet and is larger than 1."""
    if not plan_file.exists() or is_halved(plan_file):
        return False
    return read_json(plan_file)["plan"]["micro_batch"] > 1


def halve_micro_batch(plan_file: Path) -> None:
    """Halve the micro batch in `plan_file`, for the next start of a stage whose GPU ran out of memory.

    Nothing changes if another process has halved it.
    """
    if can_halve_micro_batch(plan_file):
        values = read_json(plan_file)
        values["plan"]["micro_batch"] //= 2
        write_json(plan_file, values | {"halved": True})


def _build_request(settings: TrainingSettings, workload: Workload) -> dict:
    """Return all inputs of the plan except the machine. A change of `trained` also invalidates checkpoints."""
    return {
        "trained": [
            workload.tuning,
            str(workload.precision),
            vars(settings.lora) if settings.lora else None,
            sha256(workload.architecture.config.to_json_string(use_diff=False).encode()).hexdigest(),
        ],
        "deepspeed": sorted(settings.deepspeed_choices) if settings.deepspeed_choices else settings.deepspeed,
        "batch": [settings.global_batch_size, settings.micro_batch_size, settings.gpus, settings.nodes],
        "checkpointing": settings.activation_checkpointing,
        "compile": workload.fused,
        "nf4": workload.nf4,
        "tokens": [workload.sequence_length, workload.answer_tokens, workload.images_per_sample],
    }


def _read_plan_file(plan_file: Path) -> dict | None:
    """Read the choice of an earlier start if it wrote a checkpoint or ran out of GPU memory; None otherwise."""
    try:
        values = read_json(plan_file)
        values["request"]["trained"], KeptPlan(**values["plan"])
        return values if values["halved"] or any(plan_file.parent.glob(f"checkpoint-*/{COMPLETE_FILE}")) else None
    except (OSError, InputError, KeyError, TypeError):
        return None


def _apply(plan: KeptPlan, settings: TrainingSettings) -> TrainingSettings:
    changes = {
        "deepspeed": (settings.deepspeed_choices or {}).get(plan.deepspeed, settings.deepspeed),
        "deepspeed_choices": None,
        "micro_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": settings.count_micro_batches(plan.micro_batch),
        "activation_checkpointing": plan.checkpointing if plan.checkpointing > 1 else bool(plan.checkpointing),
    }
    return TrainingSettings(**vars(settings) | changes)


def require_memory(settings: TrainingSettings, workload: Workload, machine: Machine) -> dict:
    """Refuse a stage that does not fit into the free memory of the machine, if `check_memory` is true.

    Returns:
        The prediction for the run's record: `gpu_gib` and `host_gib`, each in total and by part, and the free memory.
    """
    if workload.nf4 and not count_parameters(workload).in_4_bits:
        raise InputError(f"precision: nf4 needs a frozen layer of a multiple of {NF4_SCALES} weights; set bf16")
    prediction = predict(workload, plan_from_settings(settings, workload), machine)
    if machine.host_gib is None or (machine.gpus and machine.gpu_gib is None):
        _note_plan("memory plan: the free memory of this machine cannot be read; training goes on without the check")
    if shortage := prediction.describe_shortage(machine):
        if settings.check_memory:
            raise InputError(
                f"this stage does not fit: {shortage}. `python workflow_scripts/plan_memory.py --help` shows how to "
                "find settings that fit; `check_memory: false` in the stage's settings trains anyway"
            )
        _note_plan(f"memory plan: {shortage}; training anyway (check_memory: false)")
    return _build_record(prediction, machine)


def plan_from_settings(settings: TrainingSettings, workload: Workload) -> TrainingPlan:
    """Return the training plan of settings without "auto"."""
    config = complete_deepspeed_config(settings.deepspeed, workload.architecture.hidden_size)
    return TrainingPlan(
        deepspeed=CONFIGURED,
        zero=ZeroConfig.from_deepspeed(config),
        checkpointing_interval=int(settings.activation_checkpointing),
        micro_batch=settings.micro_batch_size,
        accumulation=settings.gradient_accumulation_steps,
    )


def _build_record(prediction: Prediction, machine: Machine) -> dict:
    def round_sizes(parts: dict[str, float]) -> dict[str, float]:
        return {part: round(size, 3) for part, size in parts.items()}

    return {
        "gpu_gib": round(prediction.gpu_gib, 2) if machine.gpus else None,
        "host_gib": round(prediction.host_gib, 2),
        "gpu": round_sizes(prediction.gpu),
        "host": round_sizes(prediction.host),
        "free_gpu_gib": machine.gpu_gib,
        "free_host_gib": machine.host_gib,
    }


def _note_plan(sentence: str) -> None:
    if is_first_process():
        note(sentence)
