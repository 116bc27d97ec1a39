"""Shows the memory of this machine, its GPUs, the control group's limit, and of a process with its children.

    python workflow_scripts/monitor_memory.py                                # a line every 30 s until Ctrl-C
    python workflow_scripts/monitor_memory.py --pid 4711 --interval 5 --analysis   # ends with the process
    python workflow_scripts/monitor_memory.py --once

With --analysis, mean, peak and growth follow at the end. Sizes are in GiB.
"""

import argparse
import time

from dj2mgm.command_line import command_line, project_imports

with project_imports():
    import psutil
    from rich.console import Console
    from rich.table import Column, Table

    from dj2mgm.errors import InputError
    from dj2mgm.memory.readings import GIB, Reading, read_memory, summarize

TITLES = {"job_gib": "process tree", "host_gib": "machine", "cgroup_gib": "control group"}


@command_line
def main() -> None:
    args = parse_arguments()
    process = find_process(args.pid)
    console = Console()
    if args.once:
        console.print(table_of(read_memory(process), args.pid is not None))
        return
    rows: list[tuple[float, dict[str, float]]] = []
    try:
        watch(process, args.interval, args.pid is not None, rows)
    except KeyboardInterrupt:
        pass
    if args.analysis and rows:
        console.print(analysis_of(rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=float, default=30, help="seconds between two lines (default 30)")
    parser.add_argument("--analysis", action="store_true", help="at the end, or on Ctrl-C, summarize what was seen")
    parser.add_argument("--once", action="store_true", help="one reading as a table")
    parser.add_argument("--pid", type=int, help="a process to watch with all below it, until it ends")
    args = parser.parse_args()
    if not args.interval > 0:
        raise InputError(f"--interval {args.interval:g}: give a number of seconds above 0")
    return args


def find_process(pid: int | None) -> psutil.Process:
    """The process of a number; without a number, this one."""
    try:
        return psutil.Process(pid)
    except (psutil.NoSuchProcess, ValueError):
        raise InputError(f"--pid {pid}: no such process; `ps` lists those that run") from None


def watch(
    process: psutil.Process, interval: float, with_tree: bool, rows: list[tuple[float, dict[str, float]]]
) -> None:
    """Print a line every `interval` seconds, and append (seconds since the start, GiB by column) to `rows`."""
    start = time.monotonic()
    while True:
        reading = shown(read_memory(process), with_tree)
        if with_tree and not runs(process):
            return
        if not rows:
            print("    time  " + "  ".join(f"{title(name):>13}" for name in reading), flush=True)
        rows.append((time.monotonic() - start, reading))
        print(f"{time.strftime('%H:%M:%S')}  " + "  ".join(f"{size:13.2f}" for size in reading.values()), flush=True)
        if not with_tree:
            time.sleep(interval)
        elif ends_within(process, interval):
            return


def runs(process: psutil.Process) -> bool:
    """A process that has ended but that its parent has not asked about yet, a zombie, runs no more."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ends_within(process: psutil.Process, seconds: float) -> bool:
    """Wait, but no longer than the process runs."""
    try:
        process.wait(seconds)
    except psutil.TimeoutExpired:
        return False
    return True


def shown(reading: Reading, with_tree: bool) -> dict[str, float]:
    """GiB by column, of what there is; the process tree only where one is watched."""
    columns = reading.columns()
    return {name: size for name, size in columns.items() if size is not None and (with_tree or name != "job_gib")}


def title(name: str) -> str:
    return TITLES.get(name) or name.removesuffix("_gib").replace("gpu", "GPU ")


def table_of(reading: Reading, with_tree: bool) -> Table:
    limits = {"host_gib": reading.host_total, "job_gib": reading.host_limit}
    limits |= {"cgroup_gib": reading.cgroup.limit} if reading.cgroup else {}
    limits |= {f"gpu{gpu.index}_gib": gpu.total for gpu in reading.gpus}
    table = Table("memory", *right_aligned("used GiB", "of GiB", "share"))
    for name, size in shown(reading, with_tree).items():
        limit = limits[name] / GIB
        table.add_row(title(name), f"{size:.2f}", f"{limit:.2f}", f"{size / limit:.0%}")
    if not reading.gpus:
        table.caption = "no NVIDIA driver: no GPU to read"
    return table


def analysis_of(rows: list[tuple[float, dict[str, float]]]) -> Table:
    seconds = rows[-1][0]
    table = Table("memory", *right_aligned("mean GiB", "peak GiB", "peak after", "growth GiB/h"), "verdict")
    for name in rows[0][1]:
        summary = summarize([at for at, _ in rows], [sizes.get(name, 0.0) for _, sizes in rows])
        table.add_row(
            title(name),
            f"{summary.mean:.2f}",
            f"{summary.peak:.2f}",
            f"{summary.peak_seconds:.0f} s",
            f"{summary.slope_per_hour:+.2f}",
            "keeps growing" if summary.grows else "steady",
        )
    table.caption = f"{len(rows)} readings in {seconds:.0f} s; growth is that of the second half"
    return table


def right_aligned(*headers: str) -> list[Column]:
    return [Column(header, justify="right") for header in headers]


if __name__ == "__main__":
    main()
