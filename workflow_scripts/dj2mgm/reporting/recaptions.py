"""Rewritten captions of a run, read from the files of its stage synthesize."""

from dataclasses import dataclass

from dj2mgm.reporting.experiment_results import RunResults
from dj2mgm.storage.files import read_jsonl


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
