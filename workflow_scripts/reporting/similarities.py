"""How well captions fit their images before recaptioning and after, as one histogram."""

from dataclasses import dataclass

import numpy as np

from files import read_jsonl
from reporting.bars import BINS, Bars, stacked_bars
from reporting.experiment import Run
from reporting.recaptions import Recaption
from reporting.scales import Scale, Tick


@dataclass(frozen=True)
class Similarities:
    """Similarity of image and caption, before (bars rise) and after (bars hang), on one axis.

    A bar's height is the square root of its rows: captions that fit are in a few bins, and all others would vanish.
    """

    before: list[Bars]  # kept: captions that stayed; replaced: captions that were written anew
    after: list[Bars]  # kept; accepted and rejected: new captions
    ticks: list[Tick]
    limit: float | None  # per cent of the axis; None if there is none, or off the axis
    limit_text: str
    counts: dict[str, int]


def similarities(run: Run, recaptions: list[Recaption]) -> Similarities | None:
    """None if no row was recaptioned. Rows for which the captioner had nothing usable are among the replaced ones."""
    if not recaptions:
        return None
    touched = {recaption.id for recaption in recaptions}
    stats = read_jsonl(run.stages["synthesize"] / "stats.jsonl")
    scores = {row["id"]: row.get("image_text_similarity") for row in stats}
    values = {
        "kept": [score[0] for name, score in scores.items() if score and name not in touched],
        "replaced": [recaption.original_similarity for recaption in recaptions],
        "accepted": [recaption.similarity for recaption in recaptions if recaption.accepted],
        "rejected": [r.similarity for r in recaptions if r.similarity is not None and not r.accepted],
    }
    everything = [value for numbers in values.values() for value in numbers]
    records = [operator.get("recaption") for operator in run.synthesize["operators"]]
    limit = next((record["min_similarity"] for record in records if record), None)
    edges = bin_edges_at(min(everything), max(everything), limit)
    counts = {name: np.histogram(numbers, edges)[0] for name, numbers in values.items()}
    scale = Scale(edges[0], edges[-1])
    sides = {"before": ("kept", "replaced"), "after": ("kept", "accepted", "rejected")}
    highest = max(int(sum(counts[name] for name in names).max()) for names in sides.values())
    before, after = (
        stacked_bars(_square_roots({name: counts[name] for name in names}, highest), highest, down=side == "after")
        for side, names in sides.items()
    )
    where = scale.at(limit) if limit is not None and edges[0] <= limit <= edges[-1] else None
    sizes = {name: len(numbers) for name, numbers in values.items()}
    return Similarities(before, after, scale.ticks(5), where, "" if limit is None else f"{limit:.3g}", sizes)


def bin_edges_at(low: float, high: float, limit: float | None) -> np.ndarray:
    """Edges of the bins; the limit is one of them, so that no bin holds rows of both sides."""
    width = (high - low) / (2 * BINS) or 1.0
    start = low if limit is None else limit
    return start + width * np.arange(np.floor((low - start) / width), np.ceil((high - start) / width + 1e-9) + 1)


def _square_roots(counts: dict[str, np.ndarray], highest: int) -> dict[str, np.ndarray]:
    """Counts by series, stretched so that their sum in each bin is √(sum × highest); series keep their shares."""
    total = np.maximum(sum(counts.values()), 1)
    return {series: numbers * np.sqrt(highest / total) for series, numbers in counts.items()}
