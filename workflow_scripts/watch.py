"""Show a live view of the workflow in this folder: stages of every run, and progress and memory of trainings.

python workflow_scripts/watch.py            # in a second terminal, while `snakemake` runs; Ctrl-C ends it
python workflow_scripts/watch.py --once     # print once; also if the output is not a terminal
"""

import argparse
import time
from pathlib import Path

from dj2mgm.command_line import command_line, project_imports

with project_imports():
    import psutil
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from dj2mgm.errors import InputError
    from dj2mgm.memory.readings import GIB, read_memory
    from dj2mgm.messages import format_duration
    from dj2mgm.reporting.run_state import find_runs, read_stage_states
    from dj2mgm.takeover import is_running

RESULTS = Path("results")
REFRESH_S = 2
STYLES = {"done": "green", "running": "bold yellow", "stopped": "red", "pending": "dim", "": "dim"}


@command_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    working = is_running()
    runs = {str(folder.relative_to(RESULTS)): read_stage_states(folder, working) for folder in find_runs(RESULTS)}
    stages = Table("stage", *runs)
    for row in zip(*runs.values(), strict=True):
        stages.add_row(row[0].name, *(Text(stage.state or "–", STYLES[stage.state]) for stage in row))
    training = Table("training", "step", "loss", "time left", "phase", "memory, GiB")
    for name, states in runs.items():
        for stage in states:
            if stage.progress or stage.memory:
                training.add_row(f"{name} {stage.name}", *progress_cells(stage.progress), *memory_cells(stage.memory))
    reading = read_memory(psutil.Process())
    foot = f"machine: {reading.host / GIB:.1f} of {reading.host_total / GIB:.1f} GiB in use; "
    foot += "snakemake is running" if working else "snakemake is not running"
    return Group(stages, *([training] if training.rows else []), foot)


def progress_cells(progress: dict | None) -> list[str]:
    """Return step, loss and time left; empty before the first step is logged."""
    if progress is None:
        return ["", "", ""]
    return [
        f"{progress['step']} of {progress['max_steps']}",
        f"{progress['loss']:.4f}",
        format_duration(progress["seconds_left"]),
    ]


def memory_cells(row: dict[str, str] | None) -> list[str]:
    """Return the phase, and the memory of the stage's processes and of each GPU."""
    if row is None:
        return ["", ""]
    gpus = [f"{name.removesuffix('_gib')} {size}" for name, size in row.items() if name.startswith("gpu")]
    return [row["phase"], ", ".join([f"host {row['job_gib']}", *gpus])]


if __name__ == "__main__":
    main()
