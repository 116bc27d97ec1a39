"""Show the memory of this machine, its GPUs, its control group, and a process with its descendants.

    python workflow_scripts/monitor_memory.py                                # a line every 30 s until Ctrl-C
    python workflow_scripts/monitor_memory.py --pid 4711 --interval 5 --analysis   # ends with the process
    python workflow_scripts/monitor_memory.py --once

--analysis adds mean, peak and growth at the end. Sizes are in GiB.
"""

import argparse
import time

from dj2mgm.cli.command_line import command_line, make_parser, project_imports

with project_imports():
    import psutil
    from rich.console import Console
    from rich.table import Column, Table

    from dj2mgm.errors import InputError
    from dj2mgm.monitoring.memory_files import GIB
    from dj2mgm.monitoring.readings import Reading, read_memory, summarize_readings

COLUMN_LABELS = {"job_gib": "process tree", "host_gib": "machine", "cgroup_gib": "control group"}


@command_line
def main() -> None:
    args = parse_arguments()
    process = find_process(args.pid)
    console = Console()
    if args.once:
        console.print(build_table(read_memory(process), args.pid is not None))
        return
    rows: list[tuple[float, dict[str, float]]] = []
    try:
        watch(process, args.interval, args.pid is not None, rows)
    except KeyboardInterrupt:
        pass
    if args.analysis and rows:
        console.print(build_analysis(rows))


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--interval", type=float, default=30, help="seconds between two lines (default 30)")
    parser.add_argument("--analysis", action="store_true", help="summarize the readings at the end, or on Ctrl-C")
    parser.add_argument("--once", action="store_true", help="print one reading as a table")
    parser.add_argument("--pid", type=int, help="process to watch with its descendants until it ends")
    args = parser.parse_args()
    if not args.interval > 0:
        raise InputError(f"--interval {args.interval:g}: expected a number of seconds above 0")
    return args


def find_process(pid: int | None) -> psutil.Process:
    """Return the process with an id; None stands for this process."""
    try:
        return psutil.Process(pid)
    except (psutil.NoSuchProcess, ValueError):
        raise InputError(f"--pid {pid}: there is no such process; `ps` lists the running ones") from None


def watch(
    process: psutil.Process, interval: float, with_tree: bool, rows: list[tuple[float, dict[str, float]]]
) -> None:
    """Print a line every `interval` seconds, and append (seconds since the start, GiB by column) to `rows`."""
    start = time.monotonic()
    while True:
        reading = select_columns(read_memory(process), with_tree)
        if with_tree and not is_process_running(process):
            return
        if not rows:
            print("    time  " + "  ".join(f"{format_title(name):>13}" for name in reading), flush=True)
        rows.append((time.monotonic() - start, reading))
        print(f"{time.strftime('%H:%M:%S')}  " + "  ".join(f"{size:13.2f}" for size in reading.values()), flush=True)
        if not with_tree:
            time.sleep(interval)
        elif wait_for_end(process, interval):
            return


def is_process_running(process: psutil.Process) -> bool:
    """Return whether a process is running; a zombie, which its parent has not waited for yet, is not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(process: psutil.Process, seconds: float) -> bool:
    """Wait at most `seconds` for the process to end; return whether it has ended."""
    try:
        process.wait(seconds)
    except psutil.TimeoutExpired:
        return False
    return True


def select_columns(reading: Reading, with_tree: bool) -> dict[str, float]:
    """Return GiB by column, without missing values, and with the process tree only if one is watched."""
    columns = reading.build_row()
    return {name: size for name, size in columns.items() if size is not None and (with_tree or name != "job_gib")}


def format_title(name: str) -> str:
    return COLUMN_LABELS.get(name) or name.removesuffix("_gib").replace("gpu", "GPU ")


def build_table(reading: Reading, with_tree: bool) -> Table:
    limits = {"host_gib": reading.host_total, "job_gib": reading.host_limit}
    limits |= {"cgroup_gib": reading.cgroup.limit} if reading.cgroup else {}
    limits |= {f"gpu{gpu.index}_gib": gpu.total for gpu in reading.gpus}
    table = Table("memory", *make_right_aligned("used GiB", "of GiB", "share"))
    for name, size in select_columns(reading, with_tree).items():
        limit = limits[name] / GIB
        table.add_row(format_title(name), f"{size:.2f}", f"{limit:.2f}", f"{size / limit:.0%}")
    if not reading.gpus:
        table.caption = "no GPU: there is no NVIDIA driver"
    return table


def build_analysis(rows: list[tuple[float, dict[str, float]]]) -> Table:
    seconds = rows[-1][0]
    table = Table("memory", *make_right_aligned("mean GiB", "peak GiB", "peak after", "growth GiB/h"), "verdict")
    for name in rows[0][1]:
        summary = summarize_readings([elapsed for elapsed, _ in rows], [sizes.get(name, 0.0) for _, sizes in rows])
        table.add_row(
            format_title(name),
            f"{summary.mean:.2f}",
            f"{summary.peak:.2f}",
            f"{summary.peak_seconds:.0f} s",
            f"{summary.slope_per_hour:+.2f}",
            "keeps growing" if summary.grows else "steady",
        )
    table.caption = f"{len(rows)} readings in {seconds:.0f} s; growth over the second half"
    return table


def make_right_aligned(*headers: str) -> list[Column]:
    return [Column(header, justify="right") for header in headers]


if __name__ == "__main__":
    main()
