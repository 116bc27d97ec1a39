"""Driver, CUDA toolkit, torch and DeepSpeed: is each there, do they fit each other, do they work?"""

import shlex
from collections.abc import Collection
from pathlib import Path

import psutil

from dj2mgm.diagnosis.diagnosis import find_cause
from dj2mgm.diagnosis.signature import StageLog
from dj2mgm.doctor.probes import CudaProbe, DriverProbe, Finding, GpuProcess, Outcome, Toolkit
from dj2mgm.doctor.torch_probe import TorchProbe
from dj2mgm.files import write_text
from dj2mgm.memory.memory_csv import gib

PINNED = "snakemake --cores 1 baseline --sdm conda   # brings torch 2.6 and the CUDA 12.4 toolkit"
FIX = "python workflow_scripts/doctor.py --fix && source results/doctor/environment.sh"
COMPILE = "python workflow_scripts/compile_extensions.py"


def check_driver(driver: DriverProbe) -> Finding:
    name = "driver"
    if driver.gpus:
        gpus = ", ".join(f"{gpu.name} ({gib(gpu.free)} of {gib(gpu.total)} free)" for gpu in driver.gpus)
        return Finding(name, "pass", f"{driver.version}, for CUDA up to {driver.cuda}: {gpus}")
    if not driver.cards:
        return Finding(name, "skip", "no NVIDIA GPU: everything runs on the CPU")
    remedy = "reboot, or install the driver: sudo ubuntu-drivers install   # or your distribution's way"
    return Finding(name, "fail", f"there is an NVIDIA card, but the driver does not answer: {driver.error}", remedy)


def check_torch(torch: Outcome, driver: DriverProbe) -> Finding:
    name = "torch"
    if torch.values is None:
        return Finding(name, "fail", f"torch cannot be used: {_last_words(torch.printed)}", "make install")
    probe = TorchProbe(**torch.values)
    if not driver.gpus:
        return Finding(name, "pass", f"{probe.version}, on the CPU")
    if probe.cuda is None:
        return Finding(name, "fail", f"{probe.version} is a CPU build, and there is a GPU", PINNED)
    if _major(probe.cuda) > _major(driver.cuda):
        reason = f"{probe.version} needs a driver for CUDA {probe.cuda}; {driver.version} is for {driver.cuda}"
        return Finding(name, "fail", reason, f"update the driver, or: {PINNED}")
    if not probe.gpus:
        return Finding(
            name, "fail", f"{probe.version} sees no GPU", "unset CUDA_VISIBLE_DEVICES   # or name a GPU in it"
        )
    return Finding(name, "pass", f"{probe.version}, built with CUDA {probe.cuda}, sees {probe.gpus} GPU(s)")


def check_toolkit(cuda: CudaProbe, torch: TorchProbe | None, driver: DriverProbe) -> Finding:
    """nvcc and CUDA_HOME, and whether DeepSpeed may compile with them for this torch."""
    name = "CUDA toolkit"
    if not driver.gpus or torch is None or torch.cuda is None:
        return Finding(name, "skip", "torch uses no GPU")
    matching = matching_toolkit(cuda, torch.cuda)
    remedy = FIX if matching else f"install the CUDA {torch.cuda} toolkit, then: {FIX}   # or: {PINNED}"
    if cuda.used is None:
        where = f"CUDA_HOME={cuda.variable} has no nvcc" if cuda.variable else "there is no nvcc"
        return Finding(name, "fail", f"{where}: DeepSpeed cannot compile its optimizer for the GPU", remedy)
    ended = f"nvcc {cuda.used.version} in {cuda.used.home}"
    if cuda.used.version == torch.cuda:
        return Finding(name, "pass", f"{ended}, as torch's")
    if _major(cuda.used.version) == _major(torch.cuda):
        return Finding(name, "pass", f"{ended}, compatible with torch's {torch.cuda}")
    reason = f"{ended} does not match torch's CUDA {torch.cuda}: DeepSpeed refuses to compile"
    return Finding(name, "fail", reason, remedy)


def matching_toolkit(cuda: CudaProbe, wanted: str) -> Toolkit | None:
    """The toolkit of this version, or else one of the same major version, preferably the one that is used anyway."""
    toolkits = [toolkit for toolkit in (cuda.used, *cuda.others) if toolkit]
    same = [toolkit for toolkit in toolkits if toolkit.version == wanted]
    near = [toolkit for toolkit in toolkits if _major(toolkit.version) == _major(wanted)]
    return next(iter(same + near), None)


def check_matmul(torch: TorchProbe | None) -> Finding:
    name = "cuBLAS"
    if torch is None or not torch.gpus:
        return Finding(name, "skip", "torch uses no GPU")
    if torch.matmul_error:
        return Finding(name, "fail", torch.matmul_error, "unset LD_LIBRARY_PATH; sudo dmesg | grep -i xid")
    return Finding(name, "pass", "multiplies matrices in float32 and bfloat16 as the CPU does")


def check_bf16(torch: TorchProbe | None) -> Finding:
    name = "bf16"
    if torch is None or not torch.gpus:
        return Finding(name, "skip", "torch uses no GPU")
    if not torch.bf16:
        return Finding(name, "warn", "this GPU has no bf16", "set precision: fp32 in pretrain and finetune")
    return Finding(name, "pass", "supported")


def check_fp8(torch: TorchProbe | None, stages: Collection[str]) -> Finding:
    """
    Args:
        stages: the training stages with `precision: fp8`.
    """
    name = "FP8"
    if not stages:
        return Finding(name, "skip", "no stage has precision: fp8")
    if torch is None or not torch.fp8:
        keys = " and ".join(f"{stage}.precision" for stage in sorted(stages))
        reason = "there is no GPU here that computes in FP8 (Ada, Hopper, Blackwell)"
        return Finding(name, "fail", reason, f"set {keys}: bf16")
    return Finding(name, "pass", "supported")


def check_nccl(torch: TorchProbe | None) -> Finding:
    name = "NCCL"
    if torch is None or not torch.gpus:
        return Finding(name, "skip", "torch uses no GPU")
    if torch.nccl_error:
        return Finding(name, "fail", torch.nccl_error, "NCCL_DEBUG=INFO python workflow_scripts/doctor.py")
    return Finding(name, "pass", f"{torch.nccl} reduces on one GPU")


def check_flash_attention(torch: TorchProbe | None) -> Finding:
    name = "flash-attn"
    if torch is None or not torch.gpus:
        return Finding(name, "skip", "torch uses no GPU")
    if torch.flash_attention:
        return Finding(name, "pass", torch.flash_attention)
    reason = f"training works without it: {torch.flash_attention_error}"
    return Finding(name, "warn", reason, "bash envs/train.post-deploy.sh")


def check_locks(locks: list[Path]) -> Finding:
    name = "build locks"
    if not locks:
        return Finding(name, "pass", "none left behind")
    reason = f"a build that was killed left {', '.join(map(str, locks))}"
    return Finding(name, "warn", reason, f"{COMPILE}   # removes it; training stages do so too")


def check_extension(extension: Outcome | None) -> Finding:
    """None: it was not tried, because a lock stands in the way."""
    name = "DeepSpeed CPUAdam"
    if extension is None:
        return Finding(name, "skip", "the build locks come first")
    if extension.values is not None:
        return Finding(name, "pass", f"loads in {extension.values['seconds']:.1f} s")
    diagnosis = find_cause(StageLog(Path("doctor"), extension.printed))
    if diagnosis:
        return Finding(name, "fail", diagnosis.explanation.cause, diagnosis.explanation.remedy)
    return Finding(name, "fail", _last_words(extension.printed), f"{COMPILE}   # shows all that the compiler says")


def check_gpu_processes(driver: DriverProbe) -> Finding:
    name = "GPU processes"
    if not driver.gpus:
        return Finding(name, "skip", "no NVIDIA GPU")
    if not driver.processes:
        return Finding(name, "pass", "nobody else holds GPU memory")
    lines = []
    for process in driver.processes:
        held = gib(process.held) if process.held is not None else "memory"
        whose = "left behind" if process.mine and process.orphan else "yours" if process.mine else "somebody else's"
        lines.append(
            f"GPU {process.gpu}: {process.pid} ({process.command[:60] or 'not visible'}, {whose}) holds {held}"
        )
    remedy = "python workflow_scripts/doctor.py --end-orphan   # ends those left behind; wait for the others"
    return Finding(name, "warn", "; ".join(lines), remedy)


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _last_words(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return " / ".join(lines[-2:])


# The variables that a shell needs before `snakemake`, where the machine's own do not fit.

PATH = Path("results/doctor/environment.sh")


def variables(cuda: CudaProbe, torch_cuda: str | None) -> dict[str, str]:
    """
    Args:
        torch_cuda: the version that torch was built with; None: a CPU build.
    """
    toolkit = matching_toolkit(cuda, torch_cuda) if torch_cuda else None
    # CUDA promises compatibility within one major version, but DeepSpeed knows only pairs of versions older than itself
    compatible = toolkit is not None and toolkit.version != torch_cuda
    return ({"CUDA_HOME": toolkit.home} if toolkit else {}) | {
        "DS_BUILD_OPS": "0",  # compile what is used, when it is used
        "DS_SKIP_CUDA_CHECK": str(int(compatible)),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def write_environment(values: dict[str, str], path: Path = PATH) -> None:
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items()]
    write_text(path, f"# source {path}   # before `snakemake`; written by doctor.py --fix\n{''.join(lines)}")


# Processes that were left behind on a GPU: the user's own, whose parent has ended.

GRACE_S = 10


def orphans(processes: tuple[GpuProcess, ...]) -> list[GpuProcess]:
    return [process for process in processes if process.mine and process.orphan]


def end_orphans(processes: tuple[GpuProcess, ...]) -> list[int]:
    """Ask each to end, and make those end that have not after GRACE_S seconds; return their process ids."""
    ended = []
    for pid in {orphan.pid for orphan in orphans(processes)}:
        try:
            process = psutil.Process(pid)
            process.terminate()
            ended.append(process)
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(ended, timeout=GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return sorted(process.pid for process in ended)
