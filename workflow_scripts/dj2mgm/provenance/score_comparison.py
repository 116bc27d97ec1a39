"""Compares the scores of a crate's run with those of its reproduction."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.files import replace_file

KEY = ("experiment", "group", "metric")
DIGITS = 3
Scores = dict[tuple[str, ...], dict[str, float | None]]  # value, low and high by experiment, group and metric


@dataclass(frozen=True)
class Comparison:
    """Score of a crate's run and of its reproduction."""

    experiment: str
    group: str
    metric: str
    there: float
    low: float | None  # the crate's 95 % interval; None: it has none
    high: float | None
    here: float

    @property
    def difference(self) -> float:
        return self.here - self.there

    @property
    def agrees(self) -> bool:
        """Agreement of both scores to three decimals."""
        return round(abs(self.difference), 6) < 0.5 * 10**-DIGITS

    @property
    def is_outside(self) -> bool:
        """True if the reproduced score is outside of the crate's interval."""
        return self.low is not None and self.high is not None and not self.low <= self.here <= self.high


def compare_scores(there: Scores, here: Scores) -> list[Comparison]:
    """Compare the scores of the crate's run with those of the reproduction.

    Raises:
        InputError: they do not have the same scores.
    """
    if missing := there.keys() ^ here.keys():
        raise InputError(f"only one of the two runs has the score {' '.join(min(missing))}; use the crate's code")
    return [Comparison(*key, row["value"], row["low"], row["high"], here[key]["value"]) for key, row in there.items()]


def read_scores(content: bytes, where: str) -> Scores:
    """Return the scores in the content of a comparison.csv.

    Raises:
        InputError: the table is invalid, has no scores, a repeated one, or one that is not finite.
    """
    scores: Scores = {}
    try:
        for row in csv.DictReader(StringIO(content.decode()), strict=True):
            key = tuple(row[name] for name in KEY)
            if key in scores:
                raise ValueError(f"{' '.join(key)} is repeated")
            scores[key] = {"value": _figure(row["value"])}
            scores[key] |= {name: _figure(row[name]) if row[name] else None for name in ("low", "high")}
            if (scores[key]["low"] is None) != (scores[key]["high"] is None):
                raise ValueError(f"{' '.join(key)} has only one end of an interval")
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise InputError(f"{where} is not a table of scores ({error}); use an unchanged copy") from None
    if not scores:
        raise InputError(f"{where} has no scores; use an unchanged copy")
    return scores


def _figure(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a score")
    return number


def write_comparisons(rows: Iterable[Comparison], path: Path) -> None:
    with replace_file(path) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*KEY, "crate", "low", "high", "here", "difference"])
        for row in rows:
            figures = [row.there, row.low, row.high, row.here, round(row.difference, 6)]
            table.writerow([row.experiment, row.group, row.metric, *figures])


def format_comparisons(rows: list[Comparison]) -> str:
    """Return a table for a terminal and a closing sentence."""
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
