"""Sample images with what the models said about them, evenly spread over the held-out split: not the best ones."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from evaluation.caption_attributes import count_extra, judge_caption
from evaluation.vqa import is_correct
from formats.images import BadImage, load_image, locate_image
from reporting.comparison import GROUP_LABELS
from reporting.experiment import Experiment

ITEMS = 12
LONGEST_SIDE = 360  # px, of the embedded copies


@dataclass(frozen=True)
class Caption:
    label: str
    text: str
    kind: str  # own or shuffled
    verdict: str  # "5 of 6 right", empty where the objects are not known
    right: bool


@dataclass(frozen=True)
class Answer:
    question: str
    truth: str
    prediction: str
    right: bool


@dataclass(frozen=True)
class Item:
    identifier: str
    image: str  # data URI
    references: list[str]
    captions: list[Caption]
    answers: list[Answer]  # of the last model, on the image itself


def gallery(experiment: Experiment, items: int = ITEMS) -> list[Item]:
    """Up to `items` captioned images of the evaluation split.

    Raises:
        InputError: an image cannot be read.
    """
    captions: dict[str, dict[str, str]] = {}
    for row in experiment.captions:
        captions.setdefault(row["id"], {})[f"{row['model']}/{row['images']}"] = row["caption"]
    answers: dict[str, list[dict]] = {}
    for row in experiment.answers:
        if row["images"] == "own":
            answers.setdefault(row["id"], []).append(row)
    rows = [row for row in experiment.evaluation if row["id"] in captions]
    chosen = [rows[index * len(rows) // min(items, len(rows))] for index in range(min(items, len(rows)))]
    return [
        Item(
            row["id"],
            thumbnail(experiment.image_root, row["image"]),
            row["captions"],
            [_caption(group, captions[row["id"]][group], row["objects"]) for group in _shown(captions[row["id"]])],
            _last_models_answers(answers.get(row["id"], [])),
        )
        for row in chosen
    ]


def _shown(captions: dict[str, str]) -> list[str]:
    """Both models on the image itself, and the last of them on another image."""
    return [group for group in ("finetune/own", "pretrain/own", "finetune/shuffled") if group in captions]


def _caption(group: str, text: str, objects: list[dict]) -> Caption:
    right = judge_caption(text, objects)
    verdict = f"{right.sum()} of {right.size} right" if objects else ""
    extra = count_extra(text, objects) if objects else 0
    if extra:
        verdict += f", {extra} extra"
    kind = group.split("/")[1]
    return Caption(GROUP_LABELS[group], text.strip(), kind, verdict, bool(objects) and bool(right.all()) and not extra)


def _last_models_answers(rows: list[dict]) -> list[Answer]:
    models = {row["model"] for row in rows}
    last = "finetune" if "finetune" in models else "pretrain"
    return [
        Answer(row["question"], row["answer"], row["prediction"].strip(), is_correct(row))
        for row in rows
        if row["model"] == last
    ]


def thumbnail(image_root: Path, relative: str) -> str:
    """The image, shrunk to LONGEST_SIDE if it is larger, as a WebP data URI."""
    try:
        image = load_image(locate_image(image_root, relative))
    except BadImage as error:
        raise InputError(f"evaluation image {error}; restore the image or remove its evaluation row") from None
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=90)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
