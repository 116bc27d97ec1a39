"""Resume checkpoints: which one may be resumed from, and the mark that makes one count.

They live in `<output>/checkpoints/`, beside the declared outputs, because Snakemake deletes a failed job's outputs. A
checkpoint counts once `complete.json` is in it: it is written last, after the weights were checked, and holds the
fingerprint of settings, inputs and code that a resuming run must share, and the number of processes that wrote it.

The last one outlives its stage, until Snakemake has recorded that everything it was asked for is done: a stage that
ends when its Snakemake is dead, or is killed on its way out, is started once more, and then has nothing left to train.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from errors import InputError
from files import read_json, write_json

MARK = "complete.json"


def find_checkpoint(folder: Path, fingerprint: str, processes: int) -> tuple[Path | None, str]:
    """The newest usable checkpoint, and a sentence that says why it is used or why there is none.

    Raises:
        InputError: it is usable but for the number of processes: each holds its own part of the optimizer.
    """
    marks = sorted(folder.glob(f"checkpoint-*/{MARK}"), key=lambda mark: read_json(mark)["step"])
    if not marks:
        return None, "starting from step 0: no complete checkpoint found"
    newest = read_json(marks[-1])
    if newest["fingerprint"] != fingerprint:
        return None, "starting from step 0: the checkpoint found belongs to other settings, inputs or code"
    if (writers := newest["processes"]) != processes:
        raise InputError(
            f"{marks[-1].parent} was written by {writers} processes, each with its own part of the optimizer, so "
            f"{processes} cannot go on from it: set gpus: {writers} to resume from step {newest['step']}, or delete "
            "that folder to start over"
        )
    return marks[-1].parent, f"resuming from step {newest['step']} ({marks[-1].parent.name})"


def discard_checkpoints(folder: Path, keep: Path | None) -> None:
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint != keep:
            (checkpoint / MARK).unlink(missing_ok=True)  # what is half removed does not count
            shutil.rmtree(checkpoint)


def discard_finished(stages: Iterable[Path]) -> None:
    """Remove what was kept to resume those training stages, given by their folders, whose outputs are whole."""
    for stage in stages:
        if (stage / "metrics.json").exists():  # written last
            discard_checkpoints(stage / "checkpoints", keep=None)
            shutil.rmtree(stage / "checkpoints", ignore_errors=True)  # and the rows of memory beside them


def mark_complete(checkpoint: Path, step: int, fingerprint: str, processes: int) -> None:
    write_json(checkpoint / MARK, {"step": step, "fingerprint": fingerprint, "processes": processes})
