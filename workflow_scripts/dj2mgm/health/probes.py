"""Probes of this machine: CUDA toolkits, the NVIDIA driver (NVML) with its GPUs and processes, the host, and torch.

python -m dj2mgm.health.probes torch      # how torch was built; multiplies matrices and communicates once
python -m dj2mgm.health.probes deepspeed  # compiles (if needed) and loads the CPU optimizer; prints its seconds
"""

import importlib
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pynvml

from dj2mgm.monitoring.memory_files import CgroupLimits, read_cgroup_limits
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.settings.training_stages import FP8_CAPABILITY


@dataclass(frozen=True)
class TorchProbe:
    """State of torch on this machine; an error is None if its test passed or, without a GPU, did not run."""

    version: str
    cuda: str | None  # version that torch was built with, as "12.4"; None: a CPU build
    gpus: int  # number of GPUs that torch can use
    bf16: bool
    fp8: bool
    matmul_error: str | None
    nccl: str | None  # version
    nccl_error: str | None
    flash_attention: str | None  # version
    flash_attention_error: str | None


def probe_torch() -> TorchProbe:
    """Return torch's versions and abilities; each test on the GPU stores its error instead of raising it."""
    import torch  # imported here, so that TorchProbe can be used without loading torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    flash_attention, flash_attention_error = None, None
    try:
        flash_attention = importlib.import_module("flash_attn").__version__  # optional, so not in any environment file
    except ImportError as error:
        flash_attention_error = str(error)
    return TorchProbe(
        version=torch.__version__,
        cuda=torch.version.cuda,
        gpus=gpus,
        bf16=bool(gpus and torch.cuda.is_bf16_supported()),
        fp8=bool(gpus and torch.cuda.get_device_capability() >= FP8_CAPABILITY),
        matmul_error=_catch_error(_multiply) if gpus else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        nccl_error=_catch_error(_communicate) if gpus else None,
        flash_attention=flash_attention,
        flash_attention_error=flash_attention_error,
    )


def _multiply() -> None:
    """Multiply matrices on every GPU in float32 and bfloat16, and compare with the CPU's result."""
    import torch

    left, right = torch.randn(512, 512), torch.randn(512, 512)
    expected = left @ right
    for index in range(torch.cuda.device_count()):
        for dtype in (torch.float32, torch.bfloat16):
            product = (left.to(f"cuda:{index}", dtype) @ right.to(f"cuda:{index}", dtype)).float().cpu()
            error = ((product - expected).norm() / expected.norm()).item()
            if not error < 0.02:  # bfloat16 has 8 bits; NaN fails too
                raise RuntimeError(f"GPU {index}: a matrix product in {dtype} differs from the CPU's by {error:.0%}")


def _communicate() -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        value = torch.ones(1, device="cuda")
        distributed.all_reduce(value)
        torch.cuda.synchronize()
    finally:
        distributed.destroy_process_group()


def _catch_error(attempt: Callable[[], None]) -> str | None:
    try:
        attempt()
    except Exception as error:  # any error is a finding
        return f"{type(error).__name__}: {error}"
    return None


def load_cpu_adam() -> float:
    """Return the seconds that loading took."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    start = time.monotonic()
    CPUAdamBuilder().load(verbose=False)
    return time.monotonic() - start


TOOLKIT_FOLDERS = ("/usr/local", "/opt")
SYSTEM_CUDA = "/usr/local/cuda"


@dataclass(frozen=True)
class Toolkit:
    """CUDA toolkit in a folder."""

    home: str
    version: str  # of nvcc, as "12.4"


@dataclass(frozen=True)
class CudaProbe:
    """CUDA toolkits that were found."""

    variable: str | None  # value of CUDA_HOME or CUDA_PATH
    used: Toolkit | None  # None: torch would find no nvcc
    others: tuple[Toolkit, ...]


def probe_cuda() -> CudaProbe:
    variable = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    on_path = str(Path(nvcc).parents[1]) if nvcc else SYSTEM_CUDA
    used = find_toolkit(variable or on_path)  # the search order of torch.utils.cpp_extension
    homes = {on_path, SYSTEM_CUDA, sys.prefix, os.environ.get("CONDA_PREFIX", sys.prefix)}
    homes |= {str(path) for folder in TOOLKIT_FOLDERS for path in Path(folder).glob("cuda*")}
    others = {toolkit.version: toolkit for home in sorted(homes) if (toolkit := find_toolkit(home)) and toolkit != used}
    return CudaProbe(variable, used, tuple(others.values()))


def find_toolkit(home: str) -> Toolkit | None:
    """Return the toolkit in `home`; None without an nvcc that runs."""
    try:
        command = [Path(home) / "bin" / "nvcc", "--version"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    release = re.search(r"release (\d+\.\d+)", printed)
    return Toolkit(home, release[1]) if release else None


NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
GRACE_S = 10  # between the two signals to an orphaned process


@dataclass(frozen=True)
class Gpu:
    """GPU and its memory."""

    index: int
    name: str
    total: int  # bytes
    free: int


@dataclass(frozen=True)
class GpuProcess:
    """Process on a GPU; `command` is empty and `mine` False if it is not visible, as from inside a container."""

    gpu: int
    pid: int
    memory_bytes: int | None  # bytes of GPU memory; None: the driver does not report it
    command: str
    mine: bool
    orphan: bool  # its parent has ended


@dataclass(frozen=True)
class DriverProbe:
    """NVIDIA driver, its GPUs and their processes."""

    cards: int  # number of NVIDIA cards, with or without a driver
    error: str | None = None  # why the driver did not answer
    version: str = ""
    cuda: str = ""  # newest CUDA version that the driver supports, as "12.4"
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()


def probe_driver() -> DriverProbe:
    """Ask the driver by NVML; an error of NVML is stored in the result instead of raised."""
    cards = count_cards()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return DriverProbe(cards, error=str(error))
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return DriverProbe(
            cards,
            version=pynvml.nvmlSystemGetDriverVersion(),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=tuple(_describe_gpu(index, handle) for index, handle in enumerate(handles)),
            processes=tuple(
                process for index, handle in enumerate(handles) for process in _list_processes(index, handle)
            ),
        )
    except pynvml.NVMLError as error:
        return DriverProbe(cards, error=str(error))
    finally:
        pynvml.nvmlShutdown()


def count_cards(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    cards = 0
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        cards += vendor == NVIDIA and kind.startswith(DISPLAY_CLASSES)
    return cards


def describe_process(gpu: int, pid: int, memory_bytes: int | None) -> GpuProcess:
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        orphan = parent is None or parent.pid == 1 or parent.name() == "systemd"
        return GpuProcess(
            gpu, pid, memory_bytes, " ".join(process.cmdline()), process.uids().real == os.getuid(), orphan
        )
    except psutil.Error:
        return GpuProcess(gpu, pid, memory_bytes, "", False, False)


def end_orphans(processes: tuple[GpuProcess, ...]) -> list[int]:
    """Terminate the user's own orphans, kill them after GRACE_S seconds, and return the process ids."""
    ended = []
    for pid in {process.pid for process in processes if process.mine and process.orphan}:
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


def _describe_gpu(index: int, handle) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(index, pynvml.nvmlDeviceGetName(handle), memory.total, memory.free)


def _list_processes(index: int, handle) -> list[GpuProcess]:
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [describe_process(index, process.pid, process.usedGpuMemory) for process in running]


SHARED_MEMORY = Path("/dev/shm")
LOOPBACK = "127.0.0.1"
LOOPBACK_LIMIT_S = 5


@dataclass(frozen=True)
class HostProbe:
    """Memory, disk and limits, in bytes, and the loopback interface; a limit of None does not exist."""

    memory: int
    available: int
    swap: int
    cores: int  # available to this process
    cgroup: CgroupLimits
    shared: int | None  # free in /dev/shm; None: it does not exist
    disk: int  # free in the folder of results
    open_files: int | None
    processes: int | None
    address_space: int | None
    loopback_error: str | None  # why a connection on 127.0.0.1 failed


def probe_host(results: Path) -> HostProbe:
    """Measure memory, disk and limits in bytes; the disk is the one of the nearest existing folder above `results`."""
    memory = psutil.virtual_memory()
    folder = next(path for path in (results.resolve(), *results.resolve().parents) if path.is_dir())
    return HostProbe(
        memory=memory.total,
        available=memory.available,
        swap=psutil.swap_memory().total,
        cores=len(os.sched_getaffinity(0)),
        cgroup=read_cgroup_limits(),
        shared=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        disk=shutil.disk_usage(folder).free,
        open_files=_read_soft_limit(resource.RLIMIT_NOFILE),
        processes=_read_soft_limit(resource.RLIMIT_NPROC),
        address_space=_read_soft_limit(resource.RLIMIT_AS),
        loopback_error=connect_to_itself(),
    )


def connect_to_itself(address: str = LOOPBACK) -> str | None:
    """Open a connection from this process to itself at `address`, and return why it failed."""
    try:
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), LOOPBACK_LIMIT_S).close()
    except OSError as error:
        return str(error)
    return None


def _read_soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class ProbeOutput:
    """Result of a probe that ran in its own process."""

    values: dict | None  # last line of output; None if the probe failed
    printed: str  # the rest of the output


def run_probe(module: str, limit_s: float, *arguments: str) -> ProbeOutput:
    """Run `python -P -m <module> <arguments>`, whose last line is a JSON object, for at most `limit_s` seconds."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        result = subprocess.run(command, env=environment, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        printed = _decode(error.stdout) + _decode(error.stderr)
        return ProbeOutput(None, f"{printed}\nno answer within {limit_s:.0f} s")
    *lines, last = _decode(result.stdout).splitlines() or [""]
    printed = "\n".join([*lines, _decode(result.stderr)])
    if result.returncode:
        return ProbeOutput(None, f"{printed}{last}\nexit status {result.returncode}")
    return ProbeOutput(json.loads(last), printed)


def _decode(output: bytes | None) -> str:
    return (output or b"").decode("utf-8", errors="replace")


if __name__ == "__main__":
    result = asdict(probe_torch()) if sys.argv[1] == "torch" else {"seconds": load_cpu_adam()}
    print(f"\n{json.dumps(result)}")
