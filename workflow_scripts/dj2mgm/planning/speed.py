"""Model of a training's speed, in samples per second, from its FLOPs and its transfers."""

from dj2mgm.planning.prediction import TrainingPlan
from dj2mgm.planning.step import Workload, count_parameters, trace_memory

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
