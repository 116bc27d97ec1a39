"""Whether the training stages fit this machine, by the memory plan, before anything is made or loaded."""

from collections.abc import Iterator

from diagnostics.check import Finding
from errors import InputError
from planning.architecture import find_architecture
from planning.prediction import Machine, predict
from settings.runs import REFERENCE, Run, Runs
from training.memory_plan import arrangement_of, choose_deepspeed, workload_at
from training.settings import training_settings

REMEDY = (
    "snakemake plan names what fits; set it as the stage's deepspeed, micro_batch_size and activation_checkpointing"
)


def check_plans(runs: Runs, machine: Machine) -> Iterator[Finding]:
    """One finding for each training stage of the reference, at the longest conversations that it lets through."""
    run = runs.first(REFERENCE)
    for stage in ("pretrain", "finetune"):
        yield check_plan(run, stage, machine)


def check_plan(run: Run, stage: str, machine: Machine) -> Finding:
    name, settings = f"memory of {stage}", training_settings(run.settings[stage])
    try:
        architecture = find_architecture(run.config["model"]["name"])
    except InputError as error:
        return Finding(name, "skip", str(error))
    tuning = "stage1" if stage == "pretrain" else "lora" if settings.lora else "full"
    length = settings.max_length
    workload = workload_at(tuning, settings, architecture, length, length - architecture.image_tokens)
    try:
        settings = choose_deepspeed(settings, workload, machine)
    except InputError as error:
        return Finding(name, "fail", str(error), REMEDY)
    prediction = predict(workload, arrangement_of(settings, workload), machine)
    if shortage := prediction.shortage(machine):
        return Finding(name, "fail" if settings.check_memory else "warn", shortage, REMEDY)
    gpu = f"{prediction.gpu_gib:.1f} GiB of the GPU and " if machine.gpus else ""
    return Finding(name, "pass", f"at most {gpu}{prediction.host_gib:.1f} GiB of the host")
