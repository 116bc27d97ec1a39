"""Show a live view of the workflow in this folder: stages of every run, and progress and memory of trainings.

    python workflow_scripts/watch.py            # in a second terminal, while `snakemake` runs
    python workflow_scripts/watch.py --once     # print once; also if the output is not a terminal

Ctrl-C ends the view.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser, project_imports

with project_imports():
    import psutil
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from dj2mgm.cli.messages import format_duration
    from dj2mgm.cli.run_lock import is_run_in_progress
    from dj2mgm.errors import InputError
    from dj2mgm.monitoring.memory_files import GIB, read_last_row
    from dj2mgm.monitoring.readings import read_memory
    from dj2mgm.runs.stages import STAGE_NOTE, STAGES
    from dj2mgm.storage.files import read_json

RESULTS = Path("results")
REFRESH_S = 2
STYLES = {"done": "green", "running": "bold yellow", "stopped": "red", "pending": "dim", "": "dim"}


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--once", action="store_true", help="print the view once and exit")
    once = parser.parse_args().once
    if not RESULTS.is_dir():
        raise InputError(f"the folder {RESULTS}/ is missing; start watch.py in the folder where snakemake runs")
    console = Console()
    if once or not console.is_terminal:
        console.print(build_view())
        return
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(build_view(), refresh=True)
                time.sleep(REFRESH_S)
        except KeyboardInterrupt:
            pass


def build_view() -> RenderableType:
    """Return the tables of stages and trainings, and a line about the machine."""
    is_running = is_run_in_progress()
    folders = find_runs(RESULTS)
    if not folders:
        return Text("no run has begun yet; start one with `snakemake baseline`")
    groups = {Path(*folder.parts[:3]) for folder in folders}  # results/<dataset>/<model>
    parent = groups.pop() if len(groups) == 1 else RESULTS
    runs = {str(folder.relative_to(parent)): read_stage_states(folder, is_running) for folder in folders}
    stages = Table("stage", *runs, title=str(parent), title_justify="left")
    for row in zip(*runs.values(), strict=True):
        stages.add_row(row[0].name, *(Text(stage.state or "–", STYLES[stage.state]) for stage in row))
    training = Table("training", "step", "loss", "time left", "phase", "memory, GiB")
    for name, states in runs.items():
        for stage in states:
            if stage.progress or stage.memory:
                training.add_row(f"{name} {stage.name}", *format_progress(stage.progress), *format_memory(stage.memory))
    reading = read_memory(psutil.Process())
    footer = f"machine: {reading.host / GIB:.1f} of {reading.host_total / GIB:.1f} GiB in use; "
    footer += "snakemake is running" if is_running else "snakemake is not running"
    return Group(stages, *([training] if training.rows else []), footer)


@dataclass(frozen=True)
class StageState:
    """Progress of one stage of a run."""

    name: str
    state: str  # done, running, stopped (no workflow runs any more), pending, or "" (shared, or no part of the run)
    progress: dict | None = None  # progress.json of a training stage
    memory: dict[str, str] | None = None  # last row of a training stage's memory.csv


def find_runs(results: Path) -> list[Path]:
    """Return the folders of all runs, sorted: folders with a stage's folder."""
    folders = [folder for pattern in ("*/*/*", "*/*/*/seed-*") for folder in results.glob(pattern)]
    folders = [folder for folder in folders if not folder.is_relative_to(results / "datasets")]  # images may be there
    return sorted(folder for folder in folders if any((folder / stage).is_dir() for stage in STAGES))


def read_stage_states(run: Path, is_running: bool) -> list[StageState]:
    """Read the states of a run's stages, in the order of data flow; `is_running`: whether a workflow runs here."""
    stages = [_read_stage(run / name, is_running) for name in STAGES]
    begun_indices = [index for index, stage in enumerate(stages) if stage.state not in ("pending", "")]
    # a stage without files before a stage that has begun is shared with another run, or not part of this experiment
    last_begun = max(begun_indices, default=0)
    return [
        StageState(stage.name, "") if stage.state == "pending" and index < last_begun else stage
        for index, stage in enumerate(stages)
    ]


def _read_stage(folder: Path, is_running: bool) -> StageState:
    if (folder / STAGE_NOTE).exists():
        return StageState(folder.name, "")
    if (folder / STAGES[folder.name].outputs[-1]).exists():
        return StageState(folder.name, "done")
    if not any(log.name != "config.log" for log in folder.glob("*.log")):
        is_part = folder.is_dir() or not STAGES[folder.name].optional  # its settings are written when a run begins
        return StageState(folder.name, "pending" if is_part else "")
    return StageState(
        folder.name,
        "running" if is_running else "stopped",
        _read_if_exists(folder / "progress.json", read_json),
        _read_if_exists(folder / "checkpoints/memory.csv", read_last_row),
    )


def _read_if_exists(file: Path, read: Callable[[Path], dict | None]) -> dict | None:
    """Read a file of a running stage; None if it is missing, since the stage may remove it at any moment."""
    try:
        return read(file)
    except FileNotFoundError:
        return None


def format_progress(progress: dict | None) -> list[str]:
    """Return step, loss and time left; empty before the first step is logged."""
    if progress is None:
        return ["", "", ""]
    return [
        f"{progress['step']} of {progress['max_steps']}",
        f"{progress['loss']:.4f}",
        format_duration(progress["seconds_left"]),
    ]


def format_memory(row: dict[str, str] | None) -> list[str]:
    """Return the phase, and the memory of the stage's processes and of each GPU."""
    if row is None:
        return ["", ""]
    gpus = [f"{name.removesuffix('_gib')} {size}" for name, size in row.items() if name.startswith("gpu")]
    return [row["phase"], ", ".join([f"host {row['job_gib']}", *gpus])]


if __name__ == "__main__":
    main()
