"""Peak memory of a training stage, on a GPU and on the host, part by part."""

from dataclasses import dataclass

from planning.step import Workload, count_parameters, moments
from planning.zero import Held, Zero, held_by, page_locked

GIB = 2**30

# Beside PyTorch's allocations: the CUDA context with the kernels of PyTorch and cuBLAS. An estimate.
CUDA_CONTEXT = int(0.6 * GIB)
# Share of the allocated memory that PyTorch holds in blocks of sizes that nothing fits. An estimate.
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
        return self.gpu_gib - self.gpu.get("CUDA context", 0) - self.gpu.get("fragmentation", 0)

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
    held = held_by(arrangement.zero, parameters, weight, machine.processes, arrangement.accumulation > 1)
    gpu = max(_moments_of_gpu(workload, arrangement, held), key=lambda parts: sum(parts.values()))
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
    overhead = {"CUDA context": CUDA_CONTEXT, "fragmentation": int(FRAGMENTATION * sum(gpu.values()))}
    return Prediction(_gib(gpu | overhead), _gib(host))


def _moments_of_gpu(workload: Workload, arrangement: Arrangement, held: Held) -> list[dict[str, int]]:
    """Bytes by part at the worst moment of the backward pass, in the optimizer's step, and at the start."""
    step = moments(workload, arrangement.recomputation, arrangement.micro_batch)
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
