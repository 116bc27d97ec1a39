"""Held-out images and what each experiment's models said of them: evenly spread over the split, not the best ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from errors import InputError
from evaluation.caption_attributes import count_extra, judge_caption
from evaluation.vqa import is_correct
from files import read_jsonl
from formats.images import BadImage, load_image, locate_image
from reporting.experiment import Experiment
from reporting.templates import data_uri

ITEMS = 12
LONGEST_SIDE = 320  # px, of the embedded copies
QUALITY = 85
STAGES = {"finetune": "fine-tuned", "pretrain": "pretrained"}
Row = TypeVar("Row")


@dataclass(frozen=True)
class Caption:
    stage: str
    text: str
    verdict: str  # "5 of 6 right", empty where the objects are not known
    right: bool


@dataclass(frozen=True)
class Speaker:
    """One experiment's captions of an image, with its first seed."""

    experiment: str
    index: int
    captions: list[Caption]


@dataclass(frozen=True)
class Answer:
    experiment: str
    index: int
    text: str
    right: bool


@dataclass(frozen=True)
class Question:
    text: str
    truth: str
    answers: list[Answer]  # of each experiment's most trained model


@dataclass(frozen=True)
class Item:
    identifier: str
    image: str  # data URI
    reference: str
    speakers: list[Speaker]
    questions: list[Question]


def evenly_spread(rows: list[Row], count: int) -> list[Row]:
    """`count` of the rows at equal distances, all if there are fewer."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def gallery(experiments: list[tuple[int, Experiment]], items: int = ITEMS) -> list[Item]:
    """Images of the evaluation split that every experiment captioned; all must be on the same dataset.

    Args:
        experiments: with their index on the page.

    Raises:
        InputError: an image cannot be read.
    """
    first = experiments[0][1]
    captions = {experiment.name: _by_image(experiment, "captions.jsonl", False) for _, experiment in experiments}
    answers = {experiment.name: _by_image(experiment, "answers.jsonl", True) for _, experiment in experiments}
    rows = [row for row in first.evaluation if all(row["id"] in said for said in captions.values())]
    return [
        Item(
            row["id"],
            thumbnail(first.image_root, row["image"]),
            row["captions"][0],
            [Speaker(e.name, index, _captions(captions[e.name][row["id"]], row)) for index, e in experiments],
            _questions([(index, e.name, answers[e.name].get(row["id"], [])) for index, e in experiments]),
        )
        for row in evenly_spread(rows, items)
    ]


def _by_image(experiment: Experiment, file: str, may_be_empty: bool) -> dict[str, list[dict]]:
    """What the first run's models said about each image, when it was the image they were shown."""
    said: dict[str, list[dict]] = {}
    for row in read_jsonl(experiment.runs[0].stages["generate"] / file, may_be_empty):
        if row["images"] == "own":
            said.setdefault(row["id"], []).append(row)
    return said


def _captions(said: list[dict], row: dict) -> list[Caption]:
    by_model = {caption["model"]: caption["caption"] for caption in said}
    return [_caption(label, by_model[model], row["objects"]) for model, label in STAGES.items() if model in by_model]


def _caption(stage: str, text: str, objects: list[dict]) -> Caption:
    if not objects:
        return Caption(stage, text.strip(), "", False)
    right, extra = judge_caption(text, objects), count_extra(text, objects)
    verdict = f"{right.sum()} of {right.size} right" + (f", {extra} extra" if extra else "")
    return Caption(stage, text.strip(), verdict, bool(right.all()) and not extra)


def _questions(said: list[tuple[int, str, list[dict]]]) -> list[Question]:
    """The questions about an image in their order, answered by each experiment's most trained model."""
    questions: dict[str, Question] = {}
    for index, name, rows in said:
        last = next((model for model in STAGES if any(row["model"] == model for row in rows)), None)
        for row in rows:
            if row["model"] == last:
                question = questions.setdefault(row["question"], Question(row["question"], row["answer"], []))
                question.answers.append(Answer(name, index, row["prediction"].strip(), is_correct(row)))
    return list(questions.values())


def thumbnail(image_root: Path, relative: str) -> str:
    """The image, shrunk to LONGEST_SIDE if it is larger, as a WebP data URI.

    Raises:
        InputError: the image cannot be read.
    """
    try:
        image = load_image(locate_image(image_root, relative))
    except BadImage as error:
        raise InputError(f"image of the gallery {error}; restore the image or remove its row") from None
    return data_uri(image, LONGEST_SIDE, QUALITY)
