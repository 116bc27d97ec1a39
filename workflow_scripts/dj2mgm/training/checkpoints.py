"""Resume checkpoints: which one may be resumed from, and the mark that makes one count.

They live in `<output>/checkpoints/`, beside the declared outputs, because Snakemake deletes a failed job's outputs. A
checkpoint counts once `complete.json` is in it: it is written last, after the weights were checked and every file is on
the disk. It holds the fingerprint of settings, inputs and code that a resuming run must share, the number of processes
that wrote the checkpoint, and size and digest of every file, which are compared before anything is resumed.

Two are kept: if the newest is damaged, it is set aside as `damaged-checkpoint-<step>`, and the one before it is taken.

The last ones outlive their stage, until Snakemake has recorded that everything it was asked for is done: a stage that
ends when its Snakemake is dead, or is killed on its way out, is started once more, and then has nothing left to train.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.files import read_json, write_json

MARK = "complete.json"
KEPT = 2
DIGEST = "sha256"  # in hardware on most processors
THREADS = 4  # that read and hash files; hashing a large file lets the others run


def find_checkpoint(folder: Path, fingerprint: str, processes: int) -> tuple[Path | None, str]:
    """The newest usable checkpoint, and what is to be said about it, or about there being none. Damaged ones are set
    aside: call it in one process only.

    Raises:
        InputError: it is usable but for the number of processes: each holds its own part of the optimizer.
    """
    said, foreign, marked = [], False, _newest_first(folder)
    for checkpoint in marked:
        mark = read_mark(checkpoint)
        if mark and mark["fingerprint"] != fingerprint:
            foreign = True
            continue
        damage = _damage(checkpoint, mark)
        if damage:
            said.append(f"{checkpoint.name} is damaged ({damage}) and was set aside as {_set_aside(checkpoint).name}")
            continue
        if (writers := mark["processes"]) != processes:
            raise InputError(
                f"{checkpoint} was written by {writers} processes, each with its own part of the optimizer, so "
                f"{processes} cannot go on from it: set gpus: {writers} to resume from step {mark['step']}, or delete "
                f"{folder} to start over"
            )
        return checkpoint, "; ".join([*said, f"resuming from step {mark['step']} ({checkpoint.name})"])
    if foreign:
        said.append("starting from step 0: the checkpoint found belongs to other settings, inputs or code")
    elif marked or any(folder.glob("checkpoint-*")):
        said.append("starting from step 0: no complete checkpoint found")
    return None, "; ".join(said)  # nothing to say of a first run


def newest_before(folder: Path, step: int) -> Path | None:
    """Return the newest complete checkpoint that was written before a step."""
    return next((path for path in _newest_first(folder) if int(path.name[11:]) < step), None)


def discard_checkpoints(folder: Path, newest: Path | None) -> None:
    """Remove all but `newest` and the complete one before it; if `newest` is None, all."""
    complete = _newest_first(folder)
    kept = complete[complete.index(newest) :][:KEPT] if newest else []
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint not in kept:
            (checkpoint / MARK).unlink(missing_ok=True)  # what is half removed does not count
            shutil.rmtree(checkpoint)


def discard_finished(stages: Iterable[Path]) -> None:
    """Remove what was kept to resume those training stages, given by their folders, whose outputs are whole."""
    for stage in stages:
        if (stage / "metrics.json").exists():  # written last
            discard_checkpoints(stage / "checkpoints", newest=None)
            shutil.rmtree(stage / "checkpoints", ignore_errors=True)  # and the rows of memory beside them


def mark_complete(checkpoint: Path, step: int, fingerprint: str, processes: int) -> None:
    """Once every process has written its files: bring them to the disk, then say that they count."""
    files = {name: {"size": path.stat().st_size} for name, path in _files(checkpoint).items()}
    with ThreadPoolExecutor(THREADS) as threads:
        for name, digest in zip(files, threads.map(_sync_and_digest, _files(checkpoint).values()), strict=True):
            files[name][DIGEST] = digest
    for folder in (*(path for path in checkpoint.rglob("*") if path.is_dir()), checkpoint, checkpoint.parent):
        _sync(folder)
    values = {"step": step, "fingerprint": fingerprint, "processes": processes, "files": files}
    write_json(checkpoint / MARK, values | {"seal": _seal(values)})
    _sync(checkpoint)


def read_mark(checkpoint: Path) -> dict | None:
    """What `mark_complete` wrote; None if it is anything else."""
    try:
        values = read_json(checkpoint / MARK)
        return values if values.pop("seal") == _seal(values) else None
    except (OSError, InputError, KeyError, TypeError, AttributeError):
        return None


def _newest_first(folder: Path) -> list[Path]:
    """The checkpoints that were marked, by the step in their names."""
    marked = [mark.parent for mark in folder.glob(f"checkpoint-*/{MARK}") if mark.parent.name[11:].isdecimal()]
    return sorted(marked, key=lambda checkpoint: int(checkpoint.name[11:]), reverse=True)


def _seal(values: dict) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _damage(checkpoint: Path, mark: dict | None) -> str | None:
    """How the files differ from what was written, or None."""
    if mark is None:
        return f"{MARK} is not as it was written"
    try:
        return _changed_file(checkpoint, mark)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"


def _changed_file(checkpoint: Path, mark: dict) -> str | None:
    files, written = _files(checkpoint), mark["files"]
    if missing := sorted(written.keys() - files.keys()):
        return f"{missing[0]} is missing"
    if extra := sorted(files.keys() - written.keys()):
        return f"{extra[0]} was not written with it"
    for name, path in files.items():
        if path.stat().st_size != written[name]["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {written[name]['size']}"
    with ThreadPoolExecutor(THREADS) as threads:
        for name, digest in zip(files, threads.map(_digest, files.values()), strict=True):
            if digest != written[name][DIGEST]:
                return f"{name} has other contents than were written"
    return None


def _set_aside(checkpoint: Path) -> Path:
    """Rename it, so that it does not count; only the last one that was set aside is kept."""
    for older in checkpoint.parent.glob("damaged-checkpoint-*"):
        shutil.rmtree(older)
    return checkpoint.rename(checkpoint.with_name(f"damaged-{checkpoint.name}"))


def _files(checkpoint: Path) -> dict[str, Path]:
    """All files but the mark, by their path in the checkpoint."""
    files = {str(path.relative_to(checkpoint)): path for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    return {name: path for name, path in files.items() if name != MARK}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, DIGEST).hexdigest()


def _sync_and_digest(path: Path) -> str:
    _sync(path)
    return _digest(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
