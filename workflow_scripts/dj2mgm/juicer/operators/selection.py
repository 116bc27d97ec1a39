"""Filters that keep a share or a number of rows, and select them once all rows have been measured.

A share sets a limit (`ShareLimits`: `keep_fraction` and quantiles in place of limits), or rows are drawn
(`SelectionFilter`).

Of rows that rank equally, the earlier one is kept. Draws depend on the seed, the filter's name and the row's id, and
not on other rows: adding or removing a row does not change the draws of the others. The filter's name is part of the
draw, because with the same draws a second filter would favor groups that the first has reduced.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from data_juicer.ops.base_op import Filter
from data_juicer.utils.constant import Fields

from dj2mgm.data.score_limits import SIDE_BY_SHARE, compute_score_limits

from .declarations import Declarations


class ShareLimits(Declarations, interface=True):
    """An operator whose limits may be given as shares of all rows' scores.

    Attributes:
        limit: name of the argument that `keep_fraction` replaces.
        quantiles: limits by the argument that replaces them with a quantile of the scores. The operator has
            attributes of these names (None if the recipe gives no quantile).
        keep_fraction: share of the rows, or None.
    """

    limit: str
    quantiles: Mapping[str, str] = {}
    keep_fraction: float | None

    @staticmethod
    @abstractmethod
    def read_scores(stats: dict) -> list[float]:
        """Return the row's scores; `keep_fraction` is a share of the scores of all rows."""

    @property
    def shares(self) -> dict[str, str]:
        """Shares and quantiles that the recipe gives, with the limits that they replace."""
        replaced_limits = {"keep_fraction": self.limit, **self.quantiles}
        return {name: limit for name, limit in replaced_limits.items() if getattr(self, name) is not None}

    def set_limits(self, stats: Iterable[dict]) -> None:
        """Set the limits that keep the operator's share of the rows, from the stats of all rows."""
        shares = self.shares
        scores = (score for row in stats for score in self.read_scores(row))
        limits = compute_score_limits(scores, **{name: getattr(self, name) for name in shares})
        for name, limit in shares.items():
            setattr(self, limit, limits[SIDE_BY_SHARE[name]])


class ShareFilter(ShareLimits, Filter, interface=True):
    """A filter that takes shares of the rows in place of its limits, in a plain Data-Juicer run too."""

    needs_all_rows = False

    def run(self, dataset, *, exporter=None, tracer=None, reduce: bool = True):
        """Run like `Filter.run`; if there is a share, set the limits between scoring and dropping."""
        if not self.shares:
            return super().run(dataset, exporter=exporter, tracer=tracer, reduce=reduce)
        scored = super().run(dataset, exporter=exporter, tracer=tracer, reduce=False)
        self.set_limits(scored[Fields.stats])
        return super().run(scored, exporter=exporter, tracer=tracer) if reduce else scored


class ShareMapper(ShareLimits, interface=True):
    """A mapper that edits rows beyond a limit, which may be a share of the rows."""

    needs_all_rows = False

    @abstractmethod
    def measure(self, samples: dict) -> dict:
        """Return the samples with their scores as stats, and edit nothing."""


def check_fraction(keep_fraction: float | None) -> None:
    """Raise ValueError unless `keep_fraction` is None or in (0, 1]."""
    if keep_fraction is not None and not 0 < keep_fraction <= 1:
        raise ValueError(f"keep_fraction must be above 0 and at most 1, found {keep_fraction}")


def check_sides(**limits: tuple[float | None, float | None]) -> None:
    """Raise ValueError if a recipe gives both a limit and the share that replaces it."""
    for name, (share, limit) in limits.items():
        if share is not None and limit is not None:
            raise ValueError(f"{name} {share} replaces a limit, but a limit of {limit} is given too; give one of them")


def check_quantiles(lower: float | None, upper: float | None) -> None:
    """Raise ValueError unless 0 ≤ `lower` < `upper` ≤ 1; None means no limit on that side."""
    if not 0 <= (0 if lower is None else lower) < (1 if upper is None else upper) <= 1:
        raise ValueError(f"lower_quantile must be below upper_quantile, both from 0 to 1; found {lower} and {upper}")


NO_GROUP = -1
SIGNIFICAND_BITS = 53  # bits of a float64's significand
FAISS_SEED_LIMIT = 2**31  # faiss accepts smaller seeds only


class Rows(Iterable[dict], Sized, Protocol):
    """All measured rows with their stats and the columns of `compute_stats`. They can be iterated repeatedly."""


@dataclass(frozen=True)
class Selection:
    """The decision about N rows, in their order."""

    mask: np.ndarray  # (N,) bool, true for kept rows
    stats: dict[str, np.ndarray] = field(default_factory=dict)  # further stats of the rows by name, (N,) numbers each

    def slice(self, start: int, count: int) -> "Selection":
        rows = slice(start, start + count)
        return Selection(self.mask[rows], {name: values[rows] for name, values in self.stats.items()})

    def iterate_stats(self) -> Iterator[dict]:
        for row in range(len(self.mask)):
            yield {name: values[row].item() for name, values in self.stats.items()}


class SelectionFilter(Declarations, Filter, interface=True):
    """A filter that keeps a share of the rows, or a number of them (all if there are fewer).

    `compute_stats` may fill a `column` for `select`, which is removed afterwards.
    """

    _batched_op = True
    report_key = "selection"
    column: str | None = None

    def __init__(self, keep_fraction: float | None, keep_rows: int | None, seed: int, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if (keep_fraction is None) == (keep_rows is None):
            raise ValueError("exactly one of keep_fraction and keep_rows must be given")
        check_fraction(keep_fraction)
        if keep_rows is not None and keep_rows < 1:
            raise ValueError(f"keep_rows must be 1 or more, found {keep_rows}")
        if not 0 <= seed < FAISS_SEED_LIMIT:
            raise ValueError(f"seed must be from 0 and below {FAISS_SEED_LIMIT}, found {seed}")
        self.keep_fraction = keep_fraction
        self.keep_rows = keep_rows
        self.seed = seed
        self.report: dict = {}

    @abstractmethod
    def select(self, rows: Rows) -> Selection:
        """Select the rows to keep, and fill in `report`."""

    def draw(self, *names: str) -> float:
        """Return a number in (0, 1] that is the same for the same names."""
        return draw(self.seed, self._name, *names)

    def draw_rows(self, rows: Rows, *names: str) -> np.ndarray:
        """Return a draw for each row, (N,) float64."""
        return np.fromiter((self.draw(*names, row) for row in iterate_row_ids(rows)), dtype=np.float64, count=len(rows))

    def count_rows_to_keep(self, rows: int) -> int:
        """Return the number of rows to keep out of `rows`, at least 1 unless there are none."""
        share = self.keep_rows if self.keep_fraction is None else max(1, round(self.keep_fraction * rows))
        return min(rows, share)

    def compute_stats_batched(self, samples: dict) -> dict:
        return samples

    def process_batched(self, samples: dict) -> list[bool]:
        """Keep every row here; `select` decides once all rows are measured."""
        return [True] * len(samples[Fields.stats])

    def run(self, dataset, *, exporter=None, tracer=None, reduce: bool = True):
        """Run like `Filter.run`, in a plain Data-Juicer run."""
        measured = super().run(dataset, exporter=exporter, tracer=tracer, reduce=False)
        if not reduce:
            return measured
        mask = self.select(measured).mask
        measured = measured.remove_columns([self.column]) if self.column else measured
        return measured.select(np.flatnonzero(mask))


class BalanceFilter(SelectionFilter, interface=True):
    """A filter that keeps equally many rows of each group, as far as the group has them."""

    stat: str  # name of the stat with the row's group

    @abstractmethod
    def assign_groups(self, rows: Rows) -> np.ndarray:
        """Return the rows' groups, (N,) whole numbers; rows with `NO_GROUP` are kept and not counted."""

    def select(self, rows: Rows) -> Selection:
        groups = self.assign_groups(rows)
        members = np.flatnonzero(groups != NO_GROUP)
        mask = np.ones(len(groups), dtype=bool)
        draws = self.draw_rows(rows)[members]
        mask[members] = sample_evenly(groups[members], draws, self.count_rows_to_keep(len(members)))
        sizes = np.unique(groups[members], return_counts=True)[1]
        most = np.unique(groups[members][mask[members]], return_counts=True)[1]
        self.report = {
            "groups": len(sizes),
            "largest_group": int(sizes.max(initial=0)),
            "most_kept_of_a_group": int(most.max(initial=0)),
            "without_group": len(groups) - len(members),
        }
        return Selection(mask, {self.stat: groups})


def sample_evenly(groups: np.ndarray, draws: np.ndarray, count: int) -> np.ndarray:
    """Choose `count` of N rows so that no group gets two rows more than another group with rows left.

    The first row of each group comes before the second row of any group. Within a group, and among rows of equal rank,
    the lowest draws come first. Groups are (N,) whole numbers, draws (N,) float64, the result (N,) bool.
    """
    by_group = np.lexsort((draws, groups))  # stable: of equal draws the earlier row comes first
    starts = np.flatnonzero(np.diff(groups[by_group], prepend=groups[by_group[:1]] - 1))
    sizes = np.diff(starts, append=len(groups))
    rank = np.empty(len(groups), dtype=np.int64)
    rank[by_group] = np.arange(len(groups)) - np.repeat(starts, sizes)
    is_chosen = np.zeros(len(groups), dtype=bool)
    is_chosen[np.lexsort((draws, rank))[:count]] = True
    return is_chosen


def iterate_row_ids(rows: Rows) -> Iterator[str]:
    """Yield each row's id, or its number if rows have no ids."""
    for number, row in enumerate(rows):
        yield str(row.get("id", number))


def draw(seed: int, *names: str) -> float:
    """Return a number in (0, 1] that is the same for the same seed and names."""
    digest = hashlib.blake2b("\n".join([str(seed), *names]).encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> (64 - SIGNIFICAND_BITS)) + 1) / 2**SIGNIFICAND_BITS
