"""Output of `plan`: its answer, the tables of training plans and of stages, and advice."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dj2mgm.errors import pluralize
from dj2mgm.planning.prediction import Machine
from dj2mgm.planning.search import (
    Candidate,
    describe_checkpointing,
    describe_plan,
    find_fastest,
    find_nearest,
    suggest_remedies,
)
from dj2mgm.planning.stage_times import PlannedTraining, StageTime
from dj2mgm.planning.step import Workload, count_parameters
from dj2mgm.settings.targets import GpuCard

MIN_WIDTH_OF_NAMES = 80  # columns from which the names of DeepSpeed configurations stand on one line
MIN_GAIN = 0.005  # of speed, as a share, that the table shows
LEGEND = "Layers: computed twice, which saves memory. Speed: 1.00 is the chosen plan's."
NARROW_COLUMNS = 110  # columns below which the table of plans has no lines between columns


def print_answer(
    console: Console,
    trainings: Mapping[str, PlannedTraining],
    machine: Machine,
    times: Sequence[StageTime],
    disk: Mapping[str, float],
    commands: Sequence[str],
) -> None:
    """Print whether the stages fit, what they need, and the next commands."""
    workloads = [training.workload for training in trainings.values()]
    tunings = " and ".join(workload.tuning for workload in workloads)
    chosen = [training.candidate for training in trainings.values() if training.candidate]
    fits = len(chosen) == len(workloads)
    fate = "It fits" if fits else "It does not fit (what would help stands below the table)"
    console.print(f"[bold]{fate}[/bold]: {escape(workloads[0].architecture.name)}, {tunings}", highlight=False)
    lines = []
    if times:
        minutes = pluralize(max(1, round(sum(time.seconds for time in times) / 60)), "minute")
        lines.append(("time", f"about {minutes} for one experiment with one seed"))
    needs = (("GPU memory", "gpu_gib", machine.gpu_gib), ("main memory", "host_gib", machine.host_gib))
    for name, key, available in needs:
        if fits and (name == "main memory" or machine.gpus):
            most = max(getattr(candidate.prediction, key) for candidate in chosen)
            lines.append((name, f"{most:.1f} GiB of {_format_gib(available)}"))
    if disk:
        lines.append(("disk", f"{sum(disk.values()):.1f} GiB, and the data"))
    lines += zip(["next", *[""] * len(commands)], commands if fits else (), strict=False)
    for name, text in lines:
        console.print(f"  {name:13}{text}", markup=False, highlight=False, soft_wrap=True)


def print_plans(
    console: Console, searches: Sequence[tuple[Workload, list[Candidate]]], machine: Machine, assumptions: str
) -> None:
    """Print a row for each workload and DeepSpeed configuration: the fastest plan that fits, or the nearest one.

    `assumptions` are sentences about the machine and the rows that the plans are for.
    """
    is_narrow = console.width < NARROW_COLUMNS
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0)) if is_narrow else Table()
    layers, units = ("layers", "\n") if is_narrow else ("checkpointed layers", " ")
    sizes = f"micro{units}× acc."
    for column in ("tuning", "DeepSpeed", layers, sizes, f"GPU{units}GiB", f"host{units}GiB", "speed", "verdict"):
        no_wrap = column == "DeepSpeed" and console.width >= MIN_WIDTH_OF_NAMES
        table.add_column(column, overflow="fold", no_wrap=no_wrap)  # fold: all is legible in a narrow terminal, too
    for workload, candidates in searches:
        best = find_fastest(candidates)
        for name in dict.fromkeys(candidate.plan.deepspeed for candidate in candidates):
            config_candidates = [candidate for candidate in candidates if candidate.plan.deepspeed == name]
            candidate = find_fastest(config_candidates) or find_nearest(config_candidates, machine)
            table.add_row(*_build_row(workload, candidate, best, is_narrow))
        table.add_section()
    console.print(table)
    console.print(LEGEND, highlight=False)
    console.print(_describe_machine(machine))
    if assumptions:
        console.print(assumptions, markup=False, highlight=False)
    for workload, candidates in searches:
        _print_advice(console, workload, candidates, machine)


def print_times(
    console: Console,
    times: Sequence[StageTime],
    tunings: Sequence[str],
    machine: Machine,
    card: GpuCard,
    disk: Mapping[str, float],
) -> None:
    """Print a row for each stage of the tunings with its minutes, and the disk that the run needs."""
    source = "scaled from an H200, and near those measured on this card" if card.is_measured else "scaled from an H200"
    console.print(
        f"\n[bold]Minutes of {' and '.join(tunings)} on {machine.gpus} × {card.title}[/bold], by the chosen plans and "
        f"with rows of usual length (rates {source}):"
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("stage", "amount", "samples/s", "minutes"):
        table.add_column(column, justify="right" if column in ("samples/s", "minutes") else "left")
    for time in times:
        rate = f"{time.rate:.1f}" if time.rate else ""
        table.add_row(time.stage, time.amount, rate, f"{time.seconds / 60:.1f}")
    table.add_section()
    table.add_row("in all", "", "", f"{sum(time.seconds for time in times) / 60:.1f}")
    console.print(table)
    console.print(
        "These are minutes of one experiment with one seed. Each further experiment and seed takes about as long, "
        "and dj_synth also writes captions."
    )
    terms = " + ".join(f"{part} {size:.1f}" for part, size in disk.items())
    console.print(f"  disk {sum(disk.values()):.1f} GiB = {terms}, and the data")


def _describe_machine(machine: Machine) -> str:
    gpus = f"{machine.gpus} × {_format_gib(machine.gpu_gib)} of GPU memory" if machine.gpus else "no GPU"
    per_node = f" on each of {machine.nodes} nodes" if machine.nodes > 1 else ""
    return f"Machine: {gpus}, {_format_gib(machine.host_gib)} of host memory{per_node}"


def _build_row(workload: Workload, candidate: Candidate, best: Candidate | None, is_narrow: bool) -> list[str]:
    """Return the cells of a training plan; a narrow table has short ones."""
    plan, prediction = candidate.plan, candidate.prediction
    speed = f"{candidate.samples_per_second / best.samples_per_second:.2f}" if best and candidate.fits else ""
    verdict = "too big" if candidate.shortage else "chosen" if candidate is best else "fits"
    layers = describe_checkpointing(plan)
    return [
        workload.tuning,
        plan.deepspeed,
        layers.removesuffix(" layer") if is_narrow else layers,
        f"{plan.micro_batch} × {plan.accumulation}",
        f"{prediction.gpu_gib:.1f}" if prediction.gpu else "",
        f"{prediction.host_gib:.1f}",
        speed,
        verdict,
    ]


def _print_advice(console: Console, workload: Workload, candidates: list[Candidate], machine: Machine) -> None:
    """Print the trained parameters, the chosen plan with its reason and memory by part, or what would help."""
    best = find_fastest(candidates)
    parameters = count_parameters(workload)
    trained, total = (sum(sizes) / 1e6 for sizes in (parameters.trained_sizes, parameters.all_sizes))
    counts = f"{trained:,.1f} of {total:,.1f} million parameters trained"
    console.print(f"\n[bold]{workload.architecture.name}, {workload.tuning}[/bold]: {counts}")
    if best is None:
        console.print("Nothing fits. What would help:")
        for advice in suggest_remedies(workload, candidates, machine):
            console.print(f"  • {advice}")
        return
    console.print(explain_choice(best, candidates), markup=False, highlight=False)
    for name, parts in (("GPU", best.prediction.gpu), ("host", best.prediction.host)):
        if parts:
            terms = " + ".join(f"{part} {size:.2f}" for part, size in parts.items())
            console.print(f"  {name} {sum(parts.values()):.2f} GiB = {terms}")


def explain_choice(best: Candidate, candidates: list[Candidate]) -> str:
    """Return a sentence with the chosen plan and the reason for it."""
    chosen = f"Chosen: {describe_plan(best.plan)}"
    if best.plan.zero.adam_8bit:
        return f"{chosen}. No plan with exact optimizer states fits; this one rounds them to 8 bits."
    fastest = max((each for each in candidates if each.fits), key=lambda each: each.samples_per_second)
    gain = fastest.samples_per_second / best.samples_per_second - 1
    if not fastest.plan.zero.adam_8bit or gain < MIN_GAIN:
        return f"{chosen}, the fastest that fits."
    return (
        f"{chosen}, the fastest that fits with exact optimizer states. {fastest.plan.deepspeed} would be {gain:.0%} "
        "faster, but rounds them to 8 bits."
    )


def _format_gib(size: float | None) -> str:
    return "an unknown amount" if size is None else f"{size:.2f} GiB"
