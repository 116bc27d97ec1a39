"""About how fast an arrangement trains, to rank those that fit; not a forecast for any one machine.

The constants are fitted to runs of the MGM-2B shape on one H200 (docs/memory.md). Other machines are slower, by factors
that arrangements mostly share.
"""

from planning.prediction import Arrangement
from planning.step import Workload, count_parameters, moments

FLOPS = 3.8e14  # a second, of a busy GPU
LAUNCHES = 0.12  # seconds a micro batch in which the GPU waits for its next kernel
GATHERED = (
    1.2e10  # bytes a second of weights that ZeRO-3 fetches from the host, in the forward and in the backward pass
)
UPDATED = 6.4e9  # elements a second whose gradient goes to the host, is applied there, and comes back


def samples_per_second(workload: Workload, arrangement: Arrangement, gpus: int) -> float:
    parameters, zero = count_parameters(workload), arrangement.zero
    flops = moments(workload, arrangement.recomputation, arrangement.micro_batch).flops
    micro_batch = LAUNCHES + flops / FLOPS
    if zero.offload_param:
        fetched = sum(elements for elements in parameters.every if elements > zero.persistence_threshold)
        micro_batch += 2 * fetched * workload.precision.itemsize / GATHERED
    update = sum(parameters.trained) / gpus / UPDATED if zero.offload_optimizer else 0
    samples = arrangement.micro_batch * arrangement.accumulation * gpus
    return samples / (arrangement.accumulation * micro_batch + update)
