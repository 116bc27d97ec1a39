"""Tasks of lmms-eval with data from local files: their questions, and their own metrics of the answers by image.

A task aggregates all answers to one figure in its own way, such as an F1 or a mean of categories' means. Each image
gets the jackknife's pseudo-values (Tukey 1958). Their plain mean is the figure, and leaving out an image changes their
mean as much as it changes the figure. The pseudo-values of a plain mean are the values themselves.
"""

import inspect
import os
import random
import re
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

from dj2mgm.data.formats import IMAGE_TOKEN
from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import Rows
from dj2mgm.features.lmms_eval.lmms_eval_keys import LMMS_EVAL, check_lmms_eval
from dj2mgm.settings.string_formats import find_control_token

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # read on import; nothing is downloaded
MODEL_NAME = "dj2mgm"  # model name, which may select a task's prompt
Aggregate = Callable[[list], float | None]
MAX_UNITS = 200  # maximum number of units that are left out in turn; more images are grouped into units
Sums = dict[str, list[float]]  # by unit: sum and number of its values


@dataclass(frozen=True)
class Values:
    """Results of one metric for questions, and the task's function that aggregates them to one figure."""

    questions: list[int]  # numbers of the questions
    items: list  # for each question, a number or another input of the task's aggregation
    aggregate: Aggregate


class LmmsTask:
    """Task of lmms-eval with questions about one image each and answers as text.

    Args:
        name: name of the task.
        data: folder of its data, a copy of the hub's repository or written by `save_to_disk` of `datasets`.

    Raises:
        InputError: lmms-eval is not installed or has no such task, or the folder does not contain its data.
    """

    def __init__(self, name: str, data: Path):
        check_lmms_eval()
        if str(LMMS_EVAL) not in sys.path:
            sys.path.append(str(LMMS_EVAL))
        from lmms_eval.api.task import ConfigurableTask
        from tenacity import RetryError

        self.name = name
        config = _read_config(name) | {"dataset_path": str(data.resolve()), "dataset_kwargs": {}}
        if (data / "dataset_dict.json").is_file():
            config["dataset_kwargs"] = {"load_from_disk": True}
        elif not (data / "README.md").is_file():  # only a README.md defines the subsets of a repository
            config["dataset_name"] = None
        ConfigurableTask.download.retry.wait = lambda state: 0  # waiting does not help for a missing local file
        try:
            self.task = ConfigurableTask(config=config, model_name=MODEL_NAME)
        except (RetryError, KeyError, ValueError, AssertionError, IndexError) as error:
            cause = error.last_attempt.exception() if isinstance(error, RetryError) else error
            split = config.get("test_split") or config.get("validation_split")
            raise InputError(
                f"{data} is not the data of the task {name} with the split {split} ({type(cause).__name__}: {cause}); "
                "docs/features/lmms_eval.md says how to get it"
            ) from None
        self.docs = self.task.eval_docs_no_media

    @property
    def decoding(self) -> dict:
        """`max_new_tokens`, None if the task does not set it, and `until`, the texts that end an answer."""
        settings = self.task.config.generation_kwargs
        until = settings.get("until") or []
        return {
            "max_new_tokens": settings.get("max_new_tokens"),
            "until": [until] if isinstance(until, str) else list(until),
        }

    def iterate_questions(self) -> Iterator[tuple[str, Image.Image]]:
        """Yield prompt and image of each question, in the order of the data."""
        for number, doc in enumerate(self.task.task_docs):
            visuals = self.task.doc_to_visual(doc) or []
            if len(visuals) != 1 or not isinstance(visuals[0], Image.Image):
                raise InputError(
                    f"task {self.name}: question {number} has {len(visuals)} images or videos, expected one image; "
                    "choose another task"
                )
            # lmms-eval's prompt without examples; this workflow's models put the image at their own position
            prompt = (self.task.config.description or "") + self.task.doc_to_text(doc)
            prompt = prompt.replace(IMAGE_TOKEN, " ").strip()
            if control := find_control_token(prompt):
                raise InputError(
                    f"task {self.name}: question {number} contains the control token {control}; choose another task"
                )
            yield prompt, visuals[0]

    def compute_values(self, predictions: list[str]) -> dict[str, Values]:
        """Return the metrics' results for one answer to each question, without metrics that only write a file."""
        from lmms_eval.api.instance import Instance

        metadata = {"task": self.name, "repeats": 1}
        instances = [
            Instance("generate_until", (), 0, metadata | {"doc_id": number}, resps=[text])
            for number, text in enumerate(predictions)
        ]
        values_by_metric: dict[str, Values] = {}
        for ensemble in self.task._filters:
            ensemble.apply(instances, self.docs)
            with _isolate():
                results_by_question = [
                    self.task.process_results(dict(doc), [instance.filtered_resps[ensemble.name]])
                    for doc, instance in zip(self.docs, instances, strict=True)
                ]
            for number, results in enumerate(results_by_question):
                for metric, item in results.items():
                    if aggregate := self._find_aggregate(metric):
                        name = metric if len(self.task._filters) == 1 else f"{metric},{ensemble.name}"
                        values = values_by_metric.setdefault(name, Values([], [], aggregate))
                        values.questions.append(number)
                        values.items.append(item)
        return {name: values for name, values in values_by_metric.items() if _is_number(values.aggregate(values.items))}

    def check_metrics(self, images: Sequence[str]) -> None:
        """Check that all metrics can be computed without the questions of one of `images`, which intervals require."""
        for name, values in self.compute_values([""] * len(images)).items():
            value_images = [images[question] for question in values.questions]
            rest = [item for item, image in zip(values.items, value_images, strict=True) if image != value_images[0]]
            try:
                values.aggregate(rest or values.items)
            except Exception as error:  # a task's own code may raise any type
                raise InputError(
                    f"task {self.name}: its metric {name} cannot be computed for a part of the questions, which "
                    f"intervals require ({type(error).__name__}: {error}); choose another task"
                ) from None

    def is_mean(self, metric: str) -> bool:
        """Return whether a metric is the plain mean of one number per question."""
        from lmms_eval.api.registry import get_aggregation

        return self.task.aggregation()[metric.split(",")[0]] is get_aggregation("mean")

    def _find_aggregate(self, metric: str) -> Aggregate | None:
        aggregate = self.task.aggregation().get(metric)
        return None if aggregate is None else partial(_aggregate_quietly, aggregate)


def _find_folder(name: str) -> Path | None:
    """Return the folder of the only file that defines a task; None if it is a group, or several files define it."""
    line = re.compile(rf"^task\s*:\s*['\"]?{re.escape(name)}['\"]?\s*(#.*)?$", re.MULTILINE)
    files = (LMMS_EVAL / "lmms_eval/tasks").rglob("*.yaml")
    folders = [file.parent for file in files if line.search(file.read_text(encoding="utf-8", errors="ignore"))]
    return folders[0] if len(folders) == 1 else None


@cache
def _load_task_manager(folder: Path | None):
    """Return lmms-eval's task manager with the tasks of one folder; with all tasks, which takes seconds, for None."""
    from lmms_eval.tasks import TaskManager
    from loguru import logger

    logger.remove()
    tasks = {"include_path": str(folder), "include_defaults": False} if folder else {}
    return TaskManager("ERROR", model_name=MODEL_NAME, **tasks)


def _read_config(name: str) -> dict:
    """Return lmms-eval's configuration of a task; raise InputError unless the task is single and generates text."""
    manager = _load_task_manager(_find_folder(name))
    if name not in manager.all_tasks:
        suggestions = get_close_matches(name, manager.all_tasks, n=3)
        raise InputError(
            f"evaluations: lmms-eval has no task {name!r}"
            + (f"; did you mean {' or '.join(suggestions)}?" if suggestions else "; name one of its tasks")
        )
    if not manager._name_is_task(name):
        raise InputError(f"evaluations: {name} is a group of lmms-eval's tasks; name its tasks instead")
    config = manager._get_config(name)
    if config.get("output_type", "generate_until") != "generate_until":
        raise InputError(
            f"evaluations: the task {name} has the type {config['output_type']}, but only generate_until is supported; "
            "choose another task"
        )
    return config


def _aggregate_quietly(aggregate: Callable, items: list) -> float | None:
    """Aggregate without the task's printed output and temporary files."""
    scope = getattr(aggregate, "__globals__", {})
    state = {name: deepcopy(value) for name, value in scope.items() if type(value) in (dict, list, set)}
    with TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), _isolate():
        has_args = "args" in inspect.signature(aggregate).parameters
        arguments = {"args": Namespace(output_path=folder)} if has_args else {}
        try:
            return aggregate(items, **arguments)
        finally:  # some tasks collect their inputs in module variables
            scope.update(state)


@contextmanager
def _isolate() -> Iterator[None]:
    """Run a task's own code without network connections, without waiting, and with fixed random seeds."""
    random.seed(0)  # lmms-eval's seeds
    np.random.seed(1234)
    refusal = {"side_effect": OSError("no connections")}
    with patch("socket.getaddrinfo", **refusal), patch("socket.socket.connect", **refusal), patch("time.sleep"):
        yield


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def score_answers(task: LmmsTask, rows: Rows) -> Iterator[dict]:
    """Yield the rows of scores.jsonl from answers.jsonl; a metric is named <task>/<metric>."""
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        groups.setdefault((row["model"], row["images"]), []).append(row)
    for (model, images), answers in groups.items():
        answers.sort(key=lambda row: int(row["id"]))
        image_ids = [row["image"] for row in answers]
        by_unit: dict[str, dict[str, list[float]]] = {}
        for metric, values in task.compute_values([row["prediction"] for row in answers]).items():
            for unit, sums in _sum_values(values, image_ids, task.is_mean(metric)).items():
                by_unit.setdefault(unit, {})[f"{task.name}/{metric}"] = sums
        for unit in sorted(by_unit):
            yield {"model": model, "images": images, "id": unit, "values": by_unit[unit]}


def _sum_values(values: Values, image_ids: Sequence[str], is_mean: bool) -> Sums:
    images = [image_ids[question] for question in values.questions]
    if is_mean:
        sums: Sums = {image: [0.0, 0] for image in images}
        for image, value in zip(images, values.items, strict=True):
            sums[image][0] += float(value)
            sums[image][1] += 1
        return sums
    return compute_pseudo_values(values.aggregate, values.items, images)


def compute_pseudo_values(aggregate: Aggregate, items: list, images: Sequence[str]) -> Sums:
    """Return the sums of the pseudo-values of each image, or of each of `MAX_UNITS` groups of images.

    `aggregate` is the task's aggregation; `items`, its inputs, and `images` have one entry per question.
    """
    indices = {image: index for index, image in enumerate(dict.fromkeys(images))}
    is_grouped = len(indices) > MAX_UNITS
    units = [f"part {indices[image] % MAX_UNITS:03d}" if is_grouped else image for image in images]
    full_value, total = aggregate(items), len(items)
    counts = {unit: units.count(unit) for unit in dict.fromkeys(units)}
    if len(counts) == 1:
        return {unit: [full_value * count, count] for unit, count in counts.items()}
    sums = {}
    for unit, count in counts.items():
        rest = aggregate([item for item, item_unit in zip(items, units, strict=True) if item_unit != unit])
        sums[unit] = full_value * count - (rest - full_value) * (total - count)
    excess = (sum(sums.values()) - full_value * total) / total  # 0 for a plain mean
    return {unit: [sums[unit] - excess * count, count] for unit, count in counts.items()}
