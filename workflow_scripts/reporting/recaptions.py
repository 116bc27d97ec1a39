"""Captions that were written anew: which were accepted, how they scored and, where that is known, which are true."""

from dataclasses import dataclass
from pathlib import Path

from evaluation.caption_attributes import is_true
from files import read_jsonl, read_yaml
from reporting.experiment import Experiment, Run
from reporting.gallery import evenly_spread, thumbnail
from reporting.scales import grouped

ITEMS = 12


@dataclass(frozen=True)
class Recaption:
    """A row whose caption was judged too far from its image, and what the captioner made of it."""

    id: str
    original: str
    original_similarity: float
    caption: str | None  # None: the captioner returned nothing usable, for the reason in `problem`
    similarity: float | None
    log_likelihood: float | None  # nats; None where the captioner gives none
    problem: str | None
    dropped_by: str | None  # operator
    dropped_in_step: int | None

    @property
    def accepted(self) -> bool:
        return self.caption is not None and self.dropped_by is None


def read_recaptions(run: Run) -> list[Recaption]:
    """All of a run's, sorted by id; none if it has no stage synthesize."""
    if "synthesize" not in run.stages:
        return []
    folder = run.stages["synthesize"]
    rows = [row for row in read_jsonl(folder / "synthesized.jsonl") if row.get("recaption")]
    rows += [row for row in read_jsonl(folder / "dropped.jsonl") if row["event"] == "dropped" and row.get("recaption")]
    found = [
        Recaption(
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
    return sorted(found, key=lambda recaption: recaption.id)


def read_truth(experiment: Experiment) -> dict[str, dict]:
    """Rows of ground_truth.jsonl by id; empty for a dataset that has none."""
    path = experiment.dataset / "ground_truth.jsonl"
    return {row["id"]: row for row in read_jsonl(path)} if path.is_file() else {}


@dataclass(frozen=True)
class Quality:
    """One figure about the synthesis that ground truth makes possible."""

    value: str
    meaning: str


def quality(run: Run, recaptions: list[Recaption], truth: dict[str, dict]) -> list[Quality]:
    """Shares of mismatched and clean pairs that were recaptioned or dropped, and of accepted captions that are true."""
    if not recaptions or not truth:
        return []
    pairs = {row["id"] for row in read_jsonl(run.stages["filter"] / "filtered.jsonl")}
    left = {row["id"] for row in read_jsonl(run.stages["synthesize"] / "stats.jsonl")}
    touched = {recaption.id for recaption in recaptions} | (pairs - left)
    figures = []
    for fault, wish in (("mismatched", "captions of other images"), ("clean", "captions that were right")):
        planted = {identifier for identifier in pairs if truth[identifier]["fault"] == fault}
        if planted:
            share = f"{100 * len(planted & touched) / len(planted):.1f} %"
            figures.append(Quality(share, f"of {grouped(len(planted))} {wish} were replaced or dropped"))
    accepted = [recaption for recaption in recaptions if recaption.accepted]
    if accepted:
        right = sum(is_true(recaption.caption, truth[recaption.id]["caption"]) for recaption in accepted)
        share = f"{100 * right / len(accepted):.1f} %"
        figures.append(Quality(share, f"of {grouped(len(accepted))} accepted recaptions state nothing that is false"))
    return figures


@dataclass(frozen=True)
class Item:
    """One recaptioned row, for the gallery. `true` and `original_true` are None where the truth is not known."""

    recaption: Recaption
    image: str  # data URI
    original_true: bool | None
    true: bool | None


def recaption_gallery(run: Run, recaptions: list[Recaption], truth: dict[str, dict], items: int = ITEMS) -> list[Item]:
    """Evenly spread over all recaptioned rows in the order of their ids.

    Raises:
        InputError: an image cannot be read.
    """
    chosen = evenly_spread(recaptions, items)
    if not chosen:
        return []
    root = Path(read_yaml(run.stages["synthesize"] / "config.yaml")["image_root"])
    wanted = {recaption.id for recaption in chosen}
    rows = read_jsonl(run.stages["filter"] / "filtered.jsonl")
    images = {row["id"]: row["images"][0] for row in rows if row["id"] in wanted}

    def judge(caption: str | None, identifier: str) -> bool | None:
        return is_true(caption, truth[identifier]["caption"]) if caption and identifier in truth else None

    return [
        Item(one, thumbnail(root, images[one.id]), judge(one.original, one.id), judge(one.caption, one.id))
        for one in chosen
    ]
