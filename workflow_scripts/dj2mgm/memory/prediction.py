"""Predicted peak memory of a training stage on GPU and host, by part, and the memory of this machine."""

import os
from dataclasses import dataclass, replace

import psutil
import torch

from dj2mgm.config.training import NF4_BYTES
from dj2mgm.memory.cgroups import read_cgroup_memory
from dj2mgm.memory.step import Workload, count_parameters, trace_memory
from dj2mgm.memory.zero import ModelStates, ZeroConfig, compute_model_states, page_locked_bytes

GIB = 2**30

# GPU memory outside PyTorch's allocations: the CUDA context of a process that uses a GPU, and NCCL's buffers and loaded
# kernels, which training adds. Both are measured on an H100.
CUDA_CONTEXT = int(0.65 * GIB)
NCCL_AND_KERNELS = int(0.6 * GIB)
OUTSIDE_ALLOCATIONS = ("CUDA context", "NCCL and kernels", "fragmentation")
# Share of the traced memory. PyTorch held 0.7 % in blocks of unusable sizes in eight runs of MGM-2B's shape, and a
# compiled step took 3.6 % beyond its trace in stage 1.
FRAGMENTATION = 0.05
# Share of the needed host memory that must stay free for other programs of the machine.
HOST_MARGIN = 0.05
# Resident memory of a training process: libraries, list of conversations and, on a GPU, CUDA. Pages of mapped files
# (libraries, weights) do not count, because the kernel drops them when it needs memory.
PROCESS_ON_GPU = int(1.8 * GIB)  # one H200, LoRA without offload
PROCESS_ON_CPU = int(0.57 * GIB)  # the smallest model that the tests train
# Host memory of torch.compile: 0.2 and 0.9 GiB in two runs.
COMPILER = int(0.5 * GIB)
# Copies of a step's images on the host: in use, decoded ahead for the next step, and in transit between the two.
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
    """GPUs over all nodes, GiB that a process may use of each, and GiB that a node's processes may use of its host.

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
    """GiB by part at the peak: of one GPU, and of a host over all of its processes."""

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

    def shortage(self, machine: Machine) -> str | None:
        """Describe why the plan does not fit, with numbers; None if it fits, as far as is known."""
        short = []
        for name, needed, margin, there in (
            ("GPU", self.gpu_gib, 0, machine.gpu_gib),
            ("host", self.host_gib, HOST_MARGIN, machine.host_gib),
        ):
            if there is not None and needed * (1 + margin) > there:
                spare = f" and {margin:.0%} to spare" if needed <= there else ""
                short.append(f"{needed:.1f} GiB of {name} memory{spare} are needed, {there:.1f} GiB are available")
        return "; ".join(short) or None


def predict(workload: Workload, plan: TrainingPlan, machine: Machine) -> Prediction:
    """Predict peak memory.

    On the GPU it is the peak over the backward pass, the optimizer step and DeepSpeed's initialization. On the host it
    is the peak while weights are saved, because trained weights are then copied.
    """
    parameters, weight = count_parameters(workload), workload.precision.itemsize
    held = compute_model_states(plan.zero, parameters, weight, machine.processes, plan.accumulation > 1)
    if parameters.in_4_bits:
        saved = int(sum(parameters.in_4_bits) * (weight - NF4_BYTES))
        whole = max(parameters.in_4_bits) * (weight if machine.gpus else DEQUANTIZED_ON_CPU)
        held = replace(held, gpu=held.gpu | {"weights": held.gpu["weights"] - saved, "a whole layer": whole})
    gpu = max(_gpu_peaks(workload, plan, held), key=lambda parts: sum(parts.values()))
    host = {part: size * machine.processes_on_a_node for part, size in held.host.items()}
    if machine.gpus == 0:
        host = {part: host.get(part, 0) + gpu.get(part, 0) for part in gpu | host}
        copies = int(CPU_COPIES * sum(host.values()))
        return Prediction({}, _gib({"process": PROCESS_ON_CPU} | host | {"copies": copies}))
    images = page_locked_bytes(plan.micro_batch * workload.architecture.image_bytes)
    host = {
        "process": PROCESS_ON_GPU * machine.processes_on_a_node,
        "compiler": COMPILER * machine.processes_on_a_node * workload.fused,
        **host,
        "images": STEPS_OF_IMAGES * plan.accumulation * images * machine.processes_on_a_node,
        "weights being saved": sum(parameters.trained) * weight,  # by the first process
    }
    outside = (CUDA_CONTEXT, NCCL_AND_KERNELS, int(FRAGMENTATION * sum(gpu.values())))
    return Prediction(_gib(gpu | dict(zip(OUTSIDE_ALLOCATIONS, outside, strict=True))), _gib(host))


def _gpu_peaks(workload: Workload, plan: TrainingPlan, held: ModelStates) -> list[dict[str, int]]:
    """Return bytes by part at the peak of the backward pass, in the optimizer step, and at the start."""
    step = trace_memory(workload, plan.checkpointing_interval, plan.micro_batch)
    activations, logits, gradients = step.sizes.T
    gradients = gradients + held.gradients * (step.accumulated > 0) + held.in_transit * step.latest
    worst = (activations + logits + gradients).argmax()
    backward = {"activations": activations[worst], "logits": logits[worst], "gradients": gradients[worst]}
    return [
        held.gpu | backward | {"gradients": held.gpu.get("gradients", 0) + gradients[worst]},
        held.gpu | {"optimizer": held.gpu.get("optimizer", 0) + held.at_step},
        held.gpu | {"ZeRO buffers": held.gpu.get("ZeRO buffers", 0) + held.at_start},
    ]


def _gib(parts: dict[str, int]) -> dict[str, float]:
    return {part: int(size) / GIB for part, size in parts.items() if size > 0}


def read_total_memory(gpus: int, nodes: int = 1) -> Machine:
    """Return the memory of this machine if nothing else ran here; other nodes are taken to be equal.

    Without a GPU, the machine has 0 GPUs.
    """
    total, cgroup = psutil.virtual_memory().total, read_cgroup_memory()
    host = min(total, cgroup.limit) if cgroup else total
    memory = [torch.cuda.get_device_properties(device).total_memory for device in _devices(gpus // nodes)]
    return _machine(gpus, nodes, memory, host)


def read_free_memory(gpus: int, nodes: int = 1) -> Machine:
    """Return the memory that is free now.

    On the host it is the smaller of the kernel's available memory and the rest of the control group's limit.
    """
    free, cgroup = psutil.virtual_memory().available, read_cgroup_memory()
    host = min(free, cgroup.limit - cgroup.used) if cgroup else free
    # Reading a GPU's memory creates a context there for the life of this process, so each of several processes reads
    # its own GPU only. That context is part of what a stage needs.
    own = os.environ.get("LOCAL_RANK")
    devices = _devices(gpus // nodes) if own is None or not torch.cuda.is_available() else [int(own)]
    memory = [torch.cuda.mem_get_info(device)[0] + CUDA_CONTEXT for device in devices]
    return _machine(gpus, nodes, memory, host)


def _devices(gpus: int) -> range:
    return range(min(gpus, torch.cuda.device_count()))


def _machine(gpus: int, nodes: int, gpu_memory: list[int], host: int) -> Machine:
    if not gpu_memory:
        return Machine(0, None, host / GIB)
    return Machine(gpus, min(gpu_memory) / GIB, host / GIB, nodes)
