"""Charts of all pages: axes, stacked bars of histograms, and lines, in the units of the pages' SVG drawings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dj2mgm.reporting.rendering import format_number

HISTOGRAM_BINS = 32  # of a histogram
BAR_CHART_HEIGHT = 100.0  # units of a drawing of bars; it is stretched to the page's width and height
MIN_BIN_HEIGHT = 1.6  # units; the least height of a bin that has rows, so that it stays visible
MAX_LINE_POINTS = 240  # most points of a line


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis."""

    at: float  # percent of the axis
    text: str


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False

    def locate(self, value: float) -> float:
        """Return the position of a value in percent of the axis, clipped to 0 and 100."""
        low, high, value = (math.log(max(v, 1e-300)) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(100 * min(max(share, 0.0), 1.0), 2)

    def choose_ticks(self, count: int = 4, factor: float = 1.0, signed: bool = False) -> list[Tick]:
        """Return about `count` ticks at round values; `factor` 100 shows shares in percent."""
        if self.log:
            values = list_log_values(self.low, self.high, count)
            texts = [f"{value * factor:,.6g}" for value in values]
        else:
            values, digits = list_round_values(self.low * factor, self.high * factor, count)
            texts = [format_number(value, digits, signed) for value in values]
            values = [value / factor for value in values]
        return [Tick(self.locate(value), text) for value, text in zip(values, texts, strict=True)]


def list_round_values(low: float, high: float, count: int) -> tuple[list[float], int]:
    """Return at most `count` + 1 multiples of 1, 2 or 5 × 10ⁿ from low to high, and their decimal places."""
    if high <= low:
        return [low], 2
    exponent = math.floor(math.log10((high - low) / count)) - 1
    for power in range(exponent, exponent + 4):
        for base in (1, 2, 5):
            step = base * 10.0**power
            multiples = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
            if len(multiples) <= count + 1:
                return [index * step for index in multiples], max(0, -power)
    raise ValueError(f"no round values between {low} and {high}")  # not reached for finite numbers


def list_log_values(low: float, high: float, count: int) -> list[float]:
    """Return powers of ten in the range, and multiples by 2 and 5 (or 3) if there is room."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for bases in ((1, 2, 5), (1, 3), (1,)):
        values = [base * 10.0**power for power in exponents for base in bases]
        values = [value for value in values if low <= value <= high]
        if len(values) <= count + 1:
            return values
    return values[:: math.ceil(len(values) / count)]


@dataclass(frozen=True)
class LimitMark:
    """Line in a histogram at the limit of a filter."""

    at: float  # percent of the axis
    kind: str  # min or max


@dataclass(frozen=True)
class Bars:
    """The bars of one series of a histogram, as an SVG path."""

    series: str
    path: str


def stack_bars(counts: dict[str, np.ndarray], highest: int, down: bool = False) -> list[Bars]:
    """Stack the series in a drawing of 100 × `BAR_CHART_HEIGHT` units.

    Args:
        counts: rows in each bin, (bins,), by series from the axis outwards.
        highest: number of rows of a bar of full height.
        down: whether the bars hang from the top.
    """
    width = 100 / len(next(iter(counts.values())))
    floor = np.zeros(len(next(iter(counts.values()))))
    bars = []
    for series, numbers in counts.items():
        heights = np.where(numbers > 0, np.maximum(numbers / highest * BAR_CHART_HEIGHT, MIN_BIN_HEIGHT), 0)
        visible_heights = np.minimum(heights, BAR_CHART_HEIGHT - floor)
        path = "".join(
            _draw_bar(index * width, width, start, height, down)
            for index, (start, height) in enumerate(zip(floor, visible_heights, strict=True))
            if height > 0
        )
        floor = np.minimum(floor + heights, BAR_CHART_HEIGHT - MIN_BIN_HEIGHT)
        if path:
            bars.append(Bars(series, path))
    return bars


def _draw_bar(left: float, width: float, start: float, height: float, down: bool) -> str:
    top = start if down else BAR_CHART_HEIGHT - start - height
    gap = 0.12 * width
    return f"M{left + gap / 2:.2f} {top:.2f}h{width - gap:.2f}v{height:.2f}h{gap - width:.2f}z"


def scale_to_square_roots(counts: dict[str, np.ndarray], highest: int) -> dict[str, np.ndarray]:
    """Scale counts so that their sum in each bin is √(sum × highest); the series keep their shares."""
    total = np.maximum(sum(counts.values()), 1)
    return {series: numbers * np.sqrt(highest / total) for series, numbers in counts.items()}


def compute_bin_edges(values: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return the edges of the bins, and whether they are logarithmic.

    They are if the values extend to more than twelve times the median, or to less than a twelfth of it. Whole numbers
    get bins of equal whole width, so that all bins cover the same number of values.
    """
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / float(np.median(values)) > 12 or low > 0 and float(np.median(values)) / low > 12:
        return np.geomspace(low, high * (1 + 1e-9), HISTOGRAM_BINS + 1), True
    if np.all(values == np.round(values)):
        width = max(1, math.ceil((high - low + 1) / HISTOGRAM_BINS))
        return np.arange(low - 0.5, high + 0.5 + width, width), False
    return np.linspace(low, high, HISTOGRAM_BINS + 1), False


@dataclass(frozen=True)
class Line:
    """A line of a chart, in a box of 100 × 100 units that the page stretches."""

    kind: str  # class of the style sheet: seed, mean, band, host, gpu, …
    path: str
    experiment: str = ""  # whose color the line has


@dataclass(frozen=True)
class LineChart:
    """A chart of lines; `ends` has the last value of each experiment."""

    quantity: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    x_title: str
    description: str  # for screen readers
    ends: list[tuple[str, str]]
    note: str = ""


def draw_line(x: Scale, y: Scale, xs: Sequence[float], ys: Sequence[float]) -> str:
    """Return a path through at most `MAX_LINE_POINTS` of the finite values."""
    finite = np.flatnonzero(np.isfinite(ys))
    indices = finite[np.unique(np.linspace(0, len(finite) - 1, min(MAX_LINE_POINTS, len(finite))).round().astype(int))]
    return "M" + "L".join(f"{x.locate(xs[index]):.2f} {100 - y.locate(ys[index]):.2f}" for index in indices)
