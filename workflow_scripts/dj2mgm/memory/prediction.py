"""Peak memory of a training stage, on a GPU and on the host, part by part; and what this machine has."""

import os
from dataclasses import dataclass, replace

import psutil
import torch

from dj2mgm.config.training import NF4_BYTES
from dj2mgm.memory.cgroups import read_cgroup_memory
from dj2mgm.memory.step import Workload, count_parameters, trace_memory
from dj2mgm.memory.zero import ModelStates, Zero, model_states, page_locked

GIB = 2**30

# Beside PyTorch's allocations: the CUDA context that a process has once it asks a GPU for anything, and what training
# adds to it, NCCL's buffers and loaded kernels. Both measured on an H100.
CUDA_CONTEXT = int(0.65 * GIB)
NCCL_AND_KERNELS = int(0.6 * GIB)
BESIDE_ALLOCATIONS = ("CUDA context", "NCCL and kernels", "fragmentation")
# Share of the traced memory that PyTorch holds in blocks of sizes that nothing fits, 0.7 % in eight runs of MGM-2B's
# shape, and that a compiled step takes beyond its trace, 3.6 % in stage 1.
FRAGMENTATION = 0.05
# Of the host's memory this share of what is needed has to be left: the machine runs other things too.
HOST_MARGIN = 0.05
# Resident memory of a training process with its libraries, its list of conversations and, on a GPU, CUDA's, without
# pages of files: libraries and weights that are mapped, which the kernel drops when it needs the room.
PROCESS_ON_GPU = int(1.8 * GIB)  # one H200, LoRA without offload
PROCESS_ON_CPU = int(0.57 * GIB)  # the smallest model that the tests train
# What torch.compile takes in that process: 0.2 and 0.9 GiB in two runs.
COMPILER = int(0.5 * GIB)
# How often a step's images are on the host: in use, decoded ahead for the next step, and on their way between the two.
STEPS_OF_IMAGES = 3
# What a CPU's kernels copy to work on and its allocator keeps, as a share of everything else. Fitted, with the process,
# to both training stages of the embedded default (docs/memory.md).
CPU_COPIES = 0.8
# Bytes for each weight of a frozen layer in 4 bits that is made whole on a CPU: codes as indices, and two copies. On a
# GPU this is compiled, and takes a weight only.
WHOLE_ON_CPU = 1 + 4 + 4 + 4


@dataclass(frozen=True)
class Arrangement:
    """How a workload is run: a DeepSpeed configuration with its name, and how much at a time."""

    deepspeed: str
    zero: Zero
    recomputation: int  # of every n-th layer; 0: none
    micro_batch: int
    accumulation: int


@dataclass(frozen=True)
class Machine:
    """GPUs over all nodes, GiB that a process may use of each, and GiB that a node's processes may use of its host.

    None: cannot be read; with 0 GPUs everything is on the host.
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
    """GiB by part at the moment of the peak: of one GPU, and of a host over its processes."""

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
        """What torch.cuda.max_memory_allocated() will say."""
        return sum(size for part, size in self.gpu.items() if part not in BESIDE_ALLOCATIONS)

    def shortage(self, machine: Machine) -> str | None:
        """Why it does not fit, in words with the numbers; None if it does, as far as is known."""
        short = []
        for name, needed, margin, there in (
            ("GPU", self.gpu_gib, 0, machine.gpu_gib),
            ("host", self.host_gib, HOST_MARGIN, machine.host_gib),
        ):
            if there is not None and needed * (1 + margin) > there:
                spare = f" and {margin:.0%} to spare" if needed <= there else ""
                short.append(f"{needed:.1f} GiB of {name} memory{spare} are needed, {there:.1f} GiB are there")
        return "; ".join(short) or None


def predict(workload: Workload, arrangement: Arrangement, machine: Machine) -> Prediction:
    """On the GPU the peak over the backward pass, the optimizer's step and DeepSpeed's own start; on the host that of
    saving, when what is trained is there once more."""
    parameters, weight = count_parameters(workload), workload.precision.itemsize
    held = model_states(arrangement.zero, parameters, weight, machine.processes, arrangement.accumulation > 1)
    if parameters.in_4_bits:
        saved = int(sum(parameters.in_4_bits) * (weight - NF4_BYTES))
        whole = max(parameters.in_4_bits) * (weight if machine.gpus else WHOLE_ON_CPU)
        held = replace(held, gpu=held.gpu | {"weights": held.gpu["weights"] - saved, "a whole layer": whole})
    gpu = max(_trace_of_gpu(workload, arrangement, held), key=lambda parts: sum(parts.values()))
    host = {part: size * machine.processes_on_a_node for part, size in held.host.items()}
    if machine.gpus == 0:
        host = {part: host.get(part, 0) + gpu.get(part, 0) for part in gpu | host}
        copies = int(CPU_COPIES * sum(host.values()))
        return Prediction({}, _gib({"process": PROCESS_ON_CPU} | host | {"copies": copies}))
    images = page_locked(arrangement.micro_batch * workload.architecture.image_bytes)
    host = {
        "process": PROCESS_ON_GPU * machine.processes_on_a_node,
        "compiler": COMPILER * machine.processes_on_a_node * workload.fused,
        **host,
        "images": STEPS_OF_IMAGES * arrangement.accumulation * images * machine.processes_on_a_node,
        "weights being saved": sum(parameters.trained) * weight,  # by the first process
    }
    beside = (CUDA_CONTEXT, NCCL_AND_KERNELS, int(FRAGMENTATION * sum(gpu.values())))
    return Prediction(_gib(gpu | dict(zip(BESIDE_ALLOCATIONS, beside, strict=True))), _gib(host))


def _trace_of_gpu(workload: Workload, arrangement: Arrangement, held: ModelStates) -> list[dict[str, int]]:
    """Bytes by part at the worst moment of the backward pass, in the optimizer's step, and at the start."""
    step = trace_memory(workload, arrangement.recomputation, arrangement.micro_batch)
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


# What this machine has for a training stage: GPUs with their memory, and main memory; None for what cannot be read.


def whole_machine(gpus: int, nodes: int = 1) -> Machine:
    """What there would be if nothing else ran here, and on nodes like this one. Without a GPU, a machine of none."""
    total, cgroup = psutil.virtual_memory().total, read_cgroup_memory()
    host = min(total, cgroup.limit) if cgroup else total
    memory = [torch.cuda.get_device_properties(device).total_memory for device in _devices(gpus // nodes)]
    return _machine(gpus, nodes, memory, host)


def machine_in_use(gpus: int, nodes: int = 1) -> Machine:
    """What is free now: on the host what the kernel can give or what is left of the control group's limit, whichever is
    smaller."""
    free, cgroup = psutil.virtual_memory().available, read_cgroup_memory()
    host = min(free, cgroup.limit - cgroup.used) if cgroup else free
    # To ask a GPU makes a context there, for as long as this process lives: each of several asks its own only. That
    # context is a part of what a stage needs.
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
