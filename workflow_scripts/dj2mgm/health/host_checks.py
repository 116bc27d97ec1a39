"""Checks of memory, disk, limits and the loopback interface: enough for a stage to run."""

from dj2mgm.health.findings import Finding
from dj2mgm.health.host_probe import LOOPBACK, HostProbe
from dj2mgm.monitoring.memory_csv import GIB, format_gib

# peak host memory, measured at the shape of MGM-2B with batch size 1
LORA_MEMORY = 9 * GIB  # LoRA under ZeRO-3 with offload
FULL_MEMORY = 67 * GIB  # full fine-tuning under ZeRO-2 with the optimizer offloaded
TINY_MEMORY = 4 * GIB  # the embedded default
MIN_DISK = 5 * GIB
MIN_SHARED = GIB  # holds batches between data loader processes and training
MIN_FILES, MIN_PROCESSES = 1024, 1024


def check_memory(host: HostProbe, has_gpu: bool) -> Finding:
    name, free_memory = "memory", f"{format_gib(host.available)} of {format_gib(host.memory)} are free"
    if host.available < TINY_MEMORY:
        return Finding(
            name,
            "fail",
            f"{free_memory}; even the embedded default needs {format_gib(TINY_MEMORY)}",
            "end other programs",
        )
    if has_gpu and host.available < LORA_MEMORY:
        reason = f"{free_memory}; LoRA on a 2B model under ZeRO-3 with offload peaks at {format_gib(LORA_MEMORY)}"
        return Finding(name, "warn", reason, "end other programs, or add memory or swap")
    return Finding(name, "pass", free_memory)


def check_swap(host: HostProbe, trains_fully: bool) -> Finding:
    """Check the swap; `trains_fully` means that a GPU trains a whole language model, as LoRA does not."""
    name = "swap"
    if not trains_fully or host.memory + host.swap >= FULL_MEMORY:
        return Finding(name, "pass", f"{format_gib(host.swap)} in addition to {format_gib(host.memory)} of memory")
    reason = (
        f"{format_gib(host.memory)} of memory and {format_gib(host.swap)} of swap suffice for LoRA; full fine-tuning "
        f"of a 2B model with the optimizer offloaded needs {format_gib(FULL_MEMORY)}, and the kernel would kill it"
    )
    remedy = (
        "sudo fallocate -l 64G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && sudo swapon /swapfile"
    )
    return Finding(name, "warn", reason, remedy)


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


def check_disk(host: HostProbe, needed: float | None) -> Finding:
    """Check the free space for results; `needed` are the bytes of the configured training, if they are known."""
    name, free_space = "disk", f"{format_gib(host.disk)} free for results"
    remedy = "du -sh results/* ~/.cache/* /tmp   # lists the largest folders"
    if host.disk < MIN_DISK:
        return Finding(name, "fail", f"{free_space}; the embedded default needs {format_gib(MIN_DISK)}", remedy)
    if needed and host.disk < needed:
        reason = f"{free_space}; one experiment needs {format_gib(needed)} and the data, as `snakemake plan` lists"
        return Finding(name, "warn", reason, remedy)
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
