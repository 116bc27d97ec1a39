"""Search for the fastest training plan of a workload that fits a machine, its speed, and remedies if none fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dj2mgm.errors import InputError, pluralize
from dj2mgm.planning.prediction import HOST_MARGIN, Machine, Prediction, TrainingPlan, ZeroConfig, predict
from dj2mgm.planning.step import Workload, count_parameters, trace_memory
from dj2mgm.settings.training_stages import AUTO, count_micro_batches, find_fixed_sizes

# The constants are fitted to runs of the MGM-2B shape on one H200 (docs/measurements/training.md). Plans are ranked by
# their speed on it, because other cards are slower by factors that are about the same for all plans.

# By whether layers are compiled: FLOP/s of a busy GPU, and seconds of a micro batch in which the GPU waits for kernels.
FLOPS_PER_S = {False: 3.8e14, True: 5.2e14}
LAUNCH_SECONDS = {False: 0.12, True: 0.02}
GATHERED_BYTES_PER_S = 1.2e10  # weights that ZeRO-3 fetches from the host, in the forward and in the backward pass
REDUCTION_SECONDS = 0.008  # GPUs wait for each other this long at every micro batch, from ZeRO-2 on
# ZeRO-2 with an offloaded optimizer moves the gradients of a GPU's part of the trained weights, one after another, at
# every micro batch: 30 ms for the 124 weights that LoRA trains on one H100.
MOVED_GRADIENT_SECONDS = 0.00024
UPDATED_ELEMENTS_PER_S = 6.4e9  # the gradient moves to the host, updates the weight there, and the weight moves back


def estimate_speed(
    workload: Workload,
    plan: TrainingPlan,
    gpus: int,
    samples: int | None = None,
    flops: float | None = None,
    slowdown: float = 1.0,
) -> float:
    """Return samples per second over all GPUs.

    Args:
        samples: samples of a step (the last micro batch may be smaller); None: all micro batches are full.
        flops: floating point operations of a micro batch; None: they are traced.
        slowdown: time of another GPU's computation, as a multiple of the H200's.
    """
    parameters, zero = count_parameters(workload), plan.zero
    if flops is None:
        flops = trace_memory(workload, plan.checkpointing_interval, plan.micro_batch).flops
    if samples is None:
        samples = plan.micro_batch * plan.accumulation * gpus
    seconds = LAUNCH_SECONDS[workload.fused]
    if gpus > 1 and zero.stage > 1:
        seconds += REDUCTION_SECONDS
    if zero.offload_optimizer and zero.stage == 2:
        seconds += MOVED_GRADIENT_SECONDS * len(parameters.trained_sizes) / gpus
    if zero.offload_param:
        fetched_elements = sum(elements for elements in parameters.all_sizes if elements > zero.persistence_threshold)
        seconds += 2 * fetched_elements * workload.precision.itemsize / GATHERED_BYTES_PER_S
    computation_seconds = slowdown * flops * samples / (plan.micro_batch * gpus) / FLOPS_PER_S[workload.fused]
    update_seconds = sum(parameters.trained_sizes) / gpus / UPDATED_ELEMENTS_PER_S if zero.offload_optimizer else 0
    return samples / (plan.accumulation * seconds + computation_seconds + update_seconds)


MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # sizes in between are also tried if they can be the fastest
CHECKPOINTING_INTERVALS = (0, 16, 8, 5, 3, 2, 1)  # checkpoint every n-th layer, fewest layers first; 0: none
DEFAULT_ACCUMULATION_STEPS = 16  # micro batches of a step if no global batch size is given


@dataclass(frozen=True)
class Candidate:
    """A training plan with its predicted memory and speed."""

    plan: TrainingPlan
    prediction: Prediction
    samples_per_second: float
    shortage: str | None  # None: it fits

    @property
    def fits(self) -> bool:
        return self.shortage is None


def list_candidates(
    workload: Workload,
    machine: Machine,
    configs: Mapping[str, dict],
    global_batch_size: int | None,
    micro_batches: Sequence[int] | None = None,
    intervals: Sequence[int] = CHECKPOINTING_INTERVALS,
) -> list[Candidate]:
    """Return the candidate plans of each configuration. Plans that cannot be the fastest are not evaluated.

    Args:
        configs: completed DeepSpeed configurations by name. A configuration that fixes its batch sizes keeps them.
        global_batch_size: samples of a step; None: `DEFAULT_ACCUMULATION_STEPS` micro batches on every GPU.
        micro_batches: sizes in rising order; None: MICRO_BATCHES and sizes between them. The last micro batch of a
            step may have fewer samples. Sizes above the number of a step's samples on each GPU are left out.
        intervals: checkpointing intervals, the least work first; 0: none.
    """
    candidates = []
    for name, config in configs.items():
        batches = _list_batches(config, machine, global_batch_size, micro_batches)
        zero = ZeroConfig.from_deepspeed(config)
        candidates += _ascend(workload, machine, name, zero, batches, intervals, global_batch_size)
    if micro_batches is None and global_batch_size:
        flexible_names = [name for name, config in configs.items() if _leaves_batches(config)]
        candidates += _list_intermediates(workload, machine, candidates, flexible_names, global_batch_size)
    if not candidates:
        sizes = micro_batches or MICRO_BATCHES
        raise InputError(
            f"a global batch of {global_batch_size} on {pluralize(machine.processes, 'GPU')} cannot be made of micro "
            f"batches of {', '.join(map(str, sizes))}; choose a multiple of {sizes[0] * machine.processes}"
        )
    return candidates


def _ascend(
    workload: Workload,
    machine: Machine,
    name: str,
    zero: ZeroConfig,
    batches: list[tuple[int, int]],
    intervals: Sequence[int],
    global_batch_size: int | None,
) -> list[Candidate]:
    """Raise the micro batch, and checkpoint more layers whenever the next micro batch does not fit.

    Smaller micro batches with more checkpointing are slower than a plan that fits, so they are not evaluated.
    """
    candidates, index = [], 0
    for checkpointing_interval in intervals:
        while index < len(batches):
            plan = TrainingPlan(name, zero, checkpointing_interval, *batches[index])
            candidates.append(rate_plan(workload, plan, machine, global_batch_size))
            if not candidates[-1].fits:
                break
            index += 1
    return candidates


def _list_intermediates(
    workload: Workload,
    machine: Machine,
    candidates: Sequence[Candidate],
    flexible_names: Sequence[str],
    global_batch_size: int,
) -> list[Candidate]:
    """Return plans between a micro batch size that fits and one that does not, if they can be the fastest.

    `flexible_names` are the names of the configurations that leave batch sizes to the plan.
    """
    best, intermediates = find_fastest(candidates), []
    for candidate in candidates if best else ():
        plan, size = candidate.plan, candidate.plan.micro_batch
        if candidate.fits or plan.deepspeed not in flexible_names or plan.zero.adam_8bit != best.plan.zero.adam_8bit:
            continue
        flops = trace_memory(workload, plan.checkpointing_interval, size).flops / size
        for micro_batch in range(size - max(1, size // 8), size // 2, -max(1, size // 8)):
            accumulation = count_micro_batches(global_batch_size, micro_batch, machine.processes)
            plan = replace(plan, micro_batch=micro_batch, accumulation=accumulation)
            speed = estimate_speed(workload, plan, machine.processes, global_batch_size, flops * micro_batch)
            if speed < 0.99 * best.samples_per_second:
                break  # smaller ones are slower still; equal speeds differ by rounding
            intermediates.append(rate_plan(workload, plan, machine, global_batch_size))
            if intermediates[-1].fits:
                best = find_fastest([best, intermediates[-1]])
                break
    return intermediates


def _leaves_batches(config: dict) -> bool:
    """Return whether a configuration leaves all batch sizes to the plan."""
    return not find_fixed_sizes(config)


def _list_batches(
    config: dict, machine: Machine, global_batch_size: int | None, micro_batches: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Return possible pairs of micro batch size and accumulation steps."""
    micro_batch, accumulation = (
        config.get(key, "auto") for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    sizes = (micro_batches or MICRO_BATCHES) if micro_batch == "auto" else [micro_batch]
    if global_batch_size is None:
        return [(size, DEFAULT_ACCUMULATION_STEPS if accumulation == "auto" else accumulation) for size in sizes]
    samples = global_batch_size / machine.processes  # of a step, on each process
    # DeepSpeed refuses a fixed `train_batch_size` that is not the product of the other sizes
    uneven = micro_batch == "auto" and config.get("train_batch_size", AUTO) == AUTO
    if micro_batch == "auto" and micro_batches is None and samples.is_integer() and samples <= MICRO_BATCHES[-1]:
        sizes = sorted({*MICRO_BATCHES, int(samples)})  # a step in one micro batch
    possible = [size for size in sizes if samples % size == 0 or (uneven and size < samples)]
    batches = [(size, count_micro_batches(global_batch_size, size, machine.processes)) for size in possible]
    return [batch for batch in batches if accumulation in ("auto", batch[1])]


def rate_plan(
    workload: Workload, plan: TrainingPlan, machine: Machine, global_batch_size: int | None = None
) -> Candidate:
    prediction = predict(workload, plan, machine)
    speed = estimate_speed(workload, plan, machine.processes, global_batch_size)
    return Candidate(plan, prediction, speed, prediction.describe_shortage(machine))


def find_fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest plan that fits with float32 optimizer states, else the fastest with 8-bit states.

    Among equally fast plans, ZeRO-2 comes first, because it was the fastest in measurements, then the plan that needs
    less GPU memory.
    """

    def rank(candidate: Candidate) -> tuple[bool, float, bool, float]:
        zero = candidate.plan.zero
        return not zero.adam_8bit, candidate.samples_per_second, zero.stage == 2, -candidate.prediction.gpu_gib

    return max((candidate for candidate in candidates if candidate.fits), key=rank, default=None)


def find_nearest(candidates: Sequence[Candidate], machine: Machine) -> Candidate:
    """Return the plan that lacks the least memory, if none fits."""

    def compute_shortage(candidate: Candidate) -> float:
        needs = ((candidate.prediction.gpu_gib, machine.gpu_gib), (candidate.prediction.host_gib, machine.host_gib))
        return sum(max(0.0, needed - available) for needed, available in needs if available is not None)

    return min(candidates, key=compute_shortage)


def suggest_remedies(workload: Workload, candidates: Sequence[Candidate], machine: Machine) -> list[str]:
    """Return changes that would help if no plan fits, with the least memory of GPU and host that would be enough."""
    advice = []
    if workload.tuning == "full":
        advice.append("train LoRA instead of the whole language model")
    if nf4 := _find_nf4_plan(workload, candidates, machine):
        advice.append(f"precision: nf4, which holds frozen layers in 4 bits, fits by {describe_plan(nf4.plan)}")
    needs = [
        ("the GPU", machine.gpu_gib, lambda candidate: candidate.prediction.gpu_gib),
        ("the host", machine.host_gib, lambda candidate: candidate.prediction.host_gib * (1 + HOST_MARGIN)),
    ]
    for (name, limit, need), (_, other_limit, other_need) in (needs, reversed(needs)):
        sufficient = [
            candidate for candidate in candidates if other_limit is None or other_need(candidate) <= other_limit
        ]
        if limit is not None and sufficient:
            smallest = min(sufficient, key=need)
            plan = describe_plan(smallest.plan)
            advice.append(f"{need(smallest):.1f} GiB of {name}'s memory instead of {limit:.1f}, for {plan}")
    hardware = f"more GPUs than {machine.gpus}" if machine.gpus else "a GPU"
    advice.append(f"shorter sequences than {workload.sequence_length} tokens, or {hardware}")
    return advice


def _find_nf4_plan(workload: Workload, candidates: Sequence[Candidate], machine: Machine) -> Candidate | None:
    """Return a plan that would fit with frozen layers in 4 bits, or None.

    ZeRO-3 is left out, because quantized weights cannot be partitioned. Of each DeepSpeed configuration, the plan that
    needs the least GPU memory is tried.
    """
    if workload.tuning != "lora" or workload.nf4:
        return None
    smallest: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.prediction.gpu_gib):
        if candidate.plan.zero.stage < 3:
            smallest.setdefault(candidate.plan.deepspeed, candidate)
    quantized = replace(workload, nf4=True)
    return find_fastest([rate_plan(quantized, candidate.plan, machine) for candidate in smallest.values()])


def describe_plan(plan: TrainingPlan) -> str:
    layers = describe_checkpointing(plan)
    checkpointing = f"activation checkpointing of {layers}" if layers != "none" else "no activation checkpointing"
    return f"{plan.deepspeed}, micro batch {plan.micro_batch}, {checkpointing}"


def describe_checkpointing(plan: TrainingPlan) -> str:
    """Name the layers whose activations are checkpointed."""
    interval = plan.checkpointing_interval
    return {0: "none", 1: "every layer", 2: "every second layer", 3: "every third layer"}.get(
        interval, f"every {interval}th layer"
    )
