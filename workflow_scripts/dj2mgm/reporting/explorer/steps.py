"""The operators of a recipe as steps that drop rows, with the limits that the explorer lets a reader move.

A step drops a row that has a number in each of the step's columns by its limits, and any other row as the run did. So
at the recipe's own limits every step drops the rows that the run has dropped; where limits alone do not give these, the
step has none, and its decisions stay those of the run.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from dj2mgm.config.recipe_operators import defaults_of
from dj2mgm.data.shares import SIDES, limits_of_shares
from dj2mgm.reporting.histograms import LIMITS, as_number
from dj2mgm.reporting.links import step_key

UNLIMITED = 2.0**40  # Data-Juicer's defaults for "no limit" are this or more
STOPS = 400  # of a slider: values that rows have, evenly spread over the rows
SIMILARITY = "image_text_similarity"
ORIGINAL = "original_image_text_similarity"  # of the caption that a row came with, of which a share is one
RECAPTION = "low_similarity_recaption_mapper"  # drops no row; rows beyond its limit get a new caption
DISTANCE = "distance"  # of a copy from the row that is kept
# Deduplicators by distance: their limit, and the distance as what it limits. What is as near as the limit is a copy.
COPIES: dict[str, tuple[str, str, Callable]] = {
    "image_near_deduplicator": ("max_bits", "min", lambda distance: distance),
    "image_embedding_deduplicator": ("min_similarity", "max", lambda distance: np.round(1 - distance, 4)),
}


@dataclass(frozen=True)
class Limit:
    """One end of the range that a step keeps.

    Args:
        side: min or max.
        value: None for no limit.
        closed: whether a row with this value is kept.
        column: key of the numbers that are judged.
        scores: of a share, key of the numbers that it is a share of; otherwise empty.
        stops: where a slider stops, in ascending order.
        whole: whether all numbers are whole.
    """

    argument: str
    side: str
    value: float | None
    closed: bool
    column: str
    scores: str = ""
    stops: list[float] = field(default_factory=list)
    whole: bool = False

    def drops(self, values: np.ndarray, value: float | None) -> np.ndarray:
        """(N,) bool, of numbers beyond a limit at `value`."""
        if value is None:
            return np.zeros(len(values), dtype=bool)
        if self.side == "min":
            return values < value if self.closed else values <= value
        return values > value if self.closed else values >= value


@dataclass(frozen=True)
class Step:
    """
    Args:
        stage, number: and its place in that stage's recipe.
        dropped: by the run.
        limits: that follow the run's decisions; none where it decides by something else.
        rewritten: how many captions the run has rewritten, of a step that does that to rows beyond its limits instead
            of dropping them.
    """

    stage: str
    number: int
    operator: str
    dropped: int
    limits: list[Limit]
    rewritten: int | None = None

    @property
    def key(self) -> str:
        return step_key(self.stage, self.number)

    def described(self) -> dict:
        """As the page is told."""
        return asdict(self) | {"key": self.key}


def steps_of(
    stage: str, recipe: dict, summary: dict, numbers: dict[str, np.ndarray], fate: np.ndarray, first: int
) -> list[Step]:
    """The steps of a stage.

    Args:
        numbers: (N,) by statistic, and `DISTANCE` of copies; what copies are limited by is added.
        fate: (N,) of the whole run, in which the stage's first step has the place `first`.
    """
    steps = []
    specs = [next(iter(step.items())) for step in recipe["process"]]
    for place, (operator, (_, arguments)) in enumerate(zip(summary["operators"], specs, strict=False), start=first):
        if operator["operator"] == RECAPTION:
            steps.append(_recaptioning(stage, operator, arguments or {}, numbers, (fate == 0) | (fate >= place)))
            continue
        if operator["operator"] in COPIES:
            distance = np.where(fate == place, numbers.get(DISTANCE, np.nan), np.nan)
            limits = _limits_of_copies(stage, operator["operator"], arguments or {}, numbers, distance)
        else:
            limits = _limits(stage, operator["operator"], arguments or {}, numbers)
        if not _agree(limits, stage, numbers, fate, place):
            limits = []
        step = Step(stage, operator["step"], operator["operator"], operator["dropped"], limits)
        steps.append(step)
    return steps


def _recaptioning(
    stage: str, operator: dict, arguments: dict, numbers: dict[str, np.ndarray], arrived: np.ndarray
) -> Step:
    """With its limit, if as many captions are beyond it as were rewritten."""
    step = Step(stage, operator["step"], operator["operator"], operator["dropped"], [])
    below = operator.get("recaption", {}).get("below")
    if below is None or ORIGINAL not in numbers:
        return step
    share = "keep_fraction" if arguments.get("keep_fraction") is not None else ""
    limit = _limit(stage, ORIGINAL, "min", share or "min_similarity", arguments, numbers, bool(share))
    bound = limit_value(limit, limit.value, {limit.column: numbers[ORIGINAL]}, arrived)
    if (arrived & limit.drops(numbers[ORIGINAL], bound)).sum() != below:
        return step
    return replace(step, limits=[limit], rewritten=below)


def limits_alone(stage: str, recipe: dict, numbers: dict[str, np.ndarray]) -> tuple[list[Step], np.ndarray]:
    """The steps of a recipe that has not dropped any rows yet, and (N,) which of them would drop each row."""
    by_key = {column_key(stage, name): values for name, values in numbers.items()}
    fate = np.zeros(len(next(iter(numbers.values()), ())))
    steps: list[Step] = []
    for number, spec in enumerate(recipe["process"], start=1):
        [(operator, arguments)] = spec.items()
        if limits := _limits(stage, operator, arguments or {}, numbers):
            arrived, dropped = fate == 0, np.zeros(len(fate), dtype=bool)
            for limit in limits:
                dropped |= limit.drops(by_key[limit.column], limit_value(limit, limit.value, by_key, arrived))
            fate[arrived & dropped] = len(steps) + 1
            steps.append(Step(stage, number, operator, int((arrived & dropped).sum()), limits))
    return steps, fate


def column_key(stage: str, statistic: str) -> str:
    return f"{stage}/{statistic}"


def _limits(stage: str, operator: str, arguments: dict, numbers: dict[str, np.ndarray]) -> list[Limit]:
    if arguments.get("reversed_range"):
        return []
    found, known = [], defaults_of(operator) | arguments
    for statistic, (name, *limiting) in LIMITS.items():
        if statistic not in numbers or operator.removeprefix("batched_") != name:
            continue
        for side, argument in zip(("min", "max"), limiting, strict=True):
            if argument is None:
                continue
            share = next((word for word, cut in SIDES.items() if cut == side and known.get(word) is not None), None)
            found.append(_limit(stage, statistic, side, share or argument, known, numbers, share is not None))
    return found


def _limit(
    stage: str, statistic: str, side: str, argument: str, known: dict, numbers: dict[str, np.ndarray], share: bool
) -> Limit:
    values, key = numbers[statistic], column_key(stage, statistic)
    value = None if known.get(argument) is None else as_number(str(known[argument]))
    if share:
        scores = column_key(stage, ORIGINAL) if statistic == SIMILARITY and ORIGINAL in numbers else key
        stops = sorted({*(round(place / 100, 2) for place in range(101)), value} - {0.0})
        return Limit(argument, side, value, True, key, scores, stops)
    value = None if value is None or abs(value) >= UNLIMITED else value
    closed = known.get(f"{side}_closed_interval", True)
    return Limit(argument, side, value, closed, key, "", _stops(values, value), _are_whole(values))


def _limits_of_copies(
    stage: str, operator: str, arguments: dict, numbers: dict[str, np.ndarray], distance: np.ndarray
) -> list[Limit]:
    argument, side, judged = COPIES[operator]
    value = (defaults_of(operator) | arguments).get(argument)
    if value is None or np.isnan(distance).all():
        return []
    numbers[argument] = values = judged(distance)
    stops = _stops(values, float(value))
    return [Limit(argument, side, float(value), False, column_key(stage, argument), "", stops, _are_whole(values))]


def _stops(values: np.ndarray, value: float | None) -> list[float]:
    finite = values[np.isfinite(values)]
    found = np.quantile(finite, np.linspace(0, 1, STOPS), method="nearest") if len(finite) else np.array([])
    return np.unique(np.append(found, [] if value is None else [value])).tolist()


def _are_whole(values: np.ndarray) -> bool:
    finite = values[np.isfinite(values)]
    return bool((finite == np.round(finite)).all())


def _agree(limits: list[Limit], stage: str, numbers: dict[str, np.ndarray], fate: np.ndarray, place: int) -> bool:
    """Whether limits alone drop what the run has dropped, of the rows that have all the numbers."""
    if not limits:
        return True
    by_key = {column_key(stage, name): values for name, values in numbers.items()}
    arrived = (fate == 0) | (fate >= place)
    judged = arrived & np.all([np.isfinite(by_key[limit.column]) for limit in limits], axis=0)
    dropped = np.zeros(len(fate), dtype=bool)
    for limit in limits:
        dropped |= limit.drops(by_key[limit.column], limit_value(limit, limit.value, by_key, arrived))
    return bool((dropped[judged] == (fate[judged] == place)).all())


def limit_value(limit: Limit, value: float | None, by_key: dict[str, np.ndarray], arrived: np.ndarray) -> float | None:
    """What numbers are compared with: of a share, what the rows that arrive make of it."""
    if not limit.scores or value is None:
        return value
    scores = by_key[limit.scores]
    scores = np.where(np.isfinite(scores), scores, by_key[limit.column])[arrived]
    return limits_of_shares(scores[np.isfinite(scores)], **{limit.argument: value})[limit.side]
