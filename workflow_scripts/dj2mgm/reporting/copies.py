"""Clusters of similar images, of which a recipe has kept one each."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.files import read_jsonl, read_yaml
from dj2mgm.reporting.drawing import grouped, named_counts
from dj2mgm.reporting.experiment import Experiment
from dj2mgm.reporting.gallery import thumbnail

CLUSTERS, IMAGES = 4, 5  # shown; of a cluster the kept image and its nearest copies


@dataclass(frozen=True)
class Member:
    id: str
    image: str  # data URI
    distance: float | None  # from the kept one, as the operator measures it; None for the kept one itself


@dataclass(frozen=True)
class CopiesPart:
    """What one operator has found."""

    operator: str
    clusters: str  # how many
    dropped: str
    sizes: str  # "2 rows: 49, 3 rows: 51"
    largest: list[tuple[str, list[Member]]]  # number of rows, and some of them


def copies_found(experiment: Experiment) -> list[CopiesPart]:
    """Of the first run's filters, in their order; none if no operator of the recipe looks for copies.

    Raises:
        InputError: an image cannot be read.
    """
    run = experiment.runs[0]
    finders = [operator for operator in run.filter["operators"] if operator.get("copies", {}).get("clusters")]
    return [_part(experiment, run.stages["filter"], operator) for operator in finders]


def _part(experiment: Experiment, folder: Path, operator: dict) -> CopiesPart:
    sizes = {int(size): count for size, count in operator["copies"]["clusters"].items()}
    return CopiesPart(
        operator["operator"],
        grouped(sum(sizes.values())),
        grouped(operator["dropped"]),
        named_counts({f"{size} rows": sizes[size] for size in sorted(sizes)[:8]}),
        _largest(experiment, folder, operator["step"]),
    )


def _largest(experiment: Experiment, folder: Path, step: int) -> list[tuple[str, list[Member]]]:
    counts = Counter(row["copy_of"] for row in _dropped(folder, step))
    largest = heapq.nsmallest(CLUSTERS, counts, key=lambda kept: (-counts[kept], kept))
    members: dict[str, list[tuple[float, str]]] = {kept: [] for kept in largest}
    for row in _dropped(folder, step):
        if row["copy_of"] in members:
            members[row["copy_of"]].append((row["distance"], row["id"]))
    shown = {kept: sorted(copies)[: IMAGES - 1] for kept, copies in members.items()}
    wanted = {*shown, *(identifier for copies in shown.values() for _, identifier in copies)}
    root = Path(read_yaml(folder / "config.yaml")["image_root"])
    rows = read_jsonl(experiment.dataset / "pretrain.jsonl")
    images = {row["id"]: thumbnail(root, row["images"][0]) for row in rows if row["id"] in wanted}
    return [
        (
            grouped(counts[kept] + 1),
            [Member(kept, images[kept], None)] + [Member(name, images[name], apart) for apart, name in copies],
        )
        for kept, copies in shown.items()
    ]


def _dropped(folder: Path, step: int) -> Iterator[dict]:
    return (row for row in read_jsonl(folder / "dropped.jsonl") if row["step"] == step and row["event"] == "dropped")
