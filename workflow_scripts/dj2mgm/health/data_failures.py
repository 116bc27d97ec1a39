"""Failures of what a stage reads and writes: images, full disks and shared memory, and damaged weights."""

import os
import shutil
from pathlib import Path

from dj2mgm.health.failure_signature import Evidence, Explanation, Signature, make_fixed_explanation
from dj2mgm.monitoring.memory_csv import format_gib

FULL_BYTES = 2**30  # a disk with less free space is called full
SHARED_MEMORY = "/dev/shm"


def explain_full(evidence: Evidence) -> Explanation | None:
    """Explain a full disk by the space and the inodes that are free now; shared memory has another signature."""
    if SHARED_MEMORY in evidence.line or "</torch_" in evidence.line:
        return None
    path = evidence.match["path"]
    folder = Path(path).parent if path and Path(path).parent.is_dir() else evidence.log.path.resolve().parent
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    message = f"a file could not be written{f' ({path})' if path else ''}, because there was no space for it"
    if system.f_files and not system.f_favail:
        now = f"The file system of {folder} has no inodes left, so it can hold no more files"
    elif free < FULL_BYTES:
        now = f"The file system of {folder} has {format_gib(free)} free"
    else:
        now = (
            f"The file system of {folder} has {format_gib(free)} free now. So it was full for some time only, or a "
            "quota (`quota -s`), a limit of file sizes (`ulimit -f`) or another file system was"
        )
    return Explanation(
        f"{message}. {now}",
        "free space (`df -h`, `df -i`; `du -sh results/* ~/.cache/* /tmp`), then run the same command again; a stage "
        "continues from its last complete checkpoint",
    )


def explain_shared_memory(evidence: Evidence) -> Explanation:
    folder = Path(SHARED_MEMORY)
    size = ""
    if folder.is_dir():
        usage = shutil.disk_usage(folder)
        size = f" ({format_gib(usage.total)}, of which {format_gib(usage.free)} are free now)"
    return Explanation(
        f"{SHARED_MEMORY}{size}, through which data loaders and NCCL pass data between processes, was full",
        "enlarge it for the container (`docker run --shm-size=8g` or `--ipc=host`), delete files that killed processes "
        f"left in {SHARED_MEMORY}, or set loader_workers: 0",
    )


DATA_SIGNATURES = (
    Signature(
        "A relative path leads nowhere",
        # not a bare word, which is a program that is not installed
        r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>(?!/)[^']*[./][^']*)'",
        make_fixed_explanation(
            "'{path}' is a relative path, and this file does not exist below the folder in which the command was "
            "started",
            "start commands in the project's folder. Image paths in a dataset are relative to its image folder "
            "(`images` in config/datasets/<name>.yaml); the rule write_jsonl makes them absolute",
        ),
    ),
    Signature(
        "An image cannot be read",
        r"UnidentifiedImageError: cannot identify image file '?(?P<path>[^'\n]*)'?"
        r"|BadImageError: (?:undecodable|empty|missing): (?P<image>.*)"
        r"|OSError: image file is truncated"
        r"|OSError: (?:broken data stream when reading|unrecognized data stream contents when reading) image file",
        make_fixed_explanation(
            "an image is damaged, incomplete or not an image {path}{image}",
            "replace the file or remove its row from the dataset. Every image is opened once before training; "
            "`jsonl.on_bad_row: drop` omits bad ones and counts them. If the image was valid then, it has changed "
            "since; run again with `--forcerun make_dataset`, which checks all images",
        ),
    ),
    Signature(
        "Access to a gated model",
        r"trying to access a gated repo|GatedRepoError|Cannot access gated repo|Access to model \S+ is restricted",
        make_fixed_explanation(
            "the model or dataset is gated, and this machine has no token of an account that may download it",
            "accept the terms on its page of the hub, run `hf auth login`, then `snakemake fetch --config "
            "model=<model>`; stages themselves download nothing",
        ),
    ),
    Signature(
        "Shared memory is full",
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Bus error"
        r"|unable to (?:write to|allocate shared memory\(shm\) for|mmap \d+ bytes from) file </torch_\w+>"
        r"|</torch_\w+>.*No space left on device"
        r"|/dev/shm/.*No space left on device|No space left on device.*/dev/shm/",
        explain_shared_memory,
    ),
    Signature(
        "The disk is full",
        r"(?:No space left on device|\[Errno 28\][^':\n]*)(?:: '(?P<path>[^'\n]+)')?|Disk quota exceeded"
        r"|OperationalError: database or disk is full|PytorchStreamWriter failed writing file"
        r"|inline_container\.cc:\d+\] \. unexpected pos",
        explain_full,
    ),
    Signature(
        "LoRA weights are empty",
        r"size mismatch for (?P<tensor>\S*lora_\S+): copying a param with shape torch\.Size\(\[0\]\) from checkpoint"
        r"|BrokenWeightsError: (?:tensor (?P<broken>\S*lora_\S+) has shape \(0,\)|every lora_B matrix is zero)",
        make_fixed_explanation(
            "LoRA weights {tensor}{broken} were saved empty or untrained. Under ZeRO-3 a process holds only its part "
            "of each weight, and saving without gathering the parts writes nothing",
            "do not use this adapter. This workflow gathers and checks weights before a checkpoint counts; delete the "
            "stage's `checkpoints` folder and run it again. An adapter from elsewhere must be saved again with "
            "gathered weights (`stage3_gather_16bit_weights_on_model_save: true`)",
        ),
    ),
    Signature(
        "The loss is not a number",
        r"\bloss'?:? ?'?(?P<value>nan|inf)\b|BrokenWeightsError: tensor \S+ holds values that are not finite"
        r"|\btraining diverged by step \d+: |Current loss scale already at minimum - cannot decrease scale anymore",
        make_fixed_explanation(
            "training diverged; the loss or the weights became infinite or not a number",
            "lower learning_rate (to a third), keep max_grad_norm at 1.0, use precision: bf16 (never fp16), and "
            "inspect the rows of the step before. Delete the stage's `checkpoints` folder if the damage is older than "
            "the last checkpoint",
        ),
        symptom=True,
    ),
)
