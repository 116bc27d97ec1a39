"""Rows of the explorer, and operators of a recipe as steps that drop rows.

Numbers of rows stand in columns, texts on disk. A step applies its limits, which a reader can move, to rows that have a
number in each of its columns. For other rows it decides as the run did. At the recipe's limits, each step drops the
rows that the run dropped. If limits cannot reproduce the run, the step has no limits, and its decisions are always
those of the run.
"""

import json
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from dj2mgm.data.score_limits import ORIGINAL_SIMILARITY, SIDE_BY_SHARE, UNLIMITED_FROM, compute_score_limits
from dj2mgm.recipes.argument_kinds import RANGE_PATTERN
from dj2mgm.recipes.catalogue import RECAPTION_OPERATOR, read_allowed_operators, read_defaults, read_statistic_operators
from dj2mgm.records import OperatorSummary, RecipeSummary
from dj2mgm.reporting.rendering import build_step_key
from dj2mgm.reporting.sections.histograms import parse_number

MAX_SLIDER_STOPS = 400  # most stops of a slider; stops are values of rows, evenly spread over the rows
SIMILARITY = "image_text_similarity"
DISTANCE = "distance"  # distance of a near-duplicate from the kept row
# Near-deduplicators: the argument, its side, and the limited number computed from the distance. A row at the limit is
# a near-duplicate.
DEDUPLICATOR_LIMITS: dict[str, tuple[str, str, Callable]] = {
    "image_near_deduplicator": ("max_bits", "min", lambda distance: distance),
    "image_embedding_deduplicator": ("min_similarity", "max", lambda distance: np.round(1 - distance, 4)),
}


@dataclass(frozen=True)
class StepLimit:
    """One end of the range that a step keeps."""

    argument: str  # name of the operator's argument
    side: str  # min or max
    value: float | None  # None for no limit
    closed: bool  # whether a row with this value is kept
    column: str  # key of the limited numbers
    scores: str = ""  # key of the numbers that a limit by share refers to; otherwise empty
    stops: list[float] = field(default_factory=list)  # values at which the slider stops, ascending
    whole: bool = False  # whether all numbers are whole
    unlimited: float = 0.0  # value that a recipe gives for no limit
    text: bool = False  # whether a recipe gives the value as a string, as it does sizes

    def drops(self, values: np.ndarray, value: float | None) -> np.ndarray:
        """Return which values, (N,), are beyond a limit at `value`."""
        if value is None:
            return np.zeros(len(values), dtype=bool)
        if self.side == "min":
            return values < value if self.closed else values <= value
        return values > value if self.closed else values >= value


@dataclass(frozen=True)
class ExplorerStep:
    """An operator that drops rows or rewrites captions."""

    stage: str  # filter, synthesize or analyze
    number: int  # position in the stage's recipe, from 1
    operator: str  # name
    dropped: int  # number of rows that the run dropped
    limits: list[StepLimit]  # limits that reproduce the run's decisions; empty if there are none
    rewritten: int | None = None  # number of captions that the run rewrote; None for a step that drops rows

    @property
    def key(self) -> str:
        return build_step_key(self.stage, self.number)

    def as_dict(self) -> dict:
        """Return the step for the page's JSON."""
        return asdict(self) | {"key": self.key}


def build_steps(
    stage: str, recipe: dict, summary: RecipeSummary, numbers: dict[str, np.ndarray], fate: np.ndarray, first_index: int
) -> list[ExplorerStep]:
    """Return the steps of a stage.

    Args:
        stage: name of the stage.
        recipe: recipe of the stage.
        summary: numbers of rows at each step of the stage.
        numbers: (N,) by statistic, and the `DISTANCE` of near-duplicates; the deduplicators' limited numbers are added.
        fate: (N,) index of the step that dropped each row, 0 for kept rows, over all stages.
        first_index: index of the stage's first step.
    """
    steps = []
    specs = [next(iter(step.items())) for step in recipe["process"]]
    for index, (operator, (_, arguments)) in enumerate(zip(summary.operators, specs, strict=False), start=first_index):
        if operator.operator == RECAPTION_OPERATOR:
            steps.append(
                _build_recaption_step(stage, operator, arguments or {}, numbers, (fate == 0) | (fate >= index))
            )
            continue
        if operator.operator in DEDUPLICATOR_LIMITS:
            distance = np.where(fate == index, numbers.get(DISTANCE, np.nan), np.nan)
            limits = _build_duplicate_limits(stage, operator.operator, arguments or {}, numbers, distance)
        else:
            limits = _build_limits(stage, operator.operator, arguments or {}, numbers)
        if not _limits_reproduce_run(limits, stage, numbers, fate, index):
            limits = []
        step = ExplorerStep(stage, operator.step, operator.operator, operator.dropped, limits)
        steps.append(step)
    return steps


def _build_recaption_step(
    stage: str, operator: OperatorSummary, arguments: dict, numbers: dict[str, np.ndarray], arrived: np.ndarray
) -> ExplorerStep:
    """Return a step that rewrites captions, with its limit if the limit reproduces the number of rewritten captions."""
    step = ExplorerStep(stage, operator.step, operator.operator, operator.dropped, [])
    below = operator.reports.get("recaption", {}).get("below")
    if below is None or ORIGINAL_SIMILARITY not in numbers:
        return step
    share = "keep_fraction" if arguments.get("keep_fraction") is not None else ""
    limit = _build_limit(
        stage,
        RECAPTION_OPERATOR,
        ORIGINAL_SIMILARITY,
        "min",
        share or "min_similarity",
        arguments,
        numbers,
        bool(share),
    )
    bound = compute_limit(limit, limit.value, {limit.column: numbers[ORIGINAL_SIMILARITY]}, arrived)
    if (arrived & limit.drops(numbers[ORIGINAL_SIMILARITY], bound)).sum() != below:
        return step
    return replace(step, limits=[limit], rewritten=below)


def apply_limits(stage: str, recipe: dict, numbers: dict[str, np.ndarray]) -> tuple[list[ExplorerStep], np.ndarray]:
    """Return the steps of a recipe that was not run, and the index of the step that would drop each row, (N,)."""
    by_key = {build_column_key(stage, name): values for name, values in numbers.items()}
    fate = np.zeros(len(next(iter(numbers.values()), ())))
    steps: list[ExplorerStep] = []
    for number, spec in enumerate(recipe["process"], start=1):
        [(operator, arguments)] = spec.items()
        if limits := _build_limits(stage, operator, arguments or {}, numbers):
            dropped = (fate == 0) & _find_dropped(limits, by_key, arrived=fate == 0)
            fate[dropped] = len(steps) + 1
            steps.append(ExplorerStep(stage, number, operator, int(dropped.sum()), limits))
    return steps, fate


def _find_dropped(limits: list[StepLimit], by_key: dict[str, np.ndarray], arrived: np.ndarray) -> np.ndarray:
    """Return which rows, (N,), are beyond one of the limits."""
    bounds = [compute_limit(limit, limit.value, by_key, arrived) for limit in limits]
    pairs = zip(limits, bounds, strict=True)
    return np.any([limit.drops(by_key[limit.column], bound) for limit, bound in pairs], axis=0)


def build_column_key(stage: str, statistic: str) -> str:
    return f"{stage}/{statistic}"


def _build_limits(stage: str, operator: str, arguments: dict, numbers: dict[str, np.ndarray]) -> list[StepLimit]:
    """Return both ends of each range of an operator, as shares if the recipe states shares."""
    if arguments.get("reversed_range"):
        return []
    limits, settings = [], read_defaults(operator) | arguments
    for statistic, (name, limit_arguments) in read_statistic_operators().items():
        if statistic not in numbers or operator.removeprefix("batched_") != name:
            continue
        for side, argument in limit_arguments.items():
            share = next(
                (name for name, end in SIDE_BY_SHARE.items() if end == side and settings.get(name) is not None), None
            )
            is_share = share is not None
            limits.append(
                _build_limit(stage, operator, statistic, side, share or argument, settings, numbers, is_share)
            )
    return limits


def _build_limit(
    stage: str,
    operator: str,
    statistic: str,
    side: str,
    argument: str,
    settings: dict,
    numbers: dict[str, np.ndarray],
    is_share: bool,
) -> StepLimit:
    """Return one end of a range, with the positions of its slider; the slider of a share moves in percent."""
    values, key = numbers[statistic], build_column_key(stage, statistic)
    value = None if settings.get(argument) is None else parse_number(str(settings[argument]))
    if is_share:
        has_original = statistic == SIMILARITY and ORIGINAL_SIMILARITY in numbers
        scores = build_column_key(stage, ORIGINAL_SIMILARITY) if has_original else key
        stops = sorted({*(round(percent / 100, 2) for percent in range(101)), value} - {0.0})
        return StepLimit(argument, side, value, True, key, scores, stops)
    kind = (
        read_allowed_operators()[operator].arguments.get(argument, "") if operator in read_allowed_operators() else ""
    )
    value = None if value is None or abs(value) >= UNLIMITED_FROM else value
    closed = settings.get(f"{side}_closed_interval", True)
    stops, unlimited = _compute_stops(values, value), _find_unlimited_value(kind, side)
    return StepLimit(argument, side, value, closed, key, "", stops, _are_whole(values), unlimited, kind == "size")


def _find_unlimited_value(kind: str, side: str) -> float:
    """Return the most generous value of an argument's kind (recipes/argument_kinds.py)."""
    if kind == "fraction":
        return 1 if side == "max" else 0
    if match := RANGE_PATTERN.fullmatch(kind.removesuffix(" or null")):
        bound = match["high" if side == "max" else "low"]
        return float(bound) if bound else UNLIMITED_FROM if side == "max" else -UNLIMITED_FROM
    return int(UNLIMITED_FROM) if side == "max" else 0


def _build_duplicate_limits(
    stage: str, operator: str, arguments: dict, numbers: dict[str, np.ndarray], distance: np.ndarray
) -> list[StepLimit]:
    argument, side, convert = DEDUPLICATOR_LIMITS[operator]
    value = (read_defaults(operator) | arguments).get(argument)
    if value is None or np.isnan(distance).all():
        return []
    numbers[argument] = values = convert(distance)
    stops = _compute_stops(values, float(value))
    return [
        StepLimit(argument, side, float(value), False, build_column_key(stage, argument), "", stops, _are_whole(values))
    ]


def _compute_stops(values: np.ndarray, value: float | None) -> list[float]:
    finite = values[np.isfinite(values)]
    quantiles = (
        np.quantile(finite, np.linspace(0, 1, MAX_SLIDER_STOPS), method="nearest") if len(finite) else np.array([])
    )
    return np.unique(np.append(quantiles, [] if value is None else [value])).tolist()


def _are_whole(values: np.ndarray) -> bool:
    finite = values[np.isfinite(values)]
    return bool((finite == np.round(finite)).all())


def _limits_reproduce_run(
    limits: list[StepLimit], stage: str, numbers: dict[str, np.ndarray], fate: np.ndarray, index: int
) -> bool:
    """Return whether the limits drop the rows that the run dropped, among rows that have all numbers."""
    if not limits:
        return True
    by_key = {build_column_key(stage, name): values for name, values in numbers.items()}
    arrived = (fate == 0) | (fate >= index)
    has_numbers = arrived & np.all([np.isfinite(by_key[limit.column]) for limit in limits], axis=0)
    dropped = _find_dropped(limits, by_key, arrived)
    return bool((dropped[has_numbers] == (fate[has_numbers] == index)).all())


def compute_limit(
    limit: StepLimit, value: float | None, by_key: dict[str, np.ndarray], arrived: np.ndarray
) -> float | None:
    """Return the limit in the unit of the numbers; a share is converted by the scores of the rows that arrive."""
    if not limit.scores or value is None:
        return value
    scores = by_key[limit.scores]
    scores = np.where(np.isfinite(scores), scores, by_key[limit.column])[arrived]
    return compute_score_limits(scores[np.isfinite(scores)], **{limit.argument: value})[limit.side]


MAX_WORDS = 200  # a statistic with more different words is not offered as a filter


class TextFile:
    """JSON values by row, in a temporary file; eight bytes a row are in memory."""

    def __init__(self):
        self._file = TemporaryFile()
        self._ends = array("Q", [0])

    def add(self, value: object) -> None:
        line = json.dumps(value, ensure_ascii=False).encode()
        self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))

    def finish(self) -> None:
        """Flush the file; call this before the first row is read."""
        self._file.flush()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> dict:
        """Read a row; safe for several threads."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        start, end = self._ends[row], self._ends[row + 1]
        return json.loads(os.pread(self._file.fileno(), end - start, start))

    def __iter__(self) -> Iterator[dict]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True)
class Column:
    """One number per row, NaN if it has none; with `words`, the number is an index into them."""

    label: str
    values: np.ndarray  # (N,) float64
    words: list[str] | None = None


@dataclass
class RowTable:
    """Rows of one kind."""

    name: str  # in links
    title: str  # on the page
    image_root: Path
    texts: TextFile  # by row {"id", "lines": [[label, text], …], "image": path below image_root}
    columns: dict[str, Column]  # by key
    steps: list[ExplorerStep] = field(default_factory=list)  # operators that drop rows, in their order
    # (N,) float64, position in `steps`, from 1, of the step that dropped the row; 0 for kept rows. None if there are no
    # steps
    fate: np.ndarray | None = None
    recipes: dict[str, dict] = field(default_factory=dict)  # by stage, for the steps
    first_filter: dict[str, str] = field(default_factory=dict)  # filter when the page opens, {column: word}
    note: str = ""  # a sentence below the rows

    def __post_init__(self):
        self.image_root = self.image_root.absolute()

    def __len__(self) -> int:
        return len(self.texts)


def build_number_column(label: str, values: list | np.ndarray) -> Column | None:
    """Return a column of numbers; None if no row has one."""
    numbers = np.array(values, dtype=np.float64)
    return None if np.isnan(numbers).all() else Column(label, numbers)


def build_word_column(label: str, words: list[str | None]) -> Column | None:
    """Return a column of words; None if there are no words or too many different ones."""
    vocabulary = sorted({word for word in words if word is not None})
    if not vocabulary or len(vocabulary) > MAX_WORDS:
        return None
    indices = {word: index for index, word in enumerate(vocabulary)}
    codes = np.array([np.nan if word is None else indices[word] for word in words], dtype=np.float64)
    return Column(label, codes, vocabulary)
