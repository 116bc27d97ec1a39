"""Generators of trained models, in this process or in several processes with one GPU each."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from math import ceil
from multiprocessing import connection
from pathlib import Path

import torch

from dj2mgm.compute import use_cpu_threads
from dj2mgm.models.families import load_family
from dj2mgm.models.questions import Generator, batch_answers, batch_questions, restore_order, split_into_parts
from dj2mgm.settings.batch_sizes import AUTO


def load_generator(base: Path, stage: Path | None, device: str | torch.device | None = None) -> Generator:
    """Load a generator.

    Args:
        base: Folder of a whole model.
        stage: Folder that a training stage wrote for it; None for the base without a stage.
        device: Device on which it runs, in bf16 on a GPU and otherwise in float32; None for the GPU if there is one.
    """
    return load_family(base).generator(stage, device)


@contextmanager
def open_generators(base: Path, processes: int) -> Iterator[Callable[[Path | None], "Generator | _Pool"]]:
    """Provide a function that loads a stage of a model, in one or several processes with the same results.

    Loading a stage closes the stage before. The processes stay, because their start takes half a minute on a GPU.
    """
    if processes == 1:
        generators = _Generators(base)
        try:
            yield generators.load
        finally:
            generators.close()
        return
    spawn = multiprocessing.get_context("spawn")
    ranks = spawn.Queue()
    for rank in range(processes):
        ranks.put(rank)
    with ProcessPoolExecutor(processes, spawn, initializer=_start_process, initargs=(base, processes, ranks)) as pool:
        yield lambda stage: _Pool(pool, processes, stage)


class _Generators:
    """Generators of a model's stages; one stage is loaded at a time."""

    def __init__(self, base: Path, device: str | None = None):
        self._base, self._device = base, device
        self._stage: Path | None = None
        self._generator: Generator | None = None

    def load(self, stage: Path | None) -> Generator:
        if self._generator is None or stage != self._stage:
            self.close()
            self._generator, self._stage = load_generator(self._base, stage, self._device), stage
        return self._generator

    def close(self) -> None:
        """Free the memory of the loaded generator."""
        if self._generator is not None:
            self._generator.close()
            self._generator = None


class _Pool:
    """Pool of processes that answer as one generator of a stage.

    Whole batches are distributed, because a batch is padded to its longest prompt, which may change the last bits.
    """

    def __init__(self, pool: ProcessPoolExecutor, processes: int, stage: Path | None):
        self.pool = pool
        self.processes = processes
        self.stage = stage

    def answer(self, images, questions, template, max_new_tokens, batch_size) -> Iterator[str]:
        if batch_size == AUTO:
            batch_size = self.pool.submit(_choose_batch_size, self.stage, max_new_tokens).result()
        numbers, batches = batch_questions(images, questions, batch_size)
        jobs = [
            self.pool.submit(_answer, self.stage, part, template, max_new_tokens)
            for part in self._split_batches(batches)
        ]
        yield from restore_order(numbers, (texts for job in jobs for texts in job.result()))

    def likelihoods(self, images, questions, answers, template) -> Iterator[list[float]]:
        numbers, batches = batch_answers(images, questions, answers)
        jobs = [
            self.pool.submit(_compute_log_likelihoods, self.stage, part, template)
            for part in self._split_batches(batches)
        ]
        yield from restore_order(numbers, (values for job in jobs for values in job.result()))

    def _split_batches(self, batches: list) -> list:
        return split_into_parts(batches, max(1, ceil(len(batches) / self.processes)))


def _start_process(base: Path, processes: int, ranks: multiprocessing.Queue) -> None:
    """Prepare a new process to load generators on a GPU of its own, or to use its share of the cores."""
    global _generators
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = ranks.get()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())  # default for all code that does not name a GPU
        _generators = _Generators(base, f"cuda:{torch.cuda.current_device()}")
    else:
        use_cpu_threads(max(1, len(os.sched_getaffinity(0)) // processes))
        _generators = _Generators(base)


def _end_with_parent() -> None:
    """End this process, which occupies a GPU, when its parent is killed."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _choose_batch_size(stage: Path | None, max_new_tokens: int) -> int:
    return _generators.load(stage).batch_size(max_new_tokens)


def _answer(stage: Path | None, *arguments) -> list[list[str]]:
    return list(_generators.load(stage).answer_batches(*arguments))


def _compute_log_likelihoods(stage: Path | None, *arguments) -> list[list[list[float]]]:
    return list(_generators.load(stage).likelihood_batches(*arguments))
