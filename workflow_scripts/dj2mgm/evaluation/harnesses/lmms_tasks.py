"""Tasks of lmms-eval with data from local files: what they ask, and what answers are worth by their own metrics."""

import inspect
import os
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
from PIL import Image

from dj2mgm.config.evaluations import BESIDE, check_lmms_eval
from dj2mgm.control_tokens import find_control
from dj2mgm.data.formats import IMAGE_TOKEN
from dj2mgm.errors import InputError

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # before they are imported: nothing is fetched
MODEL = "dj2mgm"  # by which a task may choose its prompt
Aggregate = Callable[[list], float | None]


@dataclass(frozen=True)
class Values:
    """What one metric has of each question that it is about, and how the task makes one figure of them."""

    questions: list[int]  # numbers of the questions
    items: list  # of each: a number, or what the task's own aggregation reads
    aggregate: Aggregate


class LmmsTask:
    """
    Args:
        name: of a task that asks one question about one image, and reads the answer as text.
        data: folder of its data: a copy of the hub's repository, or what `save_to_disk` of `datasets` wrote.

    Raises:
        InputError: lmms-eval is not there, or has no such task; or the folder does not hold its data.
    """

    def __init__(self, name: str, data: Path):
        check_lmms_eval()
        if str(BESIDE) not in sys.path:
            sys.path.append(str(BESIDE))
        from lmms_eval.api.task import ConfigurableTask
        from tenacity import RetryError

        self.name = name
        config = _config(name) | {"dataset_path": str(data.resolve()), "dataset_kwargs": {}}
        if (data / "dataset_dict.json").is_file():
            config["dataset_kwargs"] = {"load_from_disk": True}
        elif not (data / "README.md").is_file():  # which names the parts of a repository
            config["dataset_name"] = None
        ConfigurableTask.download.retry.wait = lambda state: 0  # a file that is not there does not come
        try:
            self.task = ConfigurableTask(config=config, model_name=MODEL)
        except (RetryError, KeyError, ValueError, AssertionError, IndexError) as error:
            cause = error.last_attempt.exception() if isinstance(error, RetryError) else error
            split = config.get("test_split") or config.get("validation_split")
            raise InputError(
                f"{data} is not the data of the task {name} with the split {split} ({type(cause).__name__}: {cause}); "
                "docs/evaluation.md says how to get it"
            ) from None
        self.docs = self.task.eval_docs_no_media

    @property
    def decoding(self) -> dict:
        """`max_new_tokens`, None where the task leaves it open, and `until`: texts before which an answer ends."""
        asked = self.task.config.generation_kwargs
        until = asked.get("until") or []
        return {
            "max_new_tokens": asked.get("max_new_tokens"),
            "until": [until] if isinstance(until, str) else list(until),
        }

    def questions(self) -> Iterator[tuple[str, Image.Image]]:
        """Prompt and image of each question, in the order of the data.

        Raises:
            InputError: a question is about no image, or several.
        """
        for number, doc in enumerate(self.task.task_docs):
            visuals = self.task.doc_to_visual(doc) or []
            if len(visuals) != 1 or not isinstance(visuals[0], Image.Image):
                raise InputError(
                    f"task {self.name}: question {number} shows {len(visuals)} pictures or videos, and one picture is "
                    "needed; choose another task"
                )
            # as lmms-eval asks without examples; the image goes where this workflow's models have it
            prompt = (self.task.config.description or "") + self.task.doc_to_text(doc)
            prompt = prompt.replace(IMAGE_TOKEN, " ").strip()
            if control := find_control(prompt):
                raise InputError(
                    f"task {self.name}: question {number} holds the control token {control}; choose another"
                )
            yield prompt, visuals[0]

    def values(self, predictions: list[str]) -> dict[str, Values]:
        """What the task's metrics have of one answer to each question; metrics that only write a file are left out."""
        from lmms_eval.api.instance import Instance

        metadata = {"task": self.name, "repeats": 1}
        instances = [
            Instance("generate_until", (), 0, metadata | {"doc_id": number}, resps=[text])
            for number, text in enumerate(predictions)
        ]
        found: dict[str, Values] = {}
        for ensemble in self.task._filters:
            ensemble.apply(instances, self.docs)
            with _by_itself():
                scored = [
                    self.task.process_results(dict(doc), [instance.filtered_resps[ensemble.name]])
                    for doc, instance in zip(self.docs, instances, strict=True)
                ]
            for number, results in enumerate(scored):
                for metric, item in results.items():
                    if aggregate := self._aggregate(metric):
                        name = metric if len(self.task._filters) == 1 else f"{metric},{ensemble.name}"
                        values = found.setdefault(name, Values([], [], aggregate))
                        values.questions.append(number)
                        values.items.append(item)
        return {name: values for name, values in found.items() if _is_number(values.aggregate(values.items))}

    def check_metrics(self, images: Sequence[str]) -> None:
        """
        Args:
            images: of each question.

        Raises:
            InputError: a metric cannot be computed without the questions of an image, as intervals need it.
        """
        for name, values in self.values([""] * len(images)).items():
            shown = [images[question] for question in values.questions]
            rest = [item for item, image in zip(values.items, shown, strict=True) if image != shown[0]]
            try:
                values.aggregate(rest or values.items)
            except Exception as error:  # whatever a task's own code raises
                raise InputError(
                    f"task {self.name}: its metric {name} cannot be computed for a part of the questions, as intervals "
                    f"need it ({type(error).__name__}: {error}); choose another task"
                ) from None

    def is_mean(self, metric: str) -> bool:
        """Whether a metric is the plain mean of one number for each question."""
        from lmms_eval.api.registry import get_aggregation

        return self.task.aggregation()[metric.split(",")[0]] is get_aggregation("mean")

    def _aggregate(self, metric: str) -> Aggregate | None:
        known = self.task.aggregation().get(metric)
        return known and partial(_quietly, known)


@cache
def _manager():
    """It reads the names of all tasks."""
    from lmms_eval.tasks import TaskManager
    from loguru import logger

    logger.remove()
    return TaskManager("ERROR", model_name=MODEL)


def _config(name: str) -> dict:
    manager = _manager()
    if name not in manager.all_tasks:
        near = get_close_matches(name, manager.all_tasks, n=3)
        raise InputError(
            f"evaluations: lmms-eval has no task {name!r}" + (f"; near are {', '.join(near)}" if near else "")
        )
    if not manager._name_is_task(name):
        raise InputError(f"evaluations: {name} is a group of lmms-eval's tasks; name its tasks instead")
    config = manager._get_config(name)
    if config.get("output_type", "generate_until") != "generate_until":
        raise InputError(
            f"evaluations: the task {name} is of type {config['output_type']}, and only generate_until can be asked; "
            "choose another"
        )
    return config


def _quietly(aggregate: Callable, items: list) -> float | None:
    """Without what it prints; files that it writes on the way are not kept."""
    scope = getattr(aggregate, "__globals__", {})
    state = {name: deepcopy(value) for name, value in scope.items() if type(value) in (dict, list, set)}
    with TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), _by_itself():
        more = {"args": Namespace(output_path=folder)} if "args" in inspect.signature(aggregate).parameters else {}
        try:
            return aggregate(items, **more)
        finally:  # some add up in their module what they are called with
            scope.update(state)


@contextmanager
def _by_itself() -> Iterator[None]:
    """A task's own code asks no judge on the internet, nor waits to ask again, and guesses alike each time."""
    random.seed(0)  # as lmms-eval seeds them
    np.random.seed(1234)
    alone = {"side_effect": OSError("no connections")}
    with patch("socket.getaddrinfo", **alone), patch("socket.socket.connect", **alone), patch("time.sleep"):
        yield


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
