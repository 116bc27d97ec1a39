"""Held-out images with captions and answers, rewritten captions, and clusters of near-duplicate images."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.data.images import BadImage, load_image, locate_image
from dj2mgm.errors import InputError
from dj2mgm.evaluation.caption_attributes import count_extra, is_true, judge_caption
from dj2mgm.evaluation.vqa import is_correct
from dj2mgm.records.page_records import read_image_root
from dj2mgm.reporting.comparison import MODEL_LABELS
from dj2mgm.reporting.experiment import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import encode_shrunk_image, format_integer, select_evenly
from dj2mgm.score_groups import OWN
from dj2mgm.storage.files import read_jsonl

ITEMS = 12
MAX_SIDE = 320  # px, of embedded images
QUALITY = 85


@dataclass(frozen=True)
class GalleryCaption:
    """A generated caption."""

    stage: str
    text: str
    verdict: str  # "5 of 6 right"; empty if the objects are not known
    right: bool


@dataclass(frozen=True)
class ExperimentCaptions:
    """Captions of an image by the models of one experiment, first seed."""

    experiment: str
    index: int
    captions: list[GalleryCaption]


@dataclass(frozen=True)
class GalleryAnswer:
    """A generated answer."""

    experiment: str
    index: int
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


def build_gallery(experiments: list[tuple[int, ExperimentResults]], items: int = ITEMS) -> list[GalleryItem]:
    """Return images of the evaluation split that all experiments captioned.

    Args:
        experiments: the experiments, each with its index in the report.
        items: largest number of images.
    """
    first_experiment = experiments[0][1]
    captions = {experiment.name: _read_outputs(experiment, "captions.jsonl", False) for _, experiment in experiments}
    answers = {experiment.name: _read_outputs(experiment, "answers.jsonl", True) for _, experiment in experiments}
    rows = [row for row in first_experiment.evaluation if all(row["id"] in outputs for outputs in captions.values())]
    return [
        GalleryItem(
            row["id"],
            load_thumbnail(first_experiment.image_root, row["image"]),
            row["captions"][0],
            [
                ExperimentCaptions(e.name, index, _build_captions(captions[e.name][row["id"]], row))
                for index, e in experiments
            ],
            _build_questions([(index, e.name, answers[e.name].get(row["id"], [])) for index, e in experiments]),
        )
        for row in select_evenly(rows, items)
    ]


def _read_outputs(experiment: ExperimentResults, file: str, may_be_empty: bool) -> dict[str, list[dict]]:
    """Return the outputs of the first run's models for the right images (no shuffled images), by image."""
    outputs: dict[str, list[dict]] = {}
    for row in read_jsonl(experiment.runs[0].stages["generate"] / file, may_be_empty):
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


def _build_questions(outputs: list[tuple[int, str, list[dict]]]) -> list[GalleryQuestion]:
    """Return the questions about an image in their order, with answers by the models of the last training stage."""
    questions: dict[str, GalleryQuestion] = {}
    for index, name, rows in outputs:
        last = next((model for model in MODEL_LABELS if any(row["model"] == model for row in rows)), None)
        for row in rows:
            if row["model"] == last:
                question = questions.setdefault(row["question"], GalleryQuestion(row["question"], row["answer"], []))
                question.answers.append(GalleryAnswer(name, index, row["prediction"].strip(), is_correct(row)))
    return list(questions.values())


def load_thumbnail(image_root: Path, relative: str) -> str:
    """Return the image as a WebP data URI, shrunk to MAX_SIDE if it is larger."""
    try:
        image = load_image(locate_image(image_root, relative))
    except BadImage as error:
        raise InputError(f"the gallery's image {error}; restore the image or remove its row") from None
    return encode_shrunk_image(image, MAX_SIDE, QUALITY)


RECAPTIONS_SHOWN = 12


@dataclass(frozen=True)
class RecaptionedRow:
    """A row with a caption of low similarity to its image, and the captioner's new caption."""

    id: str
    original: str
    original_similarity: float
    caption: str | None  # None: the captioner returned no usable caption, for the reason in `problem`
    similarity: float | None
    log_likelihood: float | None  # nats; None if the captioner gives none
    problem: str | None
    dropped_by: str | None  # operator
    dropped_in_step: int | None

    @property
    def accepted(self) -> bool:
        return self.caption is not None and self.dropped_by is None


def read_recaptions(run: RunResults) -> list[RecaptionedRow]:
    """Read the rewritten captions of a run, sorted by id; empty if it has no stage synthesize."""
    if "synthesize" not in run.stages:
        return []
    folder = run.stages["synthesize"]
    rows = [row for row in read_jsonl(folder / "synthesized.jsonl") if row.get("recaption")]
    rows += [row for row in read_jsonl(folder / "dropped.jsonl") if row["event"] == "dropped" and row.get("recaption")]
    recaptions = [
        RecaptionedRow(
            row["id"],
            record["original"],
            record["original_similarity"],
            record["caption"],
            record["similarity"],
            record["log_likelihood"],
            record.get("problem"),
            row.get("operator"),
            row.get("step"),
        )
        for row in rows
        for record in [row["recaption"]]
    ]
    return sorted(recaptions, key=lambda recaption: recaption.id)


def read_truth(experiment: ExperimentResults) -> dict[str, dict]:
    """Read the rows of ground_truth.jsonl by id; empty if the dataset has none."""
    path = experiment.dataset / "ground_truth.jsonl"
    return {row["id"]: row for row in read_jsonl(path)} if path.is_file() else {}


@dataclass(frozen=True)
class QualityFigure:
    """A measure of the synthesis against ground truth."""

    value: str
    meaning: str


def measure_synthesis_quality(
    run: RunResults, recaptions: list[RecaptionedRow], truth: dict[str, dict]
) -> list[QualityFigure]:
    """Return the shares of mismatched and clean pairs that were replaced or dropped, and of true new captions."""
    if not recaptions or not truth:
        return []
    pair_ids = {row["id"] for row in read_jsonl(run.stages["filter"] / "filtered.jsonl")}
    remaining_ids = {row["id"] for row in read_jsonl(run.stages["synthesize"] / "stats.jsonl")}
    changed_ids = {recaption.id for recaption in recaptions} | (pair_ids - remaining_ids)
    figures = []
    for fault, description in (
        ("mismatched", "captions swapped between images on purpose"),
        ("clean", "correct captions"),
    ):
        fault_ids = {identifier for identifier in pair_ids if truth[identifier]["fault"] == fault}
        if fault_ids:
            share = f"{100 * len(fault_ids & changed_ids) / len(fault_ids):.1f} %"
            figures.append(
                QualityFigure(share, f"of {format_integer(len(fault_ids))} {description} were replaced or dropped")
            )
    accepted = [recaption for recaption in recaptions if recaption.accepted]
    if accepted:
        right = sum(is_true(recaption.caption, truth[recaption.id]["caption"]) for recaption in accepted)
        share = f"{100 * right / len(accepted):.1f} %"
        figures.append(
            QualityFigure(share, f"of {format_integer(len(accepted))} accepted new captions state nothing false")
        )
    return figures


@dataclass(frozen=True)
class RecaptionItem:
    """A recaptioned row in the gallery; `true` and `original_true` are None without ground truth."""

    recaption: RecaptionedRow
    image: str  # data URI
    original_true: bool | None
    true: bool | None


def build_recaption_gallery(
    run: RunResults, recaptions: list[RecaptionedRow], truth: dict[str, dict], items: int = RECAPTIONS_SHOWN
) -> list[RecaptionItem]:
    """Return rows evenly spread over all recaptioned rows, sorted by id."""
    examples = select_evenly(recaptions, items)
    if not examples:
        return []
    root = read_image_root(run.stages["synthesize"])
    ids = {recaption.id for recaption in examples}
    rows = read_jsonl(run.stages["filter"] / "filtered.jsonl")
    images = {row["id"]: row["images"][0] for row in rows if row["id"] in ids}

    def judge(caption: str | None, identifier: str) -> bool | None:
        return is_true(caption, truth[identifier]["caption"]) if caption and identifier in truth else None

    return [
        RecaptionItem(
            recaption,
            load_thumbnail(root, images[recaption.id]),
            judge(recaption.original, recaption.id),
            judge(recaption.caption, recaption.id),
        )
        for recaption in examples
    ]


CLUSTERS, CLUSTER_IMAGES = 4, 5  # number of clusters shown, and of images per cluster


@dataclass(frozen=True)
class ClusterMember:
    """A row of a cluster."""

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
    deduplicators = [operator for operator in run.filter["operators"] if operator.get("copies", {}).get("clusters")]
    return [_build_section(experiment, run.stages["filter"], operator) for operator in deduplicators]


def _build_section(experiment: ExperimentResults, folder: Path, operator: dict) -> DuplicateSection:
    sizes = {int(size): count for size, count in operator["copies"]["clusters"].items()}
    return DuplicateSection(
        operator["operator"],
        format_integer(sum(sizes.values())),
        format_integer(operator["dropped"]),
        ", ".join(f"{format_integer(sizes[size])} with {size} rows" for size in sorted(sizes)[:8]),
        _find_largest(experiment, folder, operator["step"]),
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
