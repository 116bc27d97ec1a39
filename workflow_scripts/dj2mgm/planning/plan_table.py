"""The table of training plans and the advice that `plan` prints."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dj2mgm.planning.prediction import Machine
from dj2mgm.planning.search import (
    Candidate,
    describe_checkpointing,
    find_fastest,
    find_nearest,
    suggest_remedies,
)
from dj2mgm.planning.step import Workload, count_parameters

NARROW = 110  # columns below which the table of plans has no lines between columns


def print_plans(console: Console, searches: Sequence[tuple[Workload, list[Candidate]]], machine: Machine) -> None:
    """Print a row for each workload and DeepSpeed configuration: the fastest plan that fits, or the nearest one."""
    console.print(_machine_line(machine))
    table = Table() if console.width >= NARROW else Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in (
        "tuning",
        "DeepSpeed",
        "checkpointed layers",
        "micro × acc.",
        "GPU GiB",
        "host GiB",
        "speed",
        "verdict",
    ):
        table.add_column(column, overflow="fold")  # names are whole in a narrow terminal, too
    for workload, found in searches:
        best = find_fastest(found)
        for name in dict.fromkeys(candidate.plan.deepspeed for candidate in found):
            same = [candidate for candidate in found if candidate.plan.deepspeed == name]
            table.add_row(*_row(workload, find_fastest(same) or find_nearest(same, machine), best))
        table.add_section()
    console.print(table)
    for workload, found in searches:
        _print_advice(console, workload, found, machine)


def _machine_line(machine: Machine) -> str:
    gpus = f"{machine.gpus} × {_gib(machine.gpu_gib)} of GPU memory" if machine.gpus else "no GPU"
    each = f" on each of {machine.nodes} nodes" if machine.nodes > 1 else ""
    return f"Machine: {gpus}, {_gib(machine.host_gib)} of host memory{each}"


def _row(workload: Workload, candidate: Candidate, best: Candidate | None) -> list[str]:
    plan, prediction = candidate.plan, candidate.prediction
    speed = f"{candidate.samples_per_second / best.samples_per_second:.2f}" if best and candidate.fits else ""
    verdict = candidate.shortage or ("fastest that fits" if candidate is best else "fits")
    return [
        workload.tuning,
        plan.deepspeed,
        describe_checkpointing(plan),
        f"{plan.micro_batch} × {plan.accumulation}",
        f"{prediction.gpu_gib:.1f}" if prediction.gpu else "",
        f"{prediction.host_gib:.1f}",
        speed,
        verdict,
    ]


def _print_advice(console: Console, workload: Workload, found: list[Candidate], machine: Machine) -> None:
    best = find_fastest(found)
    parameters = count_parameters(workload)
    counted = f"{sum(parameters.trained) / 1e6:,.1f} of {sum(parameters.every) / 1e6:,.1f} million parameters trained"
    console.print(f"\n[bold]{workload.architecture.name}, {workload.tuning}[/bold]: {counted}")
    if best is None:
        console.print("Nothing fits. What would help:")
        for advice in suggest_remedies(workload, found, machine):
            console.print(f"  • {advice}")
        return
    for name, parts in (("GPU", best.prediction.gpu), ("host", best.prediction.host)):
        if parts:
            total = " + ".join(f"{part} {size:.2f}" for part, size in parts.items())
            console.print(f"  {name} {sum(parts.values()):.2f} GiB = {total}")


def _gib(size: float | None) -> str:
    return "an unknown amount" if size is None else f"{size:.2f} GiB"
