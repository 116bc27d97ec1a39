"""Clusters of near-duplicate images, of which a recipe keeps one row each."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.files import read_jsonl, read_yaml
from dj2mgm.reporting.experiment import ExperimentResults
from dj2mgm.reporting.gallery import thumbnail
from dj2mgm.reporting.rendering import format_integer

CLUSTERS, IMAGES = 4, 5  # number of clusters shown, and of images per cluster


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


def duplicate_sections(experiment: ExperimentResults) -> list[DuplicateSection]:
    """Return a section for each near-deduplicator of the first run's filter, in their order.

    Raises:
        InputError: an image cannot be read.
    """
    run = experiment.runs[0]
    finders = [operator for operator in run.filter["operators"] if operator.get("copies", {}).get("clusters")]
    return [_part(experiment, run.stages["filter"], operator) for operator in finders]


def _part(experiment: ExperimentResults, folder: Path, operator: dict) -> DuplicateSection:
    sizes = {int(size): count for size, count in operator["copies"]["clusters"].items()}
    return DuplicateSection(
        operator["operator"],
        format_integer(sum(sizes.values())),
        format_integer(operator["dropped"]),
        ", ".join(f"{format_integer(sizes[size])} with {size} rows" for size in sorted(sizes)[:8]),
        _largest(experiment, folder, operator["step"]),
    )


def _largest(experiment: ExperimentResults, folder: Path, step: int) -> list[tuple[str, list[ClusterMember]]]:
    counts = Counter(row["copy_of"] for row in _dropped(folder, step))
    largest = heapq.nsmallest(CLUSTERS, counts, key=lambda kept: (-counts[kept], kept))
    members: dict[str, list[tuple[float, str]]] = {kept: [] for kept in largest}
    for row in _dropped(folder, step):
        if row["copy_of"] in members:
            members[row["copy_of"]].append((row["distance"], row["id"]))
    shown = {kept: sorted(dropped)[: IMAGES - 1] for kept, dropped in members.items()}
    shown_ids = {*shown, *(identifier for dropped in shown.values() for _, identifier in dropped)}
    root = Path(read_yaml(folder / "config.yaml")["image_root"])
    rows = read_jsonl(experiment.dataset / "pretrain.jsonl")
    images = {row["id"]: thumbnail(root, row["images"][0]) for row in rows if row["id"] in shown_ids}
    return [
        (
            format_integer(counts[kept] + 1),
            [ClusterMember(kept, images[kept], None)]
            + [ClusterMember(name, images[name], distance) for distance, name in dropped],
        )
        for kept, dropped in shown.items()
    ]


def _dropped(folder: Path, step: int) -> Iterator[dict]:
    return (row for row in read_jsonl(folder / "dropped.jsonl") if row["step"] == step and row["event"] == "dropped")
