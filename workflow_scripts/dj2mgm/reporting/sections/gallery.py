"""Galleries: held-out images with the models' captions and answers, and clusters of near-duplicate images."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.evaluation.caption_attributes import count_extra, judge_caption
from dj2mgm.evaluation.vqa import is_correct
from dj2mgm.records import OperatorSummary, read_image_root
from dj2mgm.reporting.comparison import MODEL_LABELS
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import format_integer, load_thumbnail, select_evenly
from dj2mgm.score_groups import OWN
from dj2mgm.storage.files import read_jsonl

GALLERY_ITEMS = 12
CLUSTERS, CLUSTER_IMAGES = 4, 5  # number of clusters shown, and of images per cluster


@dataclass(frozen=True)
class GalleryCaption:
    """A caption of one stage, compared with the image's objects."""

    stage: str
    text: str
    verdict: str  # "5 of 6 right"; empty if the objects are not known
    right: bool


@dataclass(frozen=True)
class ExperimentCaptions:
    """Captions of an image by the models of one experiment, first seed."""

    experiment: str
    captions: list[GalleryCaption]


@dataclass(frozen=True)
class GalleryAnswer:
    """One experiment's answer to a question."""

    experiment: str
    text: str
    right: bool


@dataclass(frozen=True)
class GalleryQuestion:
    """A question with its right answer and the generated answers."""

    text: str
    truth: str
    answers: list[GalleryAnswer]  # one per experiment, by the model of its last training stage


@dataclass(frozen=True)
class GalleryItem:
    """A held-out image with its captions, questions and answers."""

    identifier: str
    image: str  # data URI
    reference: str
    captions_by_experiment: list[ExperimentCaptions]
    questions: list[GalleryQuestion]


def build_gallery(experiments: list[ExperimentResults], items: int = GALLERY_ITEMS) -> list[GalleryItem]:
    """Return at most `items` images of the evaluation split that all experiments captioned."""
    first_experiment = experiments[0]
    captions = {experiment.name: read_outputs(experiment.runs[0], "captions.jsonl") for experiment in experiments}
    answers = {experiment.name: read_outputs(experiment.runs[0], "answers.jsonl", True) for experiment in experiments}
    rows = [row for row in first_experiment.evaluation if all(row["id"] in outputs for outputs in captions.values())]
    return [
        GalleryItem(
            row["id"],
            load_thumbnail(first_experiment.image_root, row["image"]),
            row["captions"][0],
            [ExperimentCaptions(e.name, _build_captions(captions[e.name][row["id"]], row)) for e in experiments],
            build_questions({name: outputs.get(row["id"], []) for name, outputs in answers.items()}),
        )
        for row in select_evenly(rows, items)
    ]


def read_outputs(run: RunResults, file: str, may_be_empty: bool = False) -> dict[str, list[dict]]:
    """Return the outputs of a run's models for the right images (no shuffled images), by image."""
    outputs: dict[str, list[dict]] = {}
    for row in read_jsonl(run.stages["generate"] / file, may_be_empty):
        if row["images"] == OWN:
            outputs.setdefault(row["id"], []).append(row)
    return outputs


def _build_captions(outputs: list[dict], row: dict) -> list[GalleryCaption]:
    by_model = {caption["model"]: caption["caption"] for caption in outputs}
    return [
        _build_caption(label.lower(), by_model[model], row["objects"])
        for model, label in MODEL_LABELS.items()
        if model in by_model
    ]


def _build_caption(stage: str, text: str, objects: list[dict]) -> GalleryCaption:
    if not objects:
        return GalleryCaption(stage, text.strip(), "", False)
    right, extra = judge_caption(text, objects), count_extra(text, objects)
    verdict = f"{right.sum()} of {right.size} right" + (f", {extra} extra" if extra else "")
    return GalleryCaption(stage, text.strip(), verdict, bool(right.all()) and not extra)


def build_questions(outputs: dict[str, list[dict]]) -> list[GalleryQuestion]:
    """Return the questions about an image in their order, with answers by the models of the last training stage.

    `outputs` are the answers by experiment.
    """
    questions: dict[str, GalleryQuestion] = {}
    for name, rows in outputs.items():
        last = next((model for model in MODEL_LABELS if any(row["model"] == model for row in rows)), None)
        for row in rows:
            if row["model"] == last:
                question = questions.setdefault(row["question"], GalleryQuestion(row["question"], row["answer"], []))
                question.answers.append(GalleryAnswer(name, row["prediction"].strip(), is_correct(row)))
    return list(questions.values())


@dataclass(frozen=True)
class ClusterMember:
    """A near-duplicate, or the row that was kept in its place."""

    id: str
    image: str  # data URI
    distance: float | None  # from the kept row, as the operator measures it; None for the kept row


@dataclass(frozen=True)
class DuplicateSection:
    """The clusters that one operator found."""

    operator: str
    clusters: str  # number of clusters
    dropped: str  # number of rows
    sizes: str  # "49 with 2 rows, 51 with 3 rows"
    largest: list[tuple[str, list[ClusterMember]]]  # number of rows, and some of them


def build_duplicate_sections(experiment: ExperimentResults) -> list[DuplicateSection]:
    """Return a section for each near-deduplicator of the first run's filter, in their order."""
    run = experiment.runs[0]
    deduplicators = [
        operator for operator in run.filter.operators if operator.reports.get("copies", {}).get("clusters")
    ]
    return [_build_section(experiment, run.stages["filter"], operator) for operator in deduplicators]


def _build_section(experiment: ExperimentResults, folder: Path, operator: OperatorSummary) -> DuplicateSection:
    sizes = {int(size): count for size, count in operator.reports["copies"]["clusters"].items()}
    return DuplicateSection(
        operator.operator,
        format_integer(sum(sizes.values())),
        format_integer(operator.dropped),
        ", ".join(f"{format_integer(sizes[size])} with {size} rows" for size in sorted(sizes)[:8]),
        _find_largest(experiment, folder, operator.step),
    )


def _find_largest(experiment: ExperimentResults, folder: Path, step: int) -> list[tuple[str, list[ClusterMember]]]:
    """Return the largest clusters of an operator, each with its size and its nearest rows, the kept row first."""
    counts = Counter(row["copy_of"] for row in _read_dropped(folder, step))
    largest = heapq.nsmallest(CLUSTERS, counts, key=lambda kept_id: (-counts[kept_id], kept_id))
    members: dict[str, list[tuple[float, str]]] = {kept_id: [] for kept_id in largest}
    for row in _read_dropped(folder, step):
        if row["copy_of"] in members:
            members[row["copy_of"]].append((row["distance"], row["id"]))
    shown_members = {kept_id: sorted(dropped)[: CLUSTER_IMAGES - 1] for kept_id, dropped in members.items()}
    shown_ids = {*shown_members, *(identifier for dropped in shown_members.values() for _, identifier in dropped)}
    root = read_image_root(folder)
    rows = read_jsonl(experiment.dataset / "pretrain.jsonl")
    images = {row["id"]: load_thumbnail(root, row["images"][0]) for row in rows if row["id"] in shown_ids}
    return [
        (
            format_integer(counts[kept_id] + 1),
            [ClusterMember(kept_id, images[kept_id], None)]
            + [ClusterMember(name, images[name], distance) for distance, name in dropped],
        )
        for kept_id, dropped in shown_members.items()
    ]


def _read_dropped(folder: Path, step: int) -> Iterator[dict]:
    return (row for row in read_jsonl(folder / "dropped.jsonl") if row["step"] == step and row["event"] == "dropped")
