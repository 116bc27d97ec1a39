"""The checks of the doctor: driver, CUDA, torch, DeepSpeed, memory, disk, limits, configuration and models.

`snakemake check` checks the data, and `snakemake plan` predicts the memory and the disk of a training.
"""

import shlex
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dj2mgm.errors import InputError, pluralize
from dj2mgm.health.diagnosis import find_cause
from dj2mgm.health.failure_signature import StageLog
from dj2mgm.health.probes import (
    LOOPBACK,
    CudaProbe,
    DriverProbe,
    HostProbe,
    ProbeOutput,
    Toolkit,
    TorchProbe,
    end_orphans,
    probe_cuda,
    probe_driver,
    probe_host,
    run_probe,
)
from dj2mgm.model_files.missing_models import describe_downloads, describe_missing, find_downloads, find_missing_models
from dj2mgm.monitoring.memory_files import GIB, format_gib
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import find_variant_sources
from dj2mgm.storage.files import write_text
from dj2mgm.training.build_locks import find_stale_locks

LONGEST_LOAD_S = 15  # of a compiled extension; more are its compilation


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    status: Literal["pass", "warn", "fail", "skip"]  # skip: the check does not apply
    reason: str
    remedy: str = ""  # the command that fixes the problem, or an instruction


PINNED_COMMAND = "snakemake baseline --sdm conda   # brings torch 2.6 and the CUDA 12.4 toolkit"
FIX_COMMAND = "python workflow_scripts/doctor.py --fix && source results/doctor/environment.sh"
COMPILE_COMMAND = "python workflow_scripts/compile_extensions.py"


def check_driver(driver: DriverProbe) -> Finding:
    name = "driver"
    if driver.gpus:
        gpus = ", ".join(f"{gpu.name} ({format_gib(gpu.free)} of {format_gib(gpu.total)} free)" for gpu in driver.gpus)
        return Finding(name, "pass", f"{driver.version}, for CUDA up to {driver.cuda}: {gpus}")
    if not driver.cards:
        return Finding(name, "skip", "no NVIDIA GPU; everything runs on the CPU")
    remedy = "reboot, or install the driver: sudo ubuntu-drivers install   # or your distribution's way"
    return Finding(name, "fail", f"an NVIDIA card is present, but its driver does not answer: {driver.error}", remedy)


def check_torch(torch: ProbeOutput, driver: DriverProbe) -> Finding:
    """Compare torch's build with the GPUs and the driver; without a GPU, any build passes."""
    name = "torch"
    if torch.values is None:
        return Finding(name, "fail", f"torch cannot be imported: {_join_last_lines(torch.printed)}", "make install")
    probe = TorchProbe(**torch.values)
    if not driver.gpus:
        return Finding(name, "pass", f"{probe.version}, on the CPU")
    if probe.cuda is None:
        return Finding(name, "fail", f"{probe.version} is a CPU build, but this machine has a GPU", PINNED_COMMAND)
    if _parse_major(probe.cuda) > _parse_major(driver.cuda):
        reason = f"{probe.version} needs a driver for CUDA {probe.cuda}; {driver.version} supports {driver.cuda}"
        return Finding(name, "fail", reason, f"update the driver, or: {PINNED_COMMAND}")
    if not probe.gpus:
        return Finding(
            name, "fail", f"{probe.version} sees no GPU", "unset CUDA_VISIBLE_DEVICES   # or list a GPU in it"
        )
    return Finding(name, "pass", f"{probe.version}, built with CUDA {probe.cuda}, sees {probe.gpus} GPU(s)")


def check_toolkit(cuda: CudaProbe, torch: TorchProbe | None, driver: DriverProbe) -> Finding:
    """Check nvcc and CUDA_HOME, and whether DeepSpeed can compile with them for this torch."""
    name = "CUDA toolkit"
    if not driver.gpus or torch is None or torch.cuda is None:
        return Finding(name, "skip", "torch uses no GPU")
    matching = find_matching_toolkit(cuda, torch.cuda)
    remedy = (
        FIX_COMMAND
        if matching
        else f"install the CUDA {torch.cuda} toolkit, then: {FIX_COMMAND}   # or: {PINNED_COMMAND}"
    )
    if cuda.used is None:
        problem = f"CUDA_HOME={cuda.variable} has no nvcc" if cuda.variable else "nvcc is missing"
        return Finding(name, "fail", f"{problem}; DeepSpeed cannot compile its optimizer for the GPU", remedy)
    toolkit = f"nvcc {cuda.used.version} in {cuda.used.home}"
    if cuda.used.version == torch.cuda:
        return Finding(name, "pass", f"{toolkit}, the same version as torch's")
    if _parse_major(cuda.used.version) == _parse_major(torch.cuda):
        return Finding(name, "pass", f"{toolkit}, compatible with torch's {torch.cuda}")
    reason = f"{toolkit} does not match torch's CUDA {torch.cuda}; DeepSpeed refuses to compile"
    return Finding(name, "fail", reason, remedy)


def find_matching_toolkit(cuda: CudaProbe, version: str) -> Toolkit | None:
    """Return the toolkit of this version, else one of the same major version, preferably the one in use."""
    toolkits = [toolkit for toolkit in (cuda.used, *cuda.others) if toolkit]
    same_version = [toolkit for toolkit in toolkits if toolkit.version == version]
    same_major = [toolkit for toolkit in toolkits if _parse_major(toolkit.version) == _parse_major(version)]
    return next(iter(same_version + same_major), None)


def check_matmul(torch: TorchProbe | None) -> Finding:
    name = "cuBLAS"
    if torch is None or not torch.gpus:
        return Finding(name, "skip", "torch uses no GPU")
    if torch.matmul_error:
        return Finding(name, "fail", torch.matmul_error, "unset LD_LIBRARY_PATH; sudo dmesg | grep -i xid")
    return Finding(name, "pass", "matrix products in float32 and bfloat16 agree with the CPU's")


def check_bf16(torch: TorchProbe | None) -> Finding:
    name = "bf16"
    if torch is None or not torch.gpus:
        return Finding(name, "skip", "torch uses no GPU")
    if not torch.bf16:
        return Finding(name, "warn", "this GPU does not support bf16", "set precision: fp32 in pretrain and finetune")
    return Finding(name, "pass", "supported")


def check_fp8(torch: TorchProbe | None, stages: Collection[str]) -> Finding:
    """Check that the GPU computes in FP8 if one of `stages`, those with `precision: fp8`, needs it."""
    name = "FP8"
    if not stages:
        return Finding(name, "skip", "no stage has precision: fp8")
    if torch is None or not torch.fp8:
        keys = " and ".join(f"{stage}.precision" for stage in sorted(stages))
        reason = "this machine has no GPU that computes in FP8 (Ada, Hopper or Blackwell)"
        return Finding(name, "fail", reason, f"set {keys}: bf16")
    return Finding(name, "pass", "supported")


def check_nccl(torch: TorchProbe | None) -> Finding:
    name = "NCCL"
    if torch is None or not torch.gpus:
        return Finding(name, "skip", "torch uses no GPU")
    if torch.nccl_error:
        return Finding(name, "fail", torch.nccl_error, "NCCL_DEBUG=INFO python workflow_scripts/doctor.py")
    return Finding(name, "pass", f"{torch.nccl} all-reduces on one GPU")


def check_flash_attention(torch: TorchProbe | None) -> Finding:
    name = "flash-attn"
    if torch is None or not torch.gpus:
        return Finding(name, "skip", "torch uses no GPU")
    if torch.flash_attention:
        return Finding(name, "pass", torch.flash_attention)
    reason = f"training works without it ({torch.flash_attention_error})"
    return Finding(name, "warn", reason, "bash envs/train.post-deploy.sh")


def check_locks(locks: list[Path]) -> Finding:
    name = "build locks"
    if not locks:
        return Finding(name, "pass", "none are stale")
    reason = f"a killed build left {', '.join(map(str, locks))}"
    return Finding(name, "warn", reason, f"{COMPILE_COMMAND}   # removes them, as training stages do")


def check_extension(extension: ProbeOutput | None) -> Finding:
    """Check DeepSpeed's CPU optimizer, which PyTorch's replaces if it cannot be loaded.

    `extension` is None if a build lock prevented loading it.
    """
    name = "DeepSpeed CPUAdam"
    if extension is None:
        return Finding(name, "skip", "not loaded, because of the build locks")
    if extension.values is not None:
        seconds = extension.values["seconds"]
        is_compiled = seconds > LONGEST_LOAD_S
        return Finding(
            name, "pass", f"compiled in {seconds:.0f} s (once)" if is_compiled else f"loads in {seconds:.1f} s"
        )
    diagnosis = find_cause(StageLog(Path("doctor"), extension.printed))
    if diagnosis:
        return Finding(name, "warn", diagnosis.explanation.cause, diagnosis.explanation.remedy)
    return Finding(
        name, "warn", _join_last_lines(extension.printed), f"{COMPILE_COMMAND}   # shows the compiler's full output"
    )


def check_gpu_processes(driver: DriverProbe) -> Finding:
    name = "GPU processes"
    if not driver.gpus:
        return Finding(name, "skip", "no NVIDIA GPU")
    if not driver.processes:
        return Finding(name, "pass", "no other process holds GPU memory")
    holders = []
    for process in driver.processes:
        amount = format_gib(process.memory_bytes) if process.memory_bytes is not None else "memory"
        owner = "orphaned" if process.mine and process.orphan else "yours" if process.mine else "another user's"
        holders.append(
            f"GPU {process.gpu}: {process.pid} ({process.command[:60] or 'not visible'}, {owner}) holds {amount}"
        )
    remedy = "python workflow_scripts/doctor.py --end-stray   # ends orphaned ones; wait for the others"
    return Finding(name, "warn", "; ".join(holders), remedy)


def _parse_major(version: str) -> int:
    return int(version.split(".")[0])


def _join_last_lines(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return " / ".join(lines[-2:])


TINY_MEMORY, MIN_DISK = 4 * GIB, 5 * GIB  # of the embedded default; `snakemake plan` predicts both for a training
MIN_SHARED = GIB  # holds batches between data loader processes and training
MIN_FILES, MIN_PROCESSES = 1024, 1024


def check_memory(host: HostProbe) -> Finding:
    name, free_memory = "memory", f"{format_gib(host.available)} of {format_gib(host.memory)} are free"
    if host.available < TINY_MEMORY:
        return Finding(
            name,
            "fail",
            f"{free_memory}; even the embedded default needs {format_gib(TINY_MEMORY)}",
            "end other programs",
        )
    return Finding(name, "pass", free_memory)


def check_cgroup(host: HostProbe) -> Finding:
    """Check the limits of a container or scheduler, which programs that only query the machine's size do not see."""
    name, limits = "control group", host.cgroup
    parts = []
    if limits.memory and limits.memory < host.memory:
        parts.append(f"memory is limited to {format_gib(limits.memory)} of {format_gib(host.memory)}")
    if limits.cpus and limits.cpus < host.cores:
        parts.append(f"processor time is limited to {limits.cpus:g} of {host.cores} cores")
    reason = "; ".join(parts) or "no limits below the machine's size"
    remedy = "raise the limit: docker run --memory=…, or Slurm's --mem=…"
    if limits.memory and limits.memory < min(TINY_MEMORY, host.memory):
        return Finding(name, "fail", f"{reason}; even the embedded default needs {format_gib(TINY_MEMORY)}", remedy)
    if limits.oom_kills:
        return Finding(
            name, "warn", f"{reason}; {limits.oom_kills} process(es) were killed here for exceeding it", remedy
        )
    return Finding(name, "pass", reason)


def check_shared_memory(host: HostProbe, loader_workers: int) -> Finding:
    name = "/dev/shm"
    if host.shared is not None and host.shared >= MIN_SHARED:
        return Finding(name, "pass", f"{format_gib(host.shared)} free")
    state = "does not exist" if host.shared is None else f"has {host.shared // 2**20} MiB free"
    remedy = "docker run --shm-size=8g …   # or loader_workers: 0"
    if loader_workers:
        return Finding(name, "fail", f"{state}; {loader_workers} loader_workers pass batches through it", remedy)
    return Finding(name, "warn", f"{state}; data loader processes would pass batches through it", remedy)


def check_disk(host: HostProbe) -> Finding:
    name, free_space = "disk", f"{format_gib(host.disk)} free for results"
    remedy = "du -sh results/* ~/.cache/* /tmp   # lists the largest folders"
    if host.disk < MIN_DISK:
        return Finding(name, "fail", f"{free_space}; the embedded default needs {format_gib(MIN_DISK)}", remedy)
    return Finding(name, "pass", free_space)


def check_ulimits(host: HostProbe) -> Finding:
    name = "ulimits"
    if host.address_space is not None:
        reason = f"address space is limited to {format_gib(host.address_space)}; CUDA maps far more than it uses"
        return Finding(name, "fail", reason, "ulimit -v unlimited")
    if host.open_files is not None and host.open_files < MIN_FILES:
        reason = f"{host.open_files} open files; data loaders and checkpoints need {MIN_FILES}"
        return Finding(name, "fail", reason, f"ulimit -n {MIN_FILES}")
    if host.processes is not None and host.processes < MIN_PROCESSES:
        reason = f"{host.processes} processes and threads; compiling and training need {MIN_PROCESSES}"
        return Finding(name, "warn", reason, f"ulimit -u {MIN_PROCESSES}")
    files = "any number of" if host.open_files is None else host.open_files
    return Finding(name, "pass", f"{files} open files, address space not limited")


def check_loopback(host: HostProbe) -> Finding:
    """Check connections of this machine to itself, by which the processes of a training find each other."""
    name = "loopback"
    if host.loopback_error is None:
        return Finding(name, "pass", f"connections to {LOOPBACK} work")
    reason = f"no connection to {LOOPBACK}: {host.loopback_error}; training stages need one, also on one GPU or CPU"
    return Finding(name, "fail", reason, f"sudo ip link set lo up   # or allow {LOOPBACK} in the sandbox or firewall")


ENVIRONMENT_FILE = Path("results/doctor/environment.sh")


def build_environment_variables(cuda: CudaProbe, torch_cuda: str | None) -> dict[str, str]:
    """Return the environment variables that make DeepSpeed compile for this torch.

    `torch_cuda` is the CUDA version that torch was built with; None for a CPU build.
    """
    toolkit = find_matching_toolkit(cuda, torch_cuda) if torch_cuda else None
    # CUDA is compatible within a major version, but DeepSpeed knows only the pairs of versions older than itself
    compatible = toolkit is not None and toolkit.version != torch_cuda
    return ({"CUDA_HOME": toolkit.home} if toolkit else {}) | {
        "DS_BUILD_OPS": "0",  # compile each extension at its first use
        "DS_SKIP_CUDA_CHECK": str(int(compatible)),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def write_environment(values: dict[str, str], path: Path = ENVIRONMENT_FILE) -> None:
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items()]
    write_text(path, f"# source {path}   # before `snakemake`; written by doctor.py --fix\n{''.join(lines)}")


TORCH_LIMIT_S = 180
COMPILE_LIMIT_S = 900


def run_checks(config: dict, fix: bool, end_stray: bool, begin: Callable[[str], None]) -> list[Finding]:
    """Probe the machine once and run all checks; `begin` is called with the name of each long part."""
    begin("driver, CUDA and host")
    driver, cuda, host = probe_driver(), probe_cuda(), probe_host(Path("results"))
    if end_stray and (ended := end_orphans(driver.processes)):
        print(f"ended {', '.join(map(str, ended))}", file=sys.stderr)
        driver = probe_driver()
    begin("PyTorch and its kernels")
    output = run_probe("dj2mgm.health.probes", TORCH_LIMIT_S, "torch")
    torch = TorchProbe(**output.values) if output.values else None
    begin("DeepSpeed's optimizer, which is compiled once, in a minute or two")
    locks = find_stale_locks()
    extension = None if locks else run_probe("dj2mgm.health.probes", COMPILE_LIMIT_S, "deepspeed")
    begin("configuration and models")
    runs, configuration = read_runs(config)
    if fix:
        write_environment(build_environment_variables(cuda, torch and torch.cuda))
        print(f"wrote {ENVIRONMENT_FILE}; source it before `snakemake`", file=sys.stderr)
    return [
        check_driver(driver),
        check_torch(output, driver),
        check_toolkit(cuda, torch, driver),
        check_matmul(torch),
        check_bf16(torch),
        check_fp8(torch, list_fp8_stages(runs)),
        check_nccl(torch),
        check_flash_attention(torch),
        check_locks(locks),
        check_extension(extension),
        check_gpu_processes(driver),
        check_memory(host),
        check_cgroup(host),
        check_shared_memory(host, count_loader_workers(runs)),
        check_disk(host),
        check_ulimits(host),
        check_loopback(host),
        configuration,
        *(check_models(runs) if runs else ()),
    ]


def read_runs(command_line: dict) -> tuple[Runs | None, Finding]:
    """Return the configuration (None if it is invalid) and a finding about it."""
    name = "configuration"
    try:
        runs = Runs(command_line, find_variant_sources())
    except InputError as error:
        return None, Finding(name, "fail", str(error), "correct that file or key")
    if warnings := runs.experiments.list_warnings():
        return runs, Finding(name, "warn", "; ".join(warnings), "correct these files")
    names = runs.experiments.names
    return runs, Finding(name, "pass", f"{pluralize(len(names), 'experiment')}: {', '.join(names)}")


def list_fp8_stages(runs: Runs | None) -> set[str]:
    all_runs = runs or ()
    return {stage for run in all_runs for stage in run.training_stages if run.settings[stage].precision == "fp8"}


def count_loader_workers(runs: Runs | None) -> int:
    """Return the largest number of data loader processes of any stage."""
    if runs is None:
        return 0
    return max(run.settings[stage].workers for run in runs for stage in run.training_stages)


def check_models(runs: Runs) -> Iterator[Finding]:
    """Yield a finding for each model: its folders exist, or its parts come with the workflow, or are trained by it."""
    for model in {run.config.model.name: run.config.model for run in runs}.values():
        name = f"model {model.name}"
        if model.trained_by_workflow:
            is_shipped = model.trained_parts.name in runs.shipped_foundations
            yield Finding(name, "skip", "its parts come with the workflow" if is_shipped else "the workflow trains it")
            continue
        missing = find_missing_models(model)
        if missing:
            reason = "; ".join(dict.fromkeys(describe_missing(key, part) for key, part in missing.items()))
            argument = shlex.quote(f"model={model.name}")
            remedy = f"run snakemake fetch --config {argument}" if find_downloads(model, missing) else ""
            if remedy and (facts := describe_downloads(model, missing)):
                remedy += f", which downloads {facts}"
            yield Finding(name, "fail", reason, remedy or "correct the model's file; see docs/models.md")
        else:
            yield Finding(name, "pass", "all its folders and weights exist")
