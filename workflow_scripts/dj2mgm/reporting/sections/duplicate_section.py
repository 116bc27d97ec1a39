"""Clusters of near-duplicate images, with some of their rows."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.records.page_records import read_image_root
from dj2mgm.records.recipe_summary import OperatorSummary
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import format_integer, load_thumbnail
from dj2mgm.storage.files import read_jsonl

CLUSTERS, CLUSTER_IMAGES = 4, 5  # number of clusters shown, and of images per cluster


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
