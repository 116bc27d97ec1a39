"""Parts of a study's page: charts and tables around its table of variants."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from dj2mgm.reporting.variants_page import IntervalMark, VariantsPage


@dataclass(frozen=True)
class CostPoint:
    """A variant in the chart of costs."""

    time: float  # percent of the axis
    score: IntervalMark
    label: str
    reference: bool
    front: bool  # whether no variant has a better score for less time


@dataclass(frozen=True)
class CostChart:
    """Scores against costs."""

    title: str  # name of the score
    points: list[CostPoint]
    labels: list[str]  # ends of the axis of scores, end of the axis of times


@dataclass(frozen=True)
class TrialLine:
    """A trial in the plot of parallel coordinates."""

    points: list[tuple[float, float]]  # number of the axis, and percent from the top
    label: str
    best: bool  # whether it is among the best quarter


@dataclass(frozen=True)
class ParallelPlot:
    """Settings and scores of trials: an axis for each setting, and one for the score."""

    axes: list[tuple[str, str, str]]  # name, lowest and highest value
    lines: list[TrialLine]  # the best last, on top of the others


@dataclass(frozen=True)
class PlainTable:
    """A small table below the table of variants."""

    title: str
    note: str  # sentences above it
    heads: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class StudyPageContent(VariantsPage):
    """A page of variants with charts above the table, and with tables and commands below it."""

    chart: CostChart | None = None
    parallels: ParallelPlot | None = None
    tables: list[PlainTable] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # to confirm the best trial of a search
    template: ClassVar[Path] = Path(__file__).with_name("study.html.j2")
