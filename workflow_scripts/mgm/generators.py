"""Several processes that answer, one for each GPU, and together say what one would."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from math import ceil
from multiprocessing import connection
from pathlib import Path

import torch

from compute import use_cpu_threads
from mgm.generation import Generator


@contextmanager
def generators(base: Path, stage: Path, processes: int) -> Iterator["Generator | _Pool"]:
    """One generator in this process, or as many as are asked for in processes of their own."""
    if processes == 1:
        yield Generator(base, stage)
        return
    spawn = multiprocessing.get_context("spawn")
    ranks = spawn.Queue()
    for rank in range(processes):
        ranks.put(rank)
    with ProcessPoolExecutor(processes, spawn, initializer=_start, initargs=(base, stage, processes, ranks)) as pool:
        yield _Pool(pool, processes)


class _Pool:
    """Answers as `Generator` does. Work is divided at whole batches: each is padded to its longest prompt, which may
    move the last bits."""

    def __init__(self, pool: ProcessPoolExecutor, processes: int):
        self.pool = pool
        self.processes = processes

    def answer(self, images, questions, template, max_new_tokens, batch_size) -> Iterator[str]:
        share = max(1, ceil(ceil(len(questions) / batch_size) / self.processes)) * batch_size
        starts = range(0, len(questions), share)
        shares = [(images[at : at + share], questions[at : at + share]) for at in starts]
        jobs = [self.pool.submit(_answer, *each, template, max_new_tokens, batch_size) for each in shares]
        for job in jobs:
            yield from job.result()


def _start(base: Path, stage: Path, processes: int, ranks: multiprocessing.Queue) -> None:
    """In a new process: its generator, on a GPU of its own, or with its share of the cores."""
    global _generator
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = ranks.get()
    if torch.cuda.is_available():
        _generator = Generator(base, stage, f"cuda:{rank % torch.cuda.device_count()}")
    else:
        use_cpu_threads(max(1, len(os.sched_getaffinity(0)) // processes))
        _generator = Generator(base, stage)


def _end_with_parent() -> None:
    """A parent that is killed cannot end its processes, and each holds a model on a GPU."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _answer(*arguments) -> list[str]:
    return list(_generator.answer(*arguments))
