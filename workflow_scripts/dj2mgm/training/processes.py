"""The processes that train together: how one of them joins the others and leaves them."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import deepspeed
import torch
from torch import distributed

from dj2mgm.errors import InputError

T = TypeVar("T")

BUFFER = "/dev/shm/deepspeed_allreduce_buffer_{user}_{address}_{port}_{rank}"  # deepspeed/ops/csrc/cpu/comm/shm.cpp


def join_process_group() -> None:
    """Tell DeepSpeed of the others before a model is made; it needs to know them for ZeRO-3's partitions.

    On CPUs it also makes a buffer of 67 MB in /dev/shm for each process and never removes it: memory that is lost until
    the machine restarts, and that a later run at the same port may read before it is written. Once all have opened
    them, the names are taken away, so that the memory is freed with the processes, however they end.
    """
    if not distributed.is_initialized():
        return
    deepspeed.init_distributed(auto_mpi_discovery=False)
    if not torch.cuda.is_available():
        distributed.barrier()
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        name = BUFFER.format(user=os.getuid(), address=address, port=port, rank=distributed.get_rank())
        Path(name).unlink(missing_ok=True)  # there is none if the processes are on several nodes


def agree(decide: Callable[[], T]) -> T:
    """What the first process decides: only it is asked, and its answer, or its `InputError`, is that of all."""
    answer: list = [None]
    if not distributed.is_initialized() or distributed.get_rank() == 0:
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
    """For a process's successful end: gloo's threads, if left to the interpreter's end, sometimes abort it
    (https://github.com/pytorch/pytorch/issues/190489)."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def start_process_again() -> NoReturn:
    """Replace a process that trains alone by a new one with the same command; whatever it held on the GPU is free
    then."""
    for child in multiprocessing.active_children():  # they decode images, and would wait for more
        child.kill()
        child.join()
    with socket.create_server(("", 0)) as server:
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
