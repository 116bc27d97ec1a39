"""Memory, disk and limits: is there enough for a stage to run?"""

from dj2mgm.doctor.probes import Finding, HostProbe
from dj2mgm.memory.memory_csv import gib

GIB = 2**30
# measured at the shape of MGM-2B, batch 1: peak memory of the host
LORA = 9 * GIB  # LoRA under ZeRO-3 with offload
FULL = 67 * GIB  # all weights under ZeRO-2 with the optimizer offloaded
TINY = 4 * GIB  # the embedded default
MIN_DISK, AMPLE_DISK = 5 * GIB, 64 * GIB
SHARED_LEAST = GIB  # batches on their way from data loader processes
FILES_LEAST, PROCESSES_LEAST = 1024, 1024


def check_memory(host: HostProbe, has_gpu: bool) -> Finding:
    name, there = "memory", f"{gib(host.available)} of {gib(host.memory)} are free"
    if host.available < TINY:
        return Finding(name, "fail", f"{there}; even the embedded default wants {gib(TINY)}", "end other programs")
    if has_gpu and host.available < LORA:
        reason = f"{there}; LoRA on a 2B model under ZeRO-3 with offload peaks at {gib(LORA)}"
        return Finding(name, "warn", reason, "end other programs, or add memory or swap")
    return Finding(name, "pass", there)


def check_swap(host: HostProbe, has_gpu: bool) -> Finding:
    name = "swap"
    if not has_gpu or host.memory + host.swap >= FULL:
        return Finding(name, "pass", f"{gib(host.swap)} beside {gib(host.memory)} of memory")
    reason = (
        f"{gib(host.memory)} of memory and {gib(host.swap)} of swap: LoRA fits; all weights of a 2B model with the "
        f"optimizer offloaded need {gib(FULL)}, and the kernel would end that"
    )
    remedy = (
        "sudo fallocate -l 64G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && sudo swapon /swapfile"
    )
    return Finding(name, "warn", reason, remedy)


def check_cgroup(host: HostProbe) -> Finding:
    """Limits of a container or a scheduler, which programs that only ask how much the machine has do not see."""
    name, limits = "control group", host.cgroup
    parts = []
    if limits.memory and limits.memory < host.memory:
        parts.append(f"memory is limited to {gib(limits.memory)} of {gib(host.memory)}")
    if limits.cpus and limits.cpus < host.cores:
        parts.append(f"processor time is limited to {limits.cpus:g} of {host.cores} cores")
    reason = "; ".join(parts) or "no limits below the machine's own"
    remedy = "ask for more: docker run --memory=…, or Slurm's --mem=…"
    if limits.memory and limits.memory < min(TINY, host.memory):
        return Finding(name, "fail", f"{reason}; even the embedded default wants {gib(TINY)}", remedy)
    if limits.oom_kills:
        return Finding(name, "warn", f"{reason}; {limits.oom_kills} process(es) were ended for memory here", remedy)
    return Finding(name, "pass", reason)


def check_shared_memory(host: HostProbe, loader_workers: int) -> Finding:
    name = "/dev/shm"
    if host.shared is not None and host.shared >= SHARED_LEAST:
        return Finding(name, "pass", f"{gib(host.shared)} are free")
    there = "does not exist" if host.shared is None else f"has {host.shared // 2**20} MiB free"
    remedy = "docker run --shm-size=8g …   # or loader_workers: 0"
    if loader_workers:
        return Finding(name, "fail", f"{there}; {loader_workers} loader_workers pass batches through it", remedy)
    return Finding(name, "warn", f"{there}; data loader processes would pass batches through it", remedy)


def check_disk(host: HostProbe) -> Finding:
    name, there = "disk", f"{gib(host.disk)} are free for results"
    remedy = "du -sh results/* ~/.cache/* /tmp   # shows what is large"
    if host.disk < MIN_DISK:
        return Finding(name, "fail", f"{there}; the embedded default wants {gib(MIN_DISK)}", remedy)
    if host.disk < AMPLE_DISK:
        return Finding(
            name, "warn", f"{there}; 2B weights and three checkpoints of them want {gib(AMPLE_DISK)}", remedy
        )
    return Finding(name, "pass", there)


def check_ulimits(host: HostProbe) -> Finding:
    name = "ulimits"
    if host.address_space is not None:
        reason = f"address space is limited to {gib(host.address_space)}; CUDA maps far more than it uses"
        return Finding(name, "fail", reason, "ulimit -v unlimited")
    if host.open_files is not None and host.open_files < FILES_LEAST:
        reason = f"{host.open_files} open files; data loaders and checkpoints want {FILES_LEAST}"
        return Finding(name, "fail", reason, f"ulimit -n {FILES_LEAST}")
    if host.processes is not None and host.processes < PROCESSES_LEAST:
        reason = f"{host.processes} processes and threads; compiling and training want {PROCESSES_LEAST}"
        return Finding(name, "warn", reason, f"ulimit -u {PROCESSES_LEAST}")
    files = "any number of" if host.open_files is None else host.open_files
    return Finding(name, "pass", f"{files} open files, address space not limited")
