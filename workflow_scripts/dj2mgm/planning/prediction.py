"""Predicted peak memory of a training stage on GPU and host, by part, and the memory of this machine.

The formulas for DeepSpeed's model states are read from DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py,
runtime/zero/stage3.py, runtime/fp16/fused_optimizer.py), for AdamW, and for the 8-bit AdamW of a configuration that
names no optimizer (training/arguments.py).
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import psutil
import torch

from dj2mgm.monitoring.memory_files import GIB, read_cgroup_memory
from dj2mgm.planning.step import Parameters, Workload, count_parameters, trace_memory
from dj2mgm.settings.training_stages import NF4_BYTES

FLOAT32, FLOAT64 = 4, 8
ADAM_MOMENT_BYTES = 2 * FLOAT32  # bytes of Adam's two moments in float32
MOMENTS_8BIT = 2 * (1 + FLOAT32 / 256)  # one byte for each moment, and a float32 scale for every 256
ALLREDUCE_BUCKET = 500_000_000  # elements of gradients that ZeRO-0 flattens and sends at once
# Page-locked bytes per byte of the largest trained weight while PyTorch compiles the 8-bit optimizer. Autotuning runs
# its kernels on copies of the tensors that they overwrite: 4 GiB for embeddings of 1 GiB.
AUTOTUNING = 4


def compute_page_locked_bytes(size: int) -> int:
    """Return the host bytes of a page-locked buffer, which PyTorch rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


@dataclass(frozen=True)
class ZeroConfig:
    """Keys of a completed config/deepspeed file that affect memory; sizes in elements."""

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

    def count_host_bytes(self, size: int) -> int:
        """Return the host bytes of a buffer."""
        return compute_page_locked_bytes(size) if self.pinned else size


@dataclass(frozen=True)
class ModelStates:
    """Bytes that one process holds from the first step on."""

    gpu: dict[str, int]  # bytes by part on the GPU
    host: dict[str, int]  # bytes by part on the host
    gradients: int = 0  # GPU bytes that are added as soon as the first gradient of a backward pass is complete
    in_transit: int = 0  # additional GPU bytes for each element of the gradient that is being moved
    at_step: int = 0  # additional GPU bytes during the optimizer step
    at_start: int = 0  # additional GPU bytes while DeepSpeed initializes


def compute_model_states(
    zero: ZeroConfig, parameters: Parameters, weight: int, gpus: int, accumulates: bool
) -> ModelStates:
    """Compute weights, gradients and optimizer states of one process of `gpus`; `weight` is bytes of a weight.

    `accumulates` tells whether a step has several micro batches.
    """
    own_elements = sum(parameters.trained_sizes) // gpus
    if zero.stage == 0:
        return _compute_zero0_states(zero, parameters, weight, gpus)
    if zero.stage < 3:
        return _compute_zero1_or_2_states(zero, parameters, weight, gpus, own_elements, accumulates)
    return _compute_zero3_states(zero, parameters, weight, gpus, own_elements)


def _compute_zero0_states(zero: ZeroConfig, parameters: Parameters, weight: int, gpus: int) -> ModelStates:
    """Compute the states of ZeRO-0, in which every GPU holds everything."""
    trained_elements, mixed = sum(parameters.trained_sizes), weight < FLOAT32 and not zero.adam_8bit
    gpu = {
        "weights": sum(parameters.all_sizes) * weight,
        "optimizer": int(trained_elements * (MOMENTS_8BIT if zero.adam_8bit else ADAM_MOMENT_BYTES)),
        "ZeRO buffers": min(trained_elements, ALLREDUCE_BUCKET) * weight if gpus > 1 else 0,
    }
    if mixed:
        gpu["optimizer"] += trained_elements * FLOAT32
    host = (
        {"optimizer": AUTOTUNING * compute_page_locked_bytes(max(parameters.trained_sizes) * weight)}
        if zero.adam_8bit
        else {}
    )
    # in mixed precision, gradients are cast one by one, then flattened
    return ModelStates(
        gpu,
        host,
        gradients=trained_elements * weight,
        at_step=trained_elements * (weight + (2 * FLOAT32 if mixed else 0)),
    )


def _compute_zero1_or_2_states(
    zero: ZeroConfig, parameters: Parameters, weight: int, gpus: int, own_elements: int, accumulates: bool
) -> ModelStates:
    """Compute the states of ZeRO-1 and ZeRO-2.

    Every GPU holds all weights. The optimizer's part of this process is on the GPU or on the host.
    """
    buckets = zero.reduce_bucket * weight * (2 if zero.overlap else 1)
    gpu = {"weights": sum(parameters.all_sizes) * weight, "ZeRO buffers": buckets}
    if not zero.offload_optimizer:
        # gradients of several micro batches are accumulated in a second buffer
        gradients = (
            own_elements * weight * (2 if accumulates else 1)
            if zero.stage == 2
            else sum(parameters.trained_sizes) * weight
        )
        gpu["optimizer"] = own_elements * (FLOAT32 + ADAM_MOMENT_BYTES)
        # gradients are flattened again, then cast
        return ModelStates(gpu, {}, gradients=gradients, at_step=gradients + own_elements * (weight + FLOAT32))
    largest = max(parameters.trained_sizes)
    gpu["ZeRO buffers"] += largest * weight
    host = {
        "optimizer": zero.count_host_bytes(own_elements * FLOAT32) + own_elements * ADAM_MOMENT_BYTES,
        "gradients": zero.count_host_bytes(own_elements * FLOAT32),
        "ZeRO buffers": zero.count_host_bytes(own_elements * weight) + zero.count_host_bytes(largest * weight),
    }
    if accumulates:  # one buffer for each parameter, whole on every process
        host["gradients"] += sum(zero.count_host_bytes(elements * weight) for elements in parameters.trained_sizes)
    # the norm of each gradient is computed in float64; the flat weights are cloned before they move to the host
    return ModelStates(gpu, host, in_transit=FLOAT64, at_start=own_elements * weight)


def _compute_zero3_states(
    zero: ZeroConfig, parameters: Parameters, weight: int, gpus: int, own_elements: int
) -> ModelStates:
    """Compute the states of ZeRO-3.

    Each process holds a partition of every weight. Only small weights, and weights in use, are whole.
    """
    small_elements = sum(elements for elements in parameters.all_sizes if elements <= zero.persistence_threshold)
    large_elements = sum(parameters.all_sizes) - small_elements
    gathered_elements = min(large_elements, max(zero.max_live, max(parameters.all_sizes)))
    partition = large_elements // gpus * weight
    gpu = {"weights": (small_elements + gathered_elements) * weight, "ZeRO buffers": zero.reduce_bucket * weight}
    host: dict[str, int] = {}
    if zero.offload_param:
        # each weight's partition, and the trained partitions again in one piece; pinned memory is never freed
        host["weights"] = sum(zero.count_host_bytes(-(-elements // gpus) * weight) for elements in parameters.all_sizes)
        host["weights"] += zero.count_host_bytes(own_elements * weight) + zero.count_host_bytes(
            -(-parameters.tied // gpus) * weight
        )
    else:
        # with one GPU, the partition is the weight itself and is not gathered
        gpu["weights"] = small_elements * weight + partition + (gathered_elements * weight if gpus > 1 else 0)
    groups = list(_split_sub_groups([elements // gpus for elements in parameters.trained_sizes], zero.sub_group))
    if not zero.offload_optimizer:
        gpu["optimizer"] = own_elements * (FLOAT32 + ADAM_MOMENT_BYTES)
        at_step = own_elements * weight + max(groups) * FLOAT32
        return ModelStates(gpu, host, gradients=own_elements * weight, in_transit=weight, at_step=at_step)
    host["optimizer"] = own_elements * (FLOAT32 + ADAM_MOMENT_BYTES)
    host["gradients"] = sum(zero.count_host_bytes(elements * FLOAT32) for elements in groups)
    host["ZeRO buffers"] = zero.count_host_bytes(own_elements * weight)
    # reducing a gradient flattens it into a new tensor
    return ModelStates(gpu, host, in_transit=weight)


def _split_sub_groups(partitions: Iterable[int], limit: int) -> Iterable[int]:
    """Yield the elements of the groups that ZeRO-3 updates one after another; a group ends at the limit."""
    elements = 0
    for partition in partitions:
        elements += partition
        if elements >= limit:
            yield elements
            elements = 0
    if elements:
        yield elements


# GPU memory outside PyTorch's allocations: the CUDA context of a process that uses a GPU, and NCCL's buffers and loaded
# kernels, which training adds. Both are measured on an H100.
CUDA_CONTEXT = int(0.65 * GIB)
NCCL_AND_KERNELS = int(0.6 * GIB)
OUTSIDE_ALLOCATIONS = ("CUDA context", "NCCL and kernels", "fragmentation")
# Share of the traced memory, and its least bytes. PyTorch reserved 0.9 to 1.4 % more than the trace of the largest
# micro batch in four runs of MGM-2B's shape with 17 to 21 GiB. In an earlier run with 8 GiB, it allocated 0.44 GiB more
# (docs/measurements/memory.md).
FRAGMENTATION, MIN_FRAGMENTATION = 0.03, int(0.45 * GIB)
# Share of the needed host memory that must stay free for other programs of the machine.
HOST_MARGIN = 0.05
# Resident memory of a training process: libraries, list of conversations and, on a GPU, CUDA. Pages of mapped files
# (libraries, weights) do not count, because the kernel drops them when it needs memory.
PROCESS_ON_GPU = int(1.8 * GIB)  # one H200, LoRA without offload
PROCESS_ON_CPU = int(0.57 * GIB)  # the smallest model that the tests train
# Host memory of torch.compile: 0.2 and 0.9 GiB in two runs.
COMPILER_BYTES = int(0.5 * GIB)
# Copies of a step's images on the host: in use, decoded ahead for the next step, and in transit between the two. Each
# loader process holds at least one micro batch.
STEPS_OF_IMAGES = 3
# Copies that CPU kernels work on and memory that the allocator keeps, as a share of everything else. Fitted, together
# with the process, to both training stages of the embedded default (docs/memory.md).
CPU_COPIES = 0.8
# Bytes per weight while a frozen 4-bit layer is dequantized on a CPU: codes, indices and two copies. On a GPU this is
# compiled, and takes the dequantized weight only.
DEQUANTIZED_ON_CPU = 1 + 4 + 4 + 4


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of a training that decide its memory: DeepSpeed configuration, batch sizes, activation checkpointing."""

    deepspeed: str
    zero: ZeroConfig
    checkpointing_interval: int  # checkpoint activations of every n-th layer; 0: none
    micro_batch: int
    accumulation: int


@dataclass(frozen=True)
class Machine:
    """Number of GPUs on all nodes, and free memory: GiB of each GPU, and GiB of each node's host for all processes.

    None stands for memory that cannot be read. With 0 GPUs everything is on the host.
    """

    gpus: int
    gpu_gib: float | None
    host_gib: float | None
    nodes: int = 1

    @property
    def processes(self) -> int:
        return max(1, self.gpus)

    @property
    def processes_on_a_node(self) -> int:
        return self.processes // self.nodes


@dataclass(frozen=True)
class Prediction:
    """GiB by part at the peak, on one GPU and on one host with all of its processes."""

    gpu: dict[str, float]
    host: dict[str, float]

    @property
    def gpu_gib(self) -> float:
        return sum(self.gpu.values())

    @property
    def host_gib(self) -> float:
        return sum(self.host.values())

    @property
    def allocated_gib(self) -> float:
        """Predicted value of torch.cuda.max_memory_allocated()."""
        return sum(size for part, size in self.gpu.items() if part not in OUTSIDE_ALLOCATIONS)

    def describe_shortage(self, machine: Machine) -> str | None:
        """Describe why the plan does not fit, with numbers; None if it fits, as far as is known."""
        shortages = []
        for name, needed, margin, available in (
            ("GPU", self.gpu_gib, 0, machine.gpu_gib),
            ("host", self.host_gib, HOST_MARGIN, machine.host_gib),
        ):
            if available is not None and needed * (1 + margin) > available:
                spare = f" and {margin:.0%} to spare" if needed <= available else ""
                shortages.append(
                    f"{needed:.1f} GiB of {name} memory{spare} are needed, {available:.1f} GiB are available"
                )
        return "; ".join(shortages) or None


def predict(workload: Workload, plan: TrainingPlan, machine: Machine) -> Prediction:
    """Predict peak memory.

    On the GPU it is the peak over the backward pass, the optimizer step and DeepSpeed's initialization. On the host it
    is the peak while weights are saved, because trained weights are then copied.
    """
    parameters, weight = count_parameters(workload), workload.precision.itemsize
    states = compute_model_states(plan.zero, parameters, weight, machine.processes, plan.accumulation > 1)
    if parameters.in_4_bits:
        saved_bytes = int(sum(parameters.in_4_bits) * (weight - NF4_BYTES))
        largest_layer = max(parameters.in_4_bits) * (weight if machine.gpus else DEQUANTIZED_ON_CPU)
        states = replace(
            states, gpu=states.gpu | {"weights": states.gpu["weights"] - saved_bytes, "a whole layer": largest_layer}
        )
    gpu = max(_compute_gpu_peaks(workload, plan, states), key=lambda parts: sum(parts.values()))
    host = {part: size * machine.processes_on_a_node for part, size in states.host.items()}
    if machine.gpus == 0:
        host = {part: host.get(part, 0) + gpu.get(part, 0) for part in gpu | host}
        copies = int(CPU_COPIES * sum(host.values()))
        return Prediction({}, _to_gib({"process": PROCESS_ON_CPU} | host | {"copies": copies}))
    images = compute_page_locked_bytes(plan.micro_batch * workload.architecture.count_image_bytes(workload.precision))
    host = {
        "process": PROCESS_ON_GPU * machine.processes_on_a_node,
        "compiler": COMPILER_BYTES * machine.processes_on_a_node * workload.fused,
        **host,
        "images": max(STEPS_OF_IMAGES * plan.accumulation, plan.accumulation + workload.loader_workers + 1)
        * images
        * machine.processes_on_a_node,
        "weights being saved": sum(parameters.trained_sizes) * weight,  # the first process copies the weights
    }
    fragmentation = max(MIN_FRAGMENTATION, int(FRAGMENTATION * sum(gpu.values())))
    outside_sizes = (CUDA_CONTEXT, NCCL_AND_KERNELS, fragmentation)
    return Prediction(_to_gib(gpu | dict(zip(OUTSIDE_ALLOCATIONS, outside_sizes, strict=True))), _to_gib(host))


def _compute_gpu_peaks(workload: Workload, plan: TrainingPlan, states: ModelStates) -> list[dict[str, int]]:
    """Return bytes by part at the peak of the backward pass, in the optimizer step, and at the start."""
    step = trace_memory(workload, plan.checkpointing_interval, plan.micro_batch)
    activations, logits, gradients = step.sizes.T
    gradients = gradients + states.gradients * (step.accumulated > 0) + states.in_transit * step.latest
    peak_moment = (activations + logits + gradients).argmax()
    backward = {
        "activations": activations[peak_moment],
        "logits": logits[peak_moment],
        "gradients": gradients[peak_moment],
    }
    return [
        states.gpu | backward | {"gradients": states.gpu.get("gradients", 0) + gradients[peak_moment]},
        states.gpu | {"optimizer": states.gpu.get("optimizer", 0) + states.at_step},
        states.gpu | {"ZeRO buffers": states.gpu.get("ZeRO buffers", 0) + states.at_start},
    ]


def _to_gib(parts: dict[str, int]) -> dict[str, float]:
    return {part: int(size) / GIB for part, size in parts.items() if size > 0}


def read_free_memory(gpus: int, nodes: int = 1) -> Machine:
    """Return the memory that is free now.

    On the host it is the smaller of the kernel's available memory and the rest of the control group's limit.
    """
    available, cgroup = psutil.virtual_memory().available, read_cgroup_memory()
    host = min(available, cgroup.limit - cgroup.used) if cgroup else available
    # Reading a GPU's memory creates a context there for the life of this process, so each of several processes reads
    # its own GPU only. The prediction for a stage includes that context.
    local_rank = os.environ.get("LOCAL_RANK")
    devices = range(min(gpus // nodes, torch.cuda.device_count()))
    if local_rank is not None and torch.cuda.is_available():
        devices = [int(local_rank)]
    memory = [torch.cuda.mem_get_info(device)[0] + CUDA_CONTEXT for device in devices]
    return Machine(gpus, min(memory) / GIB, host / GIB, nodes) if memory else Machine(0, None, host / GIB)
