"""Every arrangement of a workload on a machine: which fit, the fastest of them, and what would make another fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from dj2mgm.errors import InputError
from dj2mgm.memory.prediction import HOST_MARGIN, Arrangement, Machine, Prediction, predict
from dj2mgm.memory.step import Workload, count_parameters, trace_memory
from dj2mgm.memory.zero import Zero

# About how fast an arrangement trains, to rank those that fit; not a forecast for any one machine.
#
# The constants are fitted to runs of the MGM-2B shape on one H200 (docs/measurements/training.md). Other machines are
# slower, by factors that arrangements mostly share.

# With layers as they are and compiled: of a busy GPU; of a micro batch, in which the GPU waits for its next kernel
FLOPS_PER_S = {False: 3.8e14, True: 5.2e14}
LAUNCH_SECONDS = {False: 0.12, True: 0.02}
GATHERED_BYTES_PER_S = 1.2e10  # of weights that ZeRO-3 fetches from the host, in the forward and in the backward pass
UPDATED_ELEMENTS_PER_S = 6.4e9  # whose gradient goes to the host, is applied there, and comes back


def samples_per_second(workload: Workload, arrangement: Arrangement, gpus: int) -> float:
    parameters, zero = count_parameters(workload), arrangement.zero
    flops = trace_memory(workload, arrangement.recomputation, arrangement.micro_batch).flops
    seconds = LAUNCH_SECONDS[workload.fused] + flops / FLOPS_PER_S[workload.fused]
    if zero.offload_param:
        fetched = sum(elements for elements in parameters.every if elements > zero.persistence_threshold)
        seconds += 2 * fetched * workload.precision.itemsize / GATHERED_BYTES_PER_S
    update = sum(parameters.trained) / gpus / UPDATED_ELEMENTS_PER_S if zero.offload_optimizer else 0
    samples = arrangement.micro_batch * arrangement.accumulation * gpus
    return samples / (arrangement.accumulation * seconds + update)


# Every arrangement of a workload on a machine: which fit, the fastest of them, and what would help when none does.

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTATIONS = (0, 16, 8, 5, 3, 2, 1)  # of every n-th layer, the least first; 0: none
ACCUMULATION = 16  # where no global batch is asked for


@dataclass(frozen=True)
class Candidate:
    arrangement: Arrangement
    prediction: Prediction
    samples_per_second: float
    shortage: str | None  # None: it fits

    @property
    def fits(self) -> bool:
        return self.shortage is None


def candidates(
    workload: Workload,
    machine: Machine,
    configs: Mapping[str, dict],
    global_batch_size: int | None,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    recomputations: Sequence[int] = RECOMPUTATIONS,
) -> list[Candidate]:
    """Those that can be the fastest under each configuration, or lack least.

    Args:
        configs: completed DeepSpeed configurations by name; one that fixes its batch sizes is taken with those.
        global_batch_size: None: ACCUMULATION micro batches on every GPU.
        micro_batches: in rising order; left out are those that do not divide the global batch.
        recomputations: of every n-th layer, the least work first; 0: none.

    Raises:
        InputError: none divides the global batch.
    """
    found = []
    for name, config in configs.items():
        batches = _batches(config, machine, global_batch_size, micro_batches)
        found += _ascend(workload, machine, name, Zero.of(config), batches, recomputations)
    if not found:
        raise InputError(
            f"a global batch of {global_batch_size} on {machine.processes} GPUs cannot be made of micro batches of "
            f"{', '.join(map(str, micro_batches))}; choose a multiple of {micro_batches[0] * machine.processes}"
        )
    return found


def _ascend(
    workload: Workload,
    machine: Machine,
    name: str,
    zero: Zero,
    batches: list[tuple[int, int]],
    recomputations: Sequence[int],
) -> list[Candidate]:
    """Ever larger micro batches, and more recomputation where one does not fit any more.

    Smaller micro batches with more recomputation are slower than what fits already, so they are not looked at.
    """
    found, index = [], 0
    for recomputation in recomputations:
        while index < len(batches):
            arrangement = Arrangement(name, zero, recomputation, *batches[index])
            found.append(judge(workload, arrangement, machine))
            if not found[-1].fits:
                break
            index += 1
    return found


def _batches(
    config: dict, machine: Machine, global_batch_size: int | None, micro_batches: Sequence[int]
) -> list[tuple[int, int]]:
    """Micro batches with their accumulation."""
    micro, accumulation = (
        config.get(key, "auto") for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    micro_batches = micro_batches if micro == "auto" else [micro]
    if global_batch_size is None:
        return [(size, ACCUMULATION if accumulation == "auto" else accumulation) for size in micro_batches]
    units = {size: size * machine.processes for size in micro_batches}
    batches = [(size, global_batch_size // unit) for size, unit in units.items() if global_batch_size % unit == 0]
    return [batch for batch in batches if accumulation in ("auto", batch[1])]


def judge(workload: Workload, arrangement: Arrangement, machine: Machine) -> Candidate:
    prediction = predict(workload, arrangement, machine)
    speed = samples_per_second(workload, arrangement, machine.processes)
    return Candidate(arrangement, prediction, speed, prediction.shortage(machine))


def fastest(found: Sequence[Candidate]) -> Candidate | None:
    """The fastest that fits with float32 states, else with 8-bit ones.

    Of equals it is ZeRO-2, which is measured most, then the one that needs less of the GPU.
    """

    def rank(candidate: Candidate) -> tuple[bool, float, bool, float]:
        zero = candidate.arrangement.zero
        return not zero.adam_8bit, candidate.samples_per_second, zero.stage == 2, -candidate.prediction.gpu_gib

    return max((candidate for candidate in found if candidate.fits), key=rank, default=None)


def nearest(found: Sequence[Candidate], machine: Machine) -> Candidate:
    """That which lacks least, when none fits."""

    def lacking(candidate: Candidate) -> float:
        needs = ((candidate.prediction.gpu_gib, machine.gpu_gib), (candidate.prediction.host_gib, machine.host_gib))
        return sum(max(0.0, needed - there) for needed, there in needs if there is not None)

    return min(found, key=lacking)


def remedies(workload: Workload, found: Sequence[Candidate], machine: Machine) -> list[str]:
    """What to change when nothing fits; the least memory of each kind that would do, with what it would do for."""
    advice = []
    if workload.tuning == "full":
        advice.append("train LoRA instead of the whole language model")
    needs = [
        ("the GPU", machine.gpu_gib, lambda candidate: candidate.prediction.gpu_gib),
        ("the host", machine.host_gib, lambda candidate: candidate.prediction.host_gib * (1 + HOST_MARGIN)),
    ]
    for (name, limit, need), (_, other_limit, other_need) in (needs, reversed(needs)):
        possible = [candidate for candidate in found if other_limit is None or other_need(candidate) <= other_limit]
        if limit is not None and possible:
            least = min(possible, key=need)
            advice.append(f"{need(least):.1f} GiB of {name}'s memory would do, with {describe(least.arrangement)}")
    more = f"more GPUs than {machine.gpus}" if machine.gpus else "a GPU"
    advice.append(f"shorter sequences than {workload.sequence} tokens, or {more}")
    return advice


def describe(arrangement: Arrangement) -> str:
    return f"{arrangement.deepspeed}, micro batch {arrangement.micro_batch}, {recomputed(arrangement)} recomputed"


def recomputed(arrangement: Arrangement) -> str:
    """Which layers are."""
    every = arrangement.recomputation
    return {0: "no layer", 1: "every layer", 2: "every second layer", 3: "every third layer"}.get(
        every, f"every {every}th layer"
    )


# The plan as a person reads it in a terminal.


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
