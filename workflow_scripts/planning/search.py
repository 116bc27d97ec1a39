"""Every arrangement of a workload on a machine: which fit, the fastest of them, and what would help when none does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from errors import InputError
from planning.prediction import HOST_MARGIN, Arrangement, Machine, Prediction, predict
from planning.speed import samples_per_second
from planning.step import Workload
from planning.zero import Zero

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
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
    recomputations: Sequence[int] = (0, 1),
) -> list[Candidate]:
    """
    Args:
        configs: completed DeepSpeed configurations by name; one that fixes its batch sizes is taken with those.
        global_batch_size: None: ACCUMULATION micro batches on every GPU.
        micro_batches: in rising order; left out are those that do not divide the global batch, and those larger than
            one that does not fit.
        recomputations: of every n-th layer; 0: none.

    Raises:
        InputError: none divides it.
    """
    found = []
    for name, config in configs.items():
        for recomputation in recomputations:
            for micro_batch, accumulation in _batches(config, machine, global_batch_size, micro_batches):
                arrangement = Arrangement(name, Zero.of(config), recomputation, micro_batch, accumulation)
                found.append(judge(workload, arrangement, machine))
                if not found[-1].fits:
                    break
    if not found:
        raise InputError(
            f"a global batch of {global_batch_size} on {machine.processes} GPUs cannot be made of micro batches of "
            f"{', '.join(map(str, micro_batches))}; choose a multiple of {micro_batches[0] * machine.processes}"
        )
    return found


def _batches(
    config: dict, machine: Machine, global_batch_size: int | None, micro_batches: Sequence[int]
) -> list[tuple[int, int]]:
    """Micro batches with their accumulation."""
    fixed = config.get("train_micro_batch_size_per_gpu", "auto"), config.get("gradient_accumulation_steps", "auto")
    if "auto" not in fixed:
        return [fixed]
    if global_batch_size is None:
        return [(micro_batch, ACCUMULATION) for micro_batch in micro_batches]
    units = {micro_batch: micro_batch * machine.processes for micro_batch in micro_batches}
    return [(micro, global_batch_size // unit) for micro, unit in units.items() if global_batch_size % unit == 0]


def judge(workload: Workload, arrangement: Arrangement, machine: Machine) -> Candidate:
    prediction = predict(workload, arrangement, machine)
    speed = samples_per_second(workload, arrangement, machine.processes)
    return Candidate(arrangement, prediction, speed, prediction.shortage(machine))


def fastest(found: Sequence[Candidate]) -> Candidate | None:
    """The fastest that fits; of equals one with float32 states, then the one that needs less of the GPU."""

    def rank(candidate: Candidate) -> tuple[float, bool, float]:
        precise = not candidate.arrangement.zero.adam_8bit
        return candidate.samples_per_second, precise, -candidate.prediction.gpu_gib

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
    return {0: "no layer", 1: "every layer"}.get(every, f"every {every}th layer")
