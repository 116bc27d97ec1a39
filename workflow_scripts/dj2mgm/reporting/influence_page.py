"""Page of the training rows behind wrong answers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.data.formats import IMAGE_TOKEN, list_images
from dj2mgm.data.images import BadImageError, load_image
from dj2mgm.evaluation.rank_correlation import RankCorrelation, correlate_ranks
from dj2mgm.evaluation.served_answers import AskedQuestion
from dj2mgm.reporting.rendering import build_template_environment, encode_shrunk_image, select_evenly
from dj2mgm.storage.files import read_jsonl, write_text

SHOWN_ANSWERS = 40  # answers on the page; influence.jsonl has all answers
MAX_SIDE = 112  # px, of embedded images


@dataclass(frozen=True)
class TracedRow:
    """A training row with its influence on a right answer."""

    row: dict
    influence: float

    @property
    def turns(self) -> list[str]:
        """Texts of the conversation, without image tokens."""
        return [turn["value"].replace(IMAGE_TOKEN, "").strip() for turn in self.row["conversations"]]

    @property
    def thumbnail(self) -> str:
        """First image as a data URI; empty if there is none."""
        images = list_images(self.row)
        return _encode_thumbnail(images[0]) if images else ""

    def as_dict(self) -> dict:
        """Return the row's entry in influence.jsonl."""
        return {"id": self.row["id"], "influence": round(self.influence, 6)}


@dataclass(frozen=True)
class TracedAnswer:
    """A wrong answer with the rows of lowest and of highest influence on the right answer."""

    question: AskedQuestion
    harmful: list[TracedRow]
    helpful: list[TracedRow]

    @property
    def thumbnail(self) -> str:
        """Image as a data URI."""
        return _encode_thumbnail(self.question.image)

    def as_dict(self) -> dict:
        """Return the row of influence.jsonl."""
        record = {key: self.question.row[key] for key in ("id", "question", "answer", "prediction")}
        rows_by_name = {"harmful": self.harmful, "helpful": self.helpful}
        return record | {name: [row.as_dict() for row in rows] for name, rows in rows_by_name.items()}


@dataclass(frozen=True)
class StatisticWorth:
    """The rank correlation of a statistic, such as a rating, with the influence of the rows that have it."""

    statistic: str
    correlation: RankCorrelation


def rate_statistics(path: Path, influence: Mapping[str, float]) -> Iterator[StatisticWorth]:
    """Yield each numeric statistic in a stage's stats.jsonl whose values differ.

    Args:
        path: the file.
        influence: mean influence on the right answers by row id.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in read_jsonl(path):
        for name, value in row.items():
            values = value if isinstance(value, list) else [value]
            if row["id"] in influence and len(values) == 1 and isinstance(values[0], int | float):
                pairs.setdefault(name, []).append((values[0], influence[row["id"]]))
    for name, values in pairs.items():
        if correlation := correlate_ranks(*zip(*values, strict=True)):
            yield StatisticWorth(name, correlation)


def write_influence_page(
    path: Path,
    experiment: str,
    counts: dict[str, int],
    answers: list[TracedAnswer],
    statistics: list[StatisticWorth],
) -> None:
    """Write the page.

    Args:
        path: file of the page.
        experiment: name of the experiment.
        counts: held-out questions `asked`, `wrong` answers, and training `rows`.
        answers: the traced answers.
        statistics: the statistics of the rows; empty if the rows have none.
    """
    examples = select_evenly(answers, SHOWN_ANSWERS)
    template = build_template_environment().get_template("influence.html.j2")
    page = template.render(
        experiment=experiment, counts=counts, traced=len(answers), answers=examples, statistics=statistics
    )
    write_text(path, page)


def _encode_thumbnail(path: str | Path) -> str:
    try:
        return encode_shrunk_image(load_image(path), MAX_SIDE)
    except BadImageError:  # changed since the training
        return ""
