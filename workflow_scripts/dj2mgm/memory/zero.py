"""Bytes that DeepSpeed keeps in one process besides a step's own tensors, by part.

The formulas are read from DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py,
runtime/fp16/fused_optimizer.py), for AdamW, and for the 8-bit AdamW of a configuration that names no optimizer
(training/optimizer.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dj2mgm.memory.step import Parameters

FLOAT32, FLOAT64 = 4, 8
MOMENTS = 2 * FLOAT32  # Adam's two, in float32
MOMENTS_8BIT = 2 * (1 + FLOAT32 / 256)  # Adam's two, in one byte each, with a float32 scale for every 256
ALLREDUCE_BUCKET = 500_000_000  # elements of ZeRO-0's flattened gradients that are sent at once
# Page-locked bytes per byte of the largest trained weight while PyTorch compiles the 8-bit optimizer. Autotuning runs
# its kernels on copies of the tensors that they overwrite: 4 GiB for embeddings of 1 GiB.
AUTOTUNING = 4


def page_locked_bytes(size: int) -> int:
    """Return the host bytes of a page-locked buffer, which PyTorch rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


@dataclass(frozen=True)
class ZeroConfig:
    """Keys of a completed config/deepspeed file that decide about memory; sizes in elements."""

    stage: int
    adam_8bit: bool
    offload_optimizer: bool
    offload_param: bool
    pinned: bool
    overlap: bool
    reduce_bucket: int
    sub_group: int
    persistence_threshold: int
    max_live: int

    @classmethod
    def from_deepspeed(cls, config: dict) -> "ZeroConfig":
        zero = config["zero_optimization"]
        optimizer, param = zero.get("offload_optimizer", {}), zero.get("offload_param", {})
        return cls(
            stage=zero["stage"],
            adam_8bit="optimizer" not in config,
            offload_optimizer=optimizer.get("device") == "cpu",
            offload_param=param.get("device") == "cpu",
            pinned=optimizer.get("pin_memory", False),
            overlap=zero.get("overlap_comm", False),
            reduce_bucket=zero.get("reduce_bucket_size", 500_000_000),
            sub_group=zero.get("sub_group_size", 1_000_000_000),
            persistence_threshold=zero.get("stage3_param_persistence_threshold", 100_000),
            max_live=zero.get("stage3_max_live_parameters", 1_000_000_000),
        )

    def on_host(self, size: int) -> int:
        """Return the host bytes of a buffer."""
        return page_locked_bytes(size) if self.pinned else size


@dataclass(frozen=True)
class ModelStates:
    """Bytes that one process holds from the first step on.

    Attributes:
        gpu: bytes by part on the GPU.
        host: bytes by part on the host.
        gradients: additional GPU bytes from the first complete gradient of a backward pass on.
        in_transit: additional GPU bytes for each element of the gradient that is being moved.
        at_step: additional GPU bytes during the optimizer step.
        at_start: additional GPU bytes while DeepSpeed initializes.
    """

    gpu: dict[str, int]
    host: dict[str, int]
    gradients: int = 0
    in_transit: int = 0
    at_step: int = 0
    at_start: int = 0


def compute_model_states(
    zero: ZeroConfig, parameters: Parameters, weight: int, gpus: int, accumulates: bool
) -> ModelStates:
    """Compute weights, gradients and optimizer states of one process of `gpus`; `weight` is bytes of a weight.

    `accumulates` tells whether a step has several micro batches.
    """
    own = sum(parameters.trained) // gpus
    if zero.stage == 0:
        return _zero0_states(zero, parameters, weight, gpus)
    if zero.stage < 3:
        return _zero1_or_2_states(zero, parameters, weight, gpus, own, accumulates)
    return _zero3_states(zero, parameters, weight, gpus, own)


def _zero0_states(zero: ZeroConfig, parameters: Parameters, weight: int, gpus: int) -> ModelStates:
    """Compute the states of ZeRO-0, in which every GPU holds everything."""
    trained, mixed = sum(parameters.trained), weight < FLOAT32 and not zero.adam_8bit
    gpu = {
        "weights": sum(parameters.every) * weight,
        "optimizer": int(trained * (MOMENTS_8BIT if zero.adam_8bit else MOMENTS)),
        "ZeRO buffers": min(trained, ALLREDUCE_BUCKET) * weight if gpus > 1 else 0,
    }
    if mixed:
        gpu["optimizer"] += trained * FLOAT32
    host = {"optimizer": AUTOTUNING * page_locked_bytes(max(parameters.trained) * weight)} if zero.adam_8bit else {}
    # in mixed precision, gradients are cast one by one, then flattened
    return ModelStates(
        gpu, host, gradients=trained * weight, at_step=trained * (weight + (2 * FLOAT32 if mixed else 0))
    )


def _zero1_or_2_states(
    zero: ZeroConfig, parameters: Parameters, weight: int, gpus: int, own: int, accumulates: bool
) -> ModelStates:
    """Compute the states of ZeRO-1 and ZeRO-2.

    Every GPU holds all weights. The optimizer's part of this process is on the GPU or on the host.
    """
    buckets = zero.reduce_bucket * weight * (2 if zero.overlap else 1)
    gpu = {"weights": sum(parameters.every) * weight, "ZeRO buffers": buckets}
    if not zero.offload_optimizer:
        # gradients of several micro batches are accumulated in a second buffer
        gradients = own * weight * (2 if accumulates else 1) if zero.stage == 2 else sum(parameters.trained) * weight
        gpu["optimizer"] = own * (FLOAT32 + MOMENTS)
        # gradients are flattened again, then cast
        return ModelStates(gpu, {}, gradients=gradients, at_step=gradients + own * (weight + FLOAT32))
    largest = max(parameters.trained)
    gpu["ZeRO buffers"] += largest * weight
    host = {
        "optimizer": zero.on_host(own * FLOAT32) + own * MOMENTS,
        "gradients": zero.on_host(own * FLOAT32),
        "ZeRO buffers": zero.on_host(own * weight) + zero.on_host(largest * weight),
    }
    if accumulates:  # one buffer for each parameter, whole on every process
        host["gradients"] += sum(zero.on_host(elements * weight) for elements in parameters.trained)
    # the norm of each gradient is computed in float64; the flat weights are cloned before they move to the host
    return ModelStates(gpu, host, in_transit=FLOAT64, at_start=own * weight)


def _zero3_states(zero: ZeroConfig, parameters: Parameters, weight: int, gpus: int, own: int) -> ModelStates:
    """Compute the states of ZeRO-3.

    Each process holds a partition of every weight. Only small weights, and weights in use, are whole.
    """
    small = sum(elements for elements in parameters.every if elements <= zero.persistence_threshold)
    large = sum(parameters.every) - small
    gathered = min(large, max(zero.max_live, max(parameters.every)))
    partition = large // gpus * weight
    gpu = {"weights": (small + gathered) * weight, "ZeRO buffers": zero.reduce_bucket * weight}
    host: dict[str, int] = {}
    if zero.offload_param:
        # each weight's partition, and the trained partitions again in one piece; pinned memory is never freed
        host["weights"] = sum(zero.on_host(-(-elements // gpus) * weight) for elements in parameters.every)
        host["weights"] += zero.on_host(own * weight) + zero.on_host(-(-parameters.tied // gpus) * weight)
    else:
        # with one GPU, the partition is the weight itself and is not gathered
        gpu["weights"] = small * weight + partition + (gathered * weight if gpus > 1 else 0)
    groups = list(_sub_groups([elements // gpus for elements in parameters.trained], zero.sub_group))
    if not zero.offload_optimizer:
        gpu["optimizer"] = own * (FLOAT32 + MOMENTS)
        at_step = own * weight + max(groups) * FLOAT32
        return ModelStates(gpu, host, gradients=own * weight, in_transit=weight, at_step=at_step)
    host["optimizer"] = own * (FLOAT32 + MOMENTS)
    host["gradients"] = sum(zero.on_host(elements * FLOAT32) for elements in groups)
    host["ZeRO buffers"] = zero.on_host(own * weight)
    # reducing a gradient flattens it into a new tensor
    return ModelStates(gpu, host, in_transit=weight)


def _sub_groups(partitions: Iterable[int], limit: int) -> Iterable[int]:
    """Yield the elements of the groups that ZeRO-3 updates one after another; a group ends at the limit."""
    elements = 0
    for partition in partitions:
        elements += partition
        if elements >= limit:
            yield elements
            elements = 0
    if elements:
        yield elements
