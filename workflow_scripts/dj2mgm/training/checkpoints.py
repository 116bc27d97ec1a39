"""Checkpoints from which a training resumes: how they are found, marked, verified and discarded.

They are in `<output>/checkpoints/`, outside the declared outputs, because Snakemake deletes a failed job's outputs. A
checkpoint counts once it has `complete.json`, which is written last, after the weights were checked and every file was
synced to disk. It holds the fingerprint of settings, inputs and code that a resuming run must share, the number of
processes that wrote the checkpoint, and size and digest of every file, which are compared before training resumes.

Two checkpoints are kept. If the newest is damaged, it is renamed to `damaged-checkpoint-<step>`, and the one before it
is used.

The last checkpoints remain until Snakemake has recorded that all of its targets are complete. If Snakemake is killed
before its stage ends, or the stage during its own exit, the stage is started again and then has nothing left to train.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.storage.files import compute_sha256, read_json, write_json

COMPLETE_FILE = "complete.json"
MAX_CHECKPOINTS = 2
HASHING_THREADS = 4  # read and hash files in parallel, because hashing releases the interpreter's lock


def find_checkpoint(folder: Path, fingerprint: str, processes: int) -> tuple[Path | None, str]:
    """Return the newest usable checkpoint, or None, and a note about the choice.

    Damaged checkpoints are renamed, so only one process may call it. A checkpoint of another number of processes is
    refused, because each process wrote its part of the optimizer.
    """
    notes, has_foreign, checkpoints = [], False, _list_newest_first(folder)
    for checkpoint in checkpoints:
        mark = read_mark(checkpoint)
        if mark and mark["fingerprint"] != fingerprint:
            has_foreign = True
            continue
        damage = _describe_damage(checkpoint, mark)
        if damage:
            notes.append(f"{checkpoint.name} is damaged ({damage}) and was renamed to {_set_aside(checkpoint).name}")
            continue
        if (writers := mark["processes"]) != processes:
            raise InputError(
                f"{checkpoint} was written by {writers} processes, each with its own part of the optimizer, so "
                f"{processes} cannot resume from it. Set gpus: {writers} to resume from step {mark['step']}, or delete "
                f"{folder} to start over"
            )
        return checkpoint, "; ".join([*notes, f"resuming from step {mark['step']} ({checkpoint.name})"])
    if has_foreign:
        notes.append("starting from step 0: the checkpoint found belongs to other settings, inputs or code")
    elif checkpoints or any(folder.glob("checkpoint-*")):
        notes.append("starting from step 0: no complete checkpoint found")
    return None, "; ".join(notes)  # a first run has no note


def find_checkpoint_before(folder: Path, step: int) -> Path | None:
    """Return the newest complete checkpoint that was written before a step."""
    return next((path for path in _list_newest_first(folder) if int(path.name[11:]) < step), None)


def discard_checkpoints(folder: Path, newest: Path | None) -> None:
    """Remove all checkpoints except `newest` and the complete one before it; remove all if `newest` is None."""
    complete = _list_newest_first(folder)
    retained = complete[complete.index(newest) :][:MAX_CHECKPOINTS] if newest else []
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint not in retained:
            (checkpoint / COMPLETE_FILE).unlink(missing_ok=True)  # a partly removed checkpoint must not count
            shutil.rmtree(checkpoint)


def discard_finished(stages: Iterable[Path]) -> None:
    """Remove the checkpoints of training stages, given by their folders, whose outputs are complete."""
    for stage in stages:
        if (stage / "metrics.json").exists():  # written last
            discard_checkpoints(stage / "checkpoints", newest=None)
            shutil.rmtree(stage / "checkpoints", ignore_errors=True)  # also removes its memory.csv


def mark_complete(checkpoint: Path, step: int, fingerprint: str, processes: int) -> None:
    """Sync a checkpoint to disk and mark it as complete, after every process has written its files."""
    files = {name: {"size": path.stat().st_size} for name, path in _list_files(checkpoint).items()}
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        for name, digest in zip(files, threads.map(_sync_and_digest, _list_files(checkpoint).values()), strict=True):
            files[name]["sha256"] = digest
    for folder in (*(path for path in checkpoint.rglob("*") if path.is_dir()), checkpoint, checkpoint.parent):
        _sync(folder)
    values = {"step": step, "fingerprint": fingerprint, "processes": processes, "files": files}
    write_json(checkpoint / COMPLETE_FILE, values | {"seal": _compute_seal(values)})
    _sync(checkpoint)


def read_mark(checkpoint: Path) -> dict | None:
    """Read the mark that `mark_complete` wrote; None if it is missing or damaged."""
    try:
        values = read_json(checkpoint / COMPLETE_FILE)
        return values if values.pop("seal") == _compute_seal(values) else None
    except (OSError, InputError, KeyError, TypeError, AttributeError):
        return None


def _list_newest_first(folder: Path) -> list[Path]:
    """Return the marked checkpoints, sorted by the step in their names."""
    checkpoints = [
        mark.parent for mark in folder.glob(f"checkpoint-*/{COMPLETE_FILE}") if mark.parent.name[11:].isdecimal()
    ]
    return sorted(checkpoints, key=lambda checkpoint: int(checkpoint.name[11:]), reverse=True)


def _compute_seal(values: dict) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _describe_damage(checkpoint: Path, mark: dict | None) -> str | None:
    """Describe how the files differ from the written ones, or return None."""
    if mark is None:
        return f"{COMPLETE_FILE} was changed"
    try:
        return _describe_changed_file(checkpoint, mark)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"


def _describe_changed_file(checkpoint: Path, mark: dict) -> str | None:
    files, written = _list_files(checkpoint), mark["files"]
    if missing := sorted(written.keys() - files.keys()):
        return f"{missing[0]} is missing"
    if extra := sorted(files.keys() - written.keys()):
        return f"{extra[0]} was added later"
    for name, path in files.items():
        if path.stat().st_size != written[name]["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {written[name]['size']}"
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        for name, digest in zip(files, threads.map(compute_sha256, files.values()), strict=True):
            if digest != written[name]["sha256"]:
                return f"the content of {name} was changed"
    return None


def _set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint so that it does not count, and remove checkpoints that were renamed earlier."""
    for older in checkpoint.parent.glob("damaged-checkpoint-*"):
        shutil.rmtree(older)
    return checkpoint.rename(checkpoint.with_name(f"damaged-{checkpoint.name}"))


def _list_files(checkpoint: Path) -> dict[str, Path]:
    """Return all files except the mark, by their path in the checkpoint."""
    files = {str(path.relative_to(checkpoint)): path for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    return {name: path for name, path in files.items() if name != COMPLETE_FILE}


def _sync_and_digest(path: Path) -> str:
    _sync(path)
    return compute_sha256(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
