"""Rewritten captions of a run: their rows, a gallery with images, and their quality against ground truth."""

from dataclasses import dataclass

from dj2mgm.evaluation.caption_attributes import is_true
from dj2mgm.records.page_records import read_image_root
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import format_integer, load_thumbnail, select_evenly
from dj2mgm.storage.files import read_jsonl

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
