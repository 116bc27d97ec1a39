"""Progress of runs, read from the files in results/<experiment>[/seed-<n>]/<stage>/."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.config.stages import STAGE_NOTE, STAGES
from dj2mgm.files import read_json
from dj2mgm.memory.memory_csv import last_row


@dataclass(frozen=True)
class StageState:
    """Progress of one stage of a run."""

    name: str
    state: str  # done, running, stopped (no workflow runs any more), pending, or "" (shared with another run)
    progress: dict | None = None  # of a training stage: progress.json
    memory: dict[str, str] | None = None  # of a training stage: the last row of memory.csv


def find_runs(results: Path) -> list[Path]:
    """Return the folders of all runs, sorted: folders with a stage's folder. The setting `results` adds a level."""
    folders = [folder for pattern in ("*", "*/*", "*/*/seed-*") for folder in results.glob(pattern) if folder.is_dir()]
    return sorted(folder for folder in folders if any((folder / stage).is_dir() for stage in STAGES))


def read_stage_states(run: Path, working: bool) -> list[StageState]:
    """Read the states of a run's stages, in the order of data flow; `working`: whether a workflow is running here."""
    stages = [_stage(run / name, working) for name in STAGES]
    begun = [place for place, stage in enumerate(stages) if stage.state != "pending"]
    # a stage without files before a stage that has begun is shared with another run, or not part of this experiment
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
    """Read a file of a running stage; None if it is missing, since the stage may remove it at any moment."""
    try:
        return read(file)
    except FileNotFoundError:
        return None
