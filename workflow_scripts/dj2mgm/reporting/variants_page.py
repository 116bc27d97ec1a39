"""Page that compares variants of an experiment in one table: a row per variant, with counts or costs and scores."""

from dataclasses import dataclass, field
from pathlib import Path

from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.reporting.charts import Scale
from dj2mgm.reporting.rendering import build_template_environment
from dj2mgm.reporting.verdicts.learning_faults import LearningFault, describe_faults
from dj2mgm.reporting.verdicts.verdict_cards import VerdictCard
from dj2mgm.storage.files import write_text


@dataclass(frozen=True)
class CountCell:
    """A count or a cost."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class IntervalMark:
    """A mean with its interval, in percent of the column's axis."""

    mean: float
    low: float
    high: float

    @property
    def is_cut(self) -> bool:
        """True if the interval goes beyond its axis."""
        return self.low <= 0 or self.high >= 100


@dataclass(frozen=True)
class ScoreCell:
    """A score or a difference of scores."""

    text: str
    lines: list[str]  # below the text and the axis
    verdict: str = ""  # class of the style sheet: better, worse or same
    marker: IntervalMark | None = None
    label: str = ""  # describes the axis to screen readers


@dataclass(frozen=True)
class VariantRow:
    """A variant; the reference is highlighted. None stands for a score that was not measured."""

    name: str
    counts: list[CountCell]
    scores: list[ScoreCell | None]
    note: str = ""
    reference: bool = False


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
class VariantsPage:
    """Texts, table and charts of a page that compares variants."""

    title: str
    notes: list[str]  # sentences above the table
    first_title: str  # head of the column of names
    count_titles: list[str]  # heads of the columns of counts
    score_titles: list[tuple[str, str]]  # heads of the columns of scores, with the group of models or ""
    rows: list[VariantRow] = field(default_factory=list)  # the reference first
    summary: str = ""  # sentence about all verdicts
    cards: list[VerdictCard] = field(default_factory=list)  # verdicts by the headline
    unlearned: dict[str, list[LearningFault]] = field(default_factory=dict)  # by experiment
    chart: CostChart | None = None
    zero_line: bool = False  # whether the axes of scores have a line at their middle
    parallels: ParallelPlot | None = None
    tables: list[PlainTable] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # to confirm the best trial of a search


def place_mark(scale: Scale, estimate: Estimate) -> IntervalMark:
    """Return the positions of an estimate on an axis."""
    return IntervalMark(*map(scale.locate, (estimate.mean, *estimate.ends)))


def write_variants_page(page: VariantsPage, path: str | Path) -> None:
    """Write one self-contained HTML file without scripts."""
    template = build_template_environment().get_template("variants.html.j2")
    write_text(path, template.render(page=page, faults=describe_faults(page.unlearned)))
