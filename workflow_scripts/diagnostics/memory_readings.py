"""One look at memory: GPUs, machine, control group, and a tree of processes."""

from dataclasses import dataclass

import psutil

from diagnostics.cgroup_memory import CgroupMemory, read_cgroup_memory
from diagnostics.gpu_memory import GpuMemory, read_gpu_memory

GIB = 2**30


@dataclass(frozen=True)
class Reading:
    """Bytes in use."""

    job: int  # the process tree
    host: int  # the machine, without what the kernel can free at once
    host_total: int
    cgroup: CgroupMemory | None  # None: no limit is set
    gpus: list[GpuMemory]

    @property
    def host_limit(self) -> int:
        """Bytes that the job may use before something is killed."""
        return min(self.host_total, self.cgroup.limit) if self.cgroup else self.host_total

    @property
    def host_share(self) -> float:
        """How full the machine or the control group is, whichever is fuller."""
        machine = self.host / self.host_total
        return max(machine, self.cgroup.used / self.cgroup.limit) if self.cgroup else machine

    def columns(self) -> dict[str, float | None]:
        """In GiB, under the names that memory.csv has; no GPU, no column of it."""
        cgroup = self.cgroup.used if self.cgroup else None
        sizes = {"job_gib": self.job, "host_gib": self.host, "cgroup_gib": cgroup}
        sizes |= {f"gpu{gpu.index}_gib": gpu.used for gpu in self.gpus}
        return {name: None if size is None else round(size / GIB, 3) for name, size in sizes.items()}


def read_memory(root: psutil.Process) -> Reading:
    machine = psutil.virtual_memory()
    return Reading(
        job=tree_memory(root),
        host=machine.total - machine.available,
        host_total=machine.total,
        cgroup=read_cgroup_memory(),
        gpus=read_gpu_memory(),
    )


def tree_memory(root: psutil.Process) -> int:
    """Bytes that a process and all below it hold.

    The sum of proportional set sizes, in which a page that n processes share counts 1/n in each: a sum of resident
    sizes would count the model again for every loader worker that was forked from the trainer.
    """
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(map(_own_share, processes))


def _own_share(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.NoSuchProcess:
        return 0
    except psutil.AccessDenied:  # somebody else's: only its resident size is known
        return process.memory_info().rss
