"""Failures of files, disks and weights: missing, damaged, full, not finite."""

import shutil
from pathlib import Path

from dj2mgm.diagnosis.signature import Evidence, Explanation, Signature, fixed_explanation
from dj2mgm.memory.memory_csv import format_gib

# Wrong paths and images that cannot be read.

DATA_SIGNATURES = (
    Signature(
        "A relative path leads nowhere",
        # not a bare word, which is a program that is not installed
        r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>(?!/)[^']*[./][^']*)'",
        fixed_explanation(
            "'{path}' is a relative path, and this file does not exist below the folder in which the command was "
            "started",
            "start commands in the project's folder. Image paths in a dataset are relative to its image folder "
            "(`images` in config/datasets/<name>.yaml); the rule write_jsonl makes them absolute",
        ),
    ),
    Signature(
        "An image cannot be read",
        r"UnidentifiedImageError: cannot identify image file '?(?P<path>[^'\n]*)'?"
        r"|BadImage: (?:undecodable|empty|missing): (?P<named>.*)"
        r"|OSError: image file is truncated"
        r"|OSError: (?:broken data stream when reading|unrecognized data stream contents when reading) image file",
        fixed_explanation(
            "an image is damaged, incomplete or not an image {path}{named}",
            "replace the file or remove its row from the dataset. Every image is opened once before training; "
            "`jsonl.on_bad_row: drop` omits bad ones and counts them. If the image was valid then, it has changed "
            "since; run again with `--forcerun make_dataset`, which checks all images",
        ),
    ),
)


# Full disks and full shared memory.


def explain_full(evidence: Evidence) -> Explanation:
    folder = evidence.log.path.resolve().parent
    free = format_gib(shutil.disk_usage(folder).free)
    named = f" ({evidence.match['path']})" if evidence.match["path"] else ""
    return Explanation(
        f"a file could not be written{named}, because the disk was full. The disk of this log now has {free} free",
        "free space (`df -h`; `du -sh results/* ~/.cache/* /tmp`), then run the same command again; a stage continues "
        "from its last complete checkpoint. A quota (`quota -s`) and a limit of file sizes (`ulimit -f`) produce the "
        "same message",
    )


def explain_shared_memory(evidence: Evidence) -> Explanation:
    folder = Path("/dev/shm")
    size = f" ({format_gib(shutil.disk_usage(folder).total)})" if folder.is_dir() else ""
    return Explanation(
        f"/dev/shm{size}, through which data loader processes pass batches, was full",
        "enlarge it for the container (`docker run --shm-size=8g` or `--ipc=host`), or set loader_workers: 0",
    )


STORAGE_SIGNATURES = (
    Signature(
        "Shared memory is full",
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Bus error"
        r"|unable to (?:write to|allocate shared memory\(shm\) for|mmap \d+ bytes from) file </torch_\w+>",
        explain_shared_memory,
    ),
    Signature(
        "The disk is full",
        r"No space left on device(?:: '(?P<path>[^']+)')?|Disk quota exceeded"
        r"|OperationalError: database or disk is full|PytorchStreamWriter failed writing file"
        r"|inline_container\.cc:\d+\] \. unexpected pos",
        explain_full,
    ),
)


# Weights that training or saving damaged.

WEIGHT_SIGNATURES = (
    Signature(
        "LoRA weights are empty",
        r"size mismatch for (?P<tensor>\S*lora_\S+): copying a param with shape torch\.Size\(\[0\]\) from checkpoint"
        r"|BrokenWeights: (?:tensor (?P<broken>\S*lora_\S+) has shape \(0,\)|every lora_B matrix is zero)",
        fixed_explanation(
            "LoRA weights {tensor}{broken} were saved empty or untrained. Under ZeRO-3 a process holds only its part "
            "of each weight, and saving without gathering the parts writes nothing",
            "do not use this adapter. This workflow gathers and checks weights before a checkpoint counts; delete the "
            "stage's `checkpoints` folder and run it again. An adapter from elsewhere must be saved again with "
            "gathered weights (`stage3_gather_16bit_weights_on_model_save: true`)",
        ),
    ),
    Signature(
        "The loss is not a number",
        r"\bloss'?:? ?'?(?P<value>nan|inf)\b|BrokenWeights: tensor \S+ holds values that are not finite"
        r"|\btraining diverged by step \d+: |Current loss scale already at minimum - cannot decrease scale anymore",
        fixed_explanation(
            "training diverged; the loss or the weights became infinite or not a number",
            "lower learning_rate (to a third), keep max_grad_norm at 1.0, use precision: bf16 (never fp16), and "
            "inspect the rows of the step before. Delete the stage's `checkpoints` folder if the damage is older than "
            "the last checkpoint",
        ),
        symptom=True,
    ),
)

SIGNATURES = DATA_SIGNATURES + STORAGE_SIGNATURES + WEIGHT_SIGNATURES
