"""Page with a row per variant or look, with counts or costs and scores; features extend it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.reporting.charts import Scale
from dj2mgm.reporting.rendering import TEMPLATES, build_template_environment
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
    zero_line: bool = False  # whether the axes of scores have a line at their middle
    template: ClassVar[Path] = TEMPLATES / "variants.html.j2"


def place_mark(scale: Scale, estimate: Estimate) -> IntervalMark:
    """Return the positions of an estimate on an axis."""
    return IntervalMark(*map(scale.locate, (estimate.mean, *estimate.ends)))


def write_variants_page(page: VariantsPage, path: str | Path) -> None:
    """Write one self-contained HTML file without scripts."""
    template = build_template_environment(page.template.parent).get_template(page.template.name)
    write_text(path, template.render(page=page, faults=describe_faults(page.unlearned)))
