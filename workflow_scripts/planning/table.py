"""The plan as a person reads it in a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from planning.prediction import Machine
from planning.search import Candidate, fastest, nearest, recomputed, remedies
from planning.step import Workload, count_parameters


def print_plan(console: Console, plans: Sequence[tuple[Workload, list[Candidate]]], machine: Machine) -> None:
    """One row for each workload and DeepSpeed configuration: its fastest arrangement that fits, or the nearest."""
    console.print(_machine_line(machine))
    table = Table("tuning", "DeepSpeed", "recomputed", "micro × acc.", "GPU GiB", "host GiB", "speed", "verdict")
    for workload, found in plans:
        best = fastest(found)
        for name in dict.fromkeys(candidate.arrangement.deepspeed for candidate in found):
            same = [candidate for candidate in found if candidate.arrangement.deepspeed == name]
            table.add_row(*_row(workload, fastest(same) or nearest(same, machine), best))
        table.add_section()
    console.print(table)
    for workload, found in plans:
        _print_advice(console, workload, found, machine)


def _machine_line(machine: Machine) -> str:
    gpus = f"{machine.gpus} × {_gib(machine.gpu_gib)} of GPU memory" if machine.gpus else "no GPU"
    each = f" on each of {machine.nodes} nodes" if machine.nodes > 1 else ""
    return f"Machine: {gpus}, {_gib(machine.host_gib)} of host memory{each}"


def _row(workload: Workload, candidate: Candidate, best: Candidate | None) -> list[str]:
    arrangement, prediction = candidate.arrangement, candidate.prediction
    speed = f"{candidate.samples_per_second / best.samples_per_second:.2f}" if best and candidate.fits else ""
    verdict = candidate.shortage or ("fastest that fits" if candidate is best else "fits")
    return [
        workload.tuning,
        arrangement.deepspeed,
        recomputed(arrangement),
        f"{arrangement.micro_batch} × {arrangement.accumulation}",
        f"{prediction.gpu_gib:.1f}" if prediction.gpu else "",
        f"{prediction.host_gib:.1f}",
        speed,
        verdict,
    ]


def _print_advice(console: Console, workload: Workload, found: list[Candidate], machine: Machine) -> None:
    best = fastest(found)
    parameters = count_parameters(workload)
    counted = f"{sum(parameters.trained) / 1e6:,.1f} of {sum(parameters.every) / 1e6:,.1f} million parameters trained"
    console.print(f"\n[bold]{workload.architecture.name}, {workload.tuning}[/bold]: {counted}")
    if best is None:
        console.print("Nothing fits. What would help:")
        for advice in remedies(workload, found, machine):
            console.print(f"  • {advice}")
        return
    for name, parts in (("GPU", best.prediction.gpu), ("host", best.prediction.host)):
        if parts:
            total = " + ".join(f"{part} {size:.2f}" for part, size in parts.items())
            console.print(f"  {name} {sum(parts.values()):.2f} GiB = {total}")


def _gib(size: float | None) -> str:
    return "an unknown amount" if size is None else f"{size:.2f} GiB"
