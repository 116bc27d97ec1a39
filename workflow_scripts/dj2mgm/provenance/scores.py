"""Scores of a crate's run beside those of the run made again."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.files import replace_file

KEY = ("experiment", "group", "metric")
DIGITS = 3


@dataclass(frozen=True)
class Comparison:
    experiment: str
    group: str
    metric: str
    there: float
    low: float | None  # the 95 % interval there; None: it has none
    high: float | None
    here: float

    @property
    def difference(self) -> float:
        return self.here - self.there

    @property
    def agrees(self) -> bool:
        """To three digits after the point."""
        return round(abs(self.difference), 6) < 0.5 * 10**-DIGITS

    @property
    def is_outside(self) -> bool:
        """Whether the score here lies outside the interval there."""
        return self.low is not None and self.high is not None and not self.low <= self.here <= self.high


def compare_scores(there: str, here: str, where: str) -> list[Comparison]:
    """
    Args:
        there: content of the crate's comparison.csv.
        here: of that of the run made again.

    Raises:
        InputError: one is no such table, or they have not the same scores.
    """
    theirs, ours = _rows(there, where), _rows(here, "comparison.csv")
    if missing := theirs.keys() ^ ours.keys():
        raise InputError(f"only one of the two runs has the score {' '.join(min(missing))}; use the crate's code")
    return [
        Comparison(*key, there["value"], there["low"], there["high"], ours[key]["value"])
        for key, there in theirs.items()
    ]


def _rows(text: str, where: str) -> dict[tuple[str, ...], dict]:
    try:
        return {
            tuple(row[key] for key in KEY): {
                "value": float(row["value"]),
                "low": float(row["low"]) if row["low"] else None,
                "high": float(row["high"]) if row["high"] else None,
            }
            for row in csv.DictReader(StringIO(text))
        }
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise InputError(f"{where} is no table of scores ({error}); take a copy that nobody has changed") from None


def write_comparisons(rows: Iterable[Comparison], path: Path) -> None:
    with replace_file(path) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*KEY, "crate", "low", "high", "here", "difference"])
        for row in rows:
            figures = [row.there, row.low, row.high, row.here, round(row.difference, 6)]
            table.writerow([row.experiment, row.group, row.metric, *figures])


def show(rows: list[Comparison]) -> str:
    """A table for a terminal, and a sentence."""
    lines = [["experiment", "group", "metric", "crate", "95 % interval", "here", "difference"]]
    for row in rows:
        interval = "–" if row.low is None else f"{row.low:.3f} to {row.high:.3f}"
        figures = [f"{row.there:.3f}", interval, f"{row.here:.3f}", f"{row.difference:+.3f}"]
        lines.append([row.experiment, row.group, row.metric, *figures])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    agree, outside = sum(row.agrees for row in rows), sum(row.is_outside for row in rows)
    closing = f"{agree} of {len(rows)} scores agree to {DIGITS} digits; {outside} lie outside the crate's intervals"
    return "\n".join([*table, closing])
