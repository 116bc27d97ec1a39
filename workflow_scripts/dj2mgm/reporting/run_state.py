"""How far runs are, from the files that their stages leave in results/<experiment>[/seed-<n>]/<stage>/."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.config.stages import STAGE_NOTE, STAGES
from dj2mgm.files import read_json
from dj2mgm.memory.memory_csv import last_row


@dataclass(frozen=True)
class StageState:
    name: str
    state: str  # done, running, stopped (no workflow runs any more), pending, or "" (not of this run's own)
    progress: dict | None = None  # of a training stage: the trainer's progress.json
    memory: dict[str, str] | None = None  # and the last row of its memory.csv


def runs_in(results: Path) -> list[Path]:
    """Folders of all runs: those that hold a folder of a stage, by name. `results: <name>` puts some a level deeper."""
    folders = [folder for pattern in ("*", "*/*", "*/*/seed-*") for folder in results.glob(pattern) if folder.is_dir()]
    return sorted(folder for folder in folders if any((folder / stage).is_dir() for stage in STAGES))


def stages_of(run: Path, working: bool) -> list[StageState]:
    """The states of a run's stages in the order of the data's way.

    Args:
        working: whether a workflow is at work in this folder.
    """
    stages = [_stage(run / name, working) for name in STAGES]
    begun = [place for place, stage in enumerate(stages) if stage.state != "pending"]
    # what was passed over on the way to a later stage is shared with another run, or is not in this experiment
    passed = max(begun, default=0)
    return [
        StageState(stage.name, "") if stage.state == "pending" and place < passed else stage
        for place, stage in enumerate(stages)
    ]


def _stage(folder: Path, working: bool) -> StageState:
    if (folder / STAGE_NOTE).exists():
        return StageState(folder.name, "")
    if (folder / STAGES[folder.name].outputs[-1]).exists():
        return StageState(folder.name, "done")
    if not any(log.name != "config.log" for log in folder.glob("*.log")):
        return StageState(folder.name, "pending")
    return StageState(
        folder.name,
        "running" if working else "stopped",
        _read(folder / "progress.json", read_json),
        _read(folder / "checkpoints/memory.csv", last_row),
    )


def _read(file: Path, read: Callable[[Path], dict | None]) -> dict | None:
    """None without the file, which may vanish at any moment: the stage is at work."""
    try:
        return read(file)
    except FileNotFoundError:
        return None
