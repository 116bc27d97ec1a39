"""Generators of trained models, in this process or in several processes with one GPU each.

Also: detection of the family of the vision-language model in a folder.
"""

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
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from dj2mgm.compute import use_cpu_threads
from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import check_model_folder
from dj2mgm.models.mgm.configuration_mgm import MGMConfig
from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.models.questions import split_into_parts
from dj2mgm.models.vision_language import Answerer, Generator, ModelFamily
from dj2mgm.models.vlm.vlm_family import TransformersFamily
from dj2mgm.storage.files import FIX_FILE_REMEDY, read_json


def load_family(folder: Path) -> ModelFamily:
    """Return the family for the model type of a folder; raise InputError if no family supports it."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} contains no config.json, so it is not a model folder; name another one")
    check_model_folder(folder)
    kind = read_json(folder / "config.json", remedy=FIX_FILE_REMEDY).get("model_type")
    if kind == MGMConfig.model_type:
        return MGMFamily(folder)
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise InputError(
            f"{folder} contains a model of type {kind}, which transformers does not load for images and text; name "
            "another one"
        )
    return TransformersFamily(folder)


def load_generator(base: Path, stage: Path | None, device: str | torch.device | None = None) -> Generator:
    """Load a generator.

    Args:
        base: folder of a whole model.
        stage: folder that a training stage wrote for it; None for the base without a stage.
        device: device on which it runs, in bf16 on a GPU and otherwise in float32; None for the GPU if there is one.
    """
    return load_family(base).make_generator(stage, device)


@contextmanager
def open_generators(base: Path, processes: int) -> Iterator[Callable[[Path | None], Answerer]]:
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


class _Pool(Answerer):
    """Pool of processes that answer as one generator of a stage.

    Whole batches are distributed, because a batch is padded to its longest prompt, which may change the last bits.
    """

    def __init__(self, pool: ProcessPoolExecutor, processes: int, stage: Path | None):
        self.pool = pool
        self.processes = processes
        self.stage = stage

    def choose_batch_size(self, max_new_tokens: int) -> int:
        return self.pool.submit(_choose_batch_size, self.stage, max_new_tokens).result()

    def answer_batches(self, batches, template, max_new_tokens) -> Iterator[list[str]]:
        return self._distribute(_answer, batches, template, max_new_tokens)

    def compute_batch_log_likelihoods(self, batches, template) -> Iterator[list[list[float]]]:
        return self._distribute(_compute_log_likelihoods, batches, template)

    def _distribute(self, function: Callable[..., list], batches: list, *arguments) -> Iterator[list]:
        """Yield the result of each batch; each process receives one part of the batches."""
        parts = split_into_parts(batches, max(1, ceil(len(batches) / self.processes)))
        jobs = [self.pool.submit(function, self.stage, part, *arguments) for part in parts]
        for job in jobs:
            yield from job.result()


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
    return _generators.load(stage).choose_batch_size(max_new_tokens)


def _answer(stage: Path | None, *arguments) -> list[list[str]]:
    return list(_generators.load(stage).answer_batches(*arguments))


def _compute_log_likelihoods(stage: Path | None, *arguments) -> list[list[list[float]]]:
    return list(_generators.load(stage).compute_batch_log_likelihoods(*arguments))
