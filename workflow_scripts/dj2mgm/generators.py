"""Generators of trained models, in this process or in several processes with one GPU each."""

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

from dj2mgm.compute import use_cpu_threads
from dj2mgm.config.training import AUTO
from dj2mgm.families import load_family
from dj2mgm.questions import Generator, batch_answers, batch_questions, restore_order, split_into_parts


def load_generator(base: Path, stage: Path | None, device: str | torch.device | None = None) -> Generator:
    """Load a generator.

    Args:
        base: Folder of a whole model.
        stage: Folder that a training stage wrote for it; None for the base without a stage.
        device: Device on which it runs, in bf16 on a GPU and otherwise in float32; None for the GPU if there is one.
    """
    return load_family(base).generator(stage, device)


@contextmanager
def open_generator(base: Path, stage: Path | None, processes: int) -> Iterator["Generator | _Pool"]:
    """Provide one generator in this process, or a pool of processes with the same results."""
    if processes == 1:
        generator = load_generator(base, stage)
        try:
            yield generator
        finally:  # free its memory for the next one
            generator.close()
        return
    spawn = multiprocessing.get_context("spawn")
    ranks = spawn.Queue()
    for rank in range(processes):
        ranks.put(rank)
    with ProcessPoolExecutor(processes, spawn, initializer=_start, initargs=(base, stage, processes, ranks)) as pool:
        yield _Pool(pool, processes)


class _Pool:
    """Pool of processes that answer as one generator.

    Whole batches are distributed, because a batch is padded to its longest prompt, which may change the last bits.
    """

    def __init__(self, pool: ProcessPoolExecutor, processes: int):
        self.pool = pool
        self.processes = processes

    def answer(self, images, questions, template, max_new_tokens, batch_size) -> Iterator[str]:
        if batch_size == AUTO:
            batch_size = self.pool.submit(_batch_size, max_new_tokens).result()
        numbers, batches = batch_questions(images, questions, batch_size)
        jobs = [self.pool.submit(_answer, each, template, max_new_tokens) for each in self._shares(batches)]
        yield from restore_order(numbers, (texts for job in jobs for texts in job.result()))

    def likelihoods(self, images, questions, answers, template) -> Iterator[list[float]]:
        numbers, batches = batch_answers(images, questions, answers)
        jobs = [self.pool.submit(_log_likelihoods, each, template) for each in self._shares(batches)]
        yield from restore_order(numbers, (values for job in jobs for values in job.result()))

    def _shares(self, batches: list) -> list:
        return split_into_parts(batches, max(1, ceil(len(batches) / self.processes)))


def _start(base: Path, stage: Path | None, processes: int, ranks: multiprocessing.Queue) -> None:
    """Load the generator of a new process on a GPU of its own, or with its share of the cores."""
    global _generator
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = ranks.get()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())  # default for all code that does not name a GPU
        _generator = load_generator(base, stage, f"cuda:{torch.cuda.current_device()}")
    else:
        use_cpu_threads(max(1, len(os.sched_getaffinity(0)) // processes))
        _generator = load_generator(base, stage)


def _end_with_parent() -> None:
    """End this process, which occupies a GPU, when its parent is killed."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _batch_size(max_new_tokens: int) -> int:
    return _generator.batch_size(max_new_tokens)


def _answer(*arguments) -> list[list[str]]:
    return list(_generator.answer_batches(*arguments))


def _log_likelihoods(*arguments) -> list[list[list[float]]]:
    return list(_generator.likelihood_batches(*arguments))
