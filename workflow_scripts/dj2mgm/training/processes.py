"""Process group of a training: share values before it, join it, decide together, leave it, restart a process."""

import json
import multiprocessing
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import NoReturn, TypeVar

import deepspeed
import torch
from torch import distributed

from dj2mgm.cli.command_line import restart_process
from dj2mgm.errors import InputError

_restarting = Lock()
T = TypeVar("T")

ALLREDUCE_BUFFER = (
    "/dev/shm/deepspeed_allreduce_buffer_{user}_{address}_{port}_{rank}"  # deepspeed/ops/csrc/cpu/comm/shm.cpp
)


def is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def join_process_group() -> None:
    """Initialize DeepSpeed's process group, which ZeRO-3 needs before a model is made.

    On CPUs, DeepSpeed makes a buffer of 67 MB in /dev/shm for each process and never removes it. That memory would be
    lost until the machine restarts, and a later run at the same port may read it before it is written. Once all
    processes have opened their buffers, the names are removed, so that the memory is freed when the processes end.
    """
    if not distributed.is_initialized():
        return
    deepspeed.init_distributed(auto_mpi_discovery=False)
    if not torch.cuda.is_available():
        distributed.barrier()
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        name = ALLREDUCE_BUFFER.format(user=os.getuid(), address=address, port=port, rank=distributed.get_rank())
        Path(name).unlink(missing_ok=True)  # processes on several nodes have no buffer


@cache  # the first process holds the store, so it must stay until the process group is made at the same port
def _open_early_store() -> distributed.Store:
    store, _, _ = next(distributed.rendezvous("env://"))
    return distributed.PrefixStore("early", store)


def gather_early(values: list[float | None]) -> list[list[float | None]]:
    """Return the values of every process, before there is a process group."""
    rank, processes = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if processes == 1:
        return [values]
    _open_early_store().set(f"{rank}", json.dumps(values))
    return [json.loads(_open_early_store().get(f"{process}")) for process in range(processes)]


def decide_together(decide: Callable[[], T]) -> T:
    """Return the first process's decision on all processes; an `InputError` is raised on all of them."""
    answer: list = [None]
    if is_first_process():
        try:
            answer = [decide()]
        except InputError as error:
            answer = [error]
    if distributed.is_initialized():
        distributed.broadcast_object_list(answer)
    if isinstance(answer[0], InputError):
        raise answer[0]
    return answer[0]


def leave_process_group() -> None:
    """Destroy the process group before a successful exit.

    At the interpreter's end, gloo's threads sometimes abort it (https://github.com/pytorch/pytorch/issues/190489).
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()


def restart_training() -> NoReturn:
    """Replace this process by a new one with the same command, which frees its GPU memory.

    All processes of a training must do so. They meet at the next port, because the first process may still hold the
    earlier one when the others have started again.
    """
    _restarting.acquire()  # never released: the training and a thread that watches the plan may both ask for a restart
    for child in multiprocessing.active_children():  # loader workers, which would wait for more work
        child.kill()
        child.join()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    restart_process()
