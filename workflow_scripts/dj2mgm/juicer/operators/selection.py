"""Filters that keep so many rows: which ones they are, is said when all rows have been measured.

Where rows are equal in what counts, the earlier one is kept. Draws depend on the seed, the filter's name and a row's
id, and not on the other rows: with a row more or less, the others are drawn as before. Two filters of a recipe draw
differently: else the second would prefer rows of the groups that the first has cut.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from data_juicer.ops.base_op import Filter
from data_juicer.utils.constant import Fields

from .keep_fraction import check_fraction

NO_GROUP = -1
BITS = 53  # that a float64 holds
SEEDS = 2**31  # that Faiss takes


class Rows(Iterable[dict], Sized, Protocol):
    """All rows, as often as they are asked for, with their stats and what `compute_stats` has added."""


@dataclass(frozen=True)
class Selection:
    """Of N rows, in their order.

    Args:
        kept: (N,) bool.
        stats: more stats of the rows, by name: (N,) numbers.
    """

    kept: np.ndarray
    stats: dict[str, np.ndarray] = field(default_factory=dict)

    def part(self, start: int, count: int) -> "Selection":
        rows = slice(start, start + count)
        return Selection(self.kept[rows], {name: values[rows] for name, values in self.stats.items()})

    def stats_of_rows(self) -> Iterator[dict]:
        for row in range(len(self.kept)):
            yield {name: values[row].item() for name, values in self.stats.items()}


class SelectionFilter(Filter):
    """A filter that declares `select`. It keeps a share of the rows or a number of them, all if there are fewer."""

    _batched_op = True
    needs_all_rows = False
    report_key = "selection"
    column: str | None = None

    def __init__(self, keep_fraction: float | None, keep_rows: int | None, seed: int, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if (keep_fraction is None) == (keep_rows is None):
            raise ValueError("exactly one of keep_fraction and keep_rows must be given")
        check_fraction(keep_fraction)
        if keep_rows is not None and keep_rows < 1:
            raise ValueError(f"keep_rows must be 1 or more, found {keep_rows}")
        if not 0 <= seed < SEEDS:
            raise ValueError(f"seed must be from 0 and below {SEEDS}, found {seed}")
        self.keep_fraction = keep_fraction
        self.keep_rows = keep_rows
        self.seed = seed
        self.report: dict = {}

    @abstractmethod
    def select(self, rows: Rows) -> Selection:
        """Say which rows are kept, and count in `report`."""

    def draw(self, *names: str) -> float:
        """In (0, 1], the same for the same names."""
        return draw(self.seed, self._name, *names)

    def draws_of(self, rows: Rows, *names: str) -> np.ndarray:
        """(N,) float64: a draw of each row."""
        return np.fromiter((self.draw(*names, row) for row in identities(rows)), dtype=np.float64, count=len(rows))

    def wanted(self, rows: int) -> int:
        """How many of so many rows are kept, one at least where there is one."""
        share = self.keep_rows if self.keep_fraction is None else max(1, round(self.keep_fraction * rows))
        return min(rows, share)

    def compute_stats_batched(self, samples: dict) -> dict:
        return samples

    def process_batched(self, samples: dict) -> list[bool]:
        """A row alone says nothing."""
        return [True] * len(samples[Fields.stats])

    def run(self, dataset, *, exporter=None, tracer=None, reduce: bool = True):
        """As `Filter.run`, in a plain Data-Juicer run."""
        measured = super().run(dataset, exporter=exporter, tracer=tracer, reduce=False)
        if not reduce:
            return measured
        kept = self.select(measured).kept
        measured = measured.remove_columns([self.column]) if self.column else measured
        return measured.select(np.flatnonzero(kept))


class BalanceFilter(SelectionFilter):
    """Keeps as many rows of each group, as far as it has them."""

    stat: str  # a row's group, or what it is made of

    @abstractmethod
    def groups_of(self, rows: Rows) -> np.ndarray:
        """(N,) whole numbers; `NO_GROUP` for a row that has none, which is kept and not counted."""

    def select(self, rows: Rows) -> Selection:
        groups = self.groups_of(rows)
        members = np.flatnonzero(groups != NO_GROUP)
        kept = np.ones(len(groups), dtype=bool)
        draws = self.draws_of(rows)[members]
        kept[members] = even_sample(groups[members], draws, self.wanted(len(members)))
        sizes = np.unique(groups[members], return_counts=True)[1]
        most = np.unique(groups[members][kept[members]], return_counts=True)[1]
        self.report = {
            "groups": len(sizes),
            "largest_group": int(sizes.max(initial=0)),
            "most_kept_of_a_group": int(most.max(initial=0)),
            "without_group": len(groups) - len(members),
        }
        return Selection(kept, {self.stat: groups})


def even_sample(groups: np.ndarray, draws: np.ndarray, count: int) -> np.ndarray:
    """Choose `count` of N rows so that no group has two rows more than another that has rows left.

    Groups fill up like vessels with one level of water: the first row of each group comes before the second of any. Of
    a group the lowest draws come first, and among rows of equal rank, too.

    Args:
        groups: (N,) whole numbers.
        draws: (N,) float64.

    Returns:
        (N,) bool.
    """
    by_group = np.lexsort((draws, groups))  # stable: of equal draws the earlier row comes first
    starts = np.flatnonzero(np.diff(groups[by_group], prepend=groups[by_group[:1]] - 1))
    sizes = np.diff(starts, append=len(groups))
    rank = np.empty(len(groups), dtype=np.int64)
    rank[by_group] = np.arange(len(groups)) - np.repeat(starts, sizes)
    chosen = np.zeros(len(groups), dtype=bool)
    chosen[np.lexsort((draws, rank))[:count]] = True
    return chosen


def identities(rows: Rows) -> Iterator[str]:
    """Each row's id; its number where rows have none."""
    for number, row in enumerate(rows):
        yield str(row.get("id", number))


def draw(seed: int, *names: str) -> float:
    """In (0, 1], the same for the same names."""
    digest = hashlib.blake2b("\n".join([str(seed), *names]).encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> (64 - BITS)) + 1) / 2**BITS
