"""Templates, number formats, embedded images, axes and bars of all pages."""

import base64
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image


def template_environment() -> Environment:
    """Return the templates; they escape all values, since captions come from models and web crawls."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        # lines may break after "_" and "."
        "breakable": lambda text: Markup(str(escape(text)).replace("_", "_<wbr>").replace(".", ".<wbr>")),
        "thousands": format_integer,
        "score": lambda value: format_number(round(value, 2) + 0, 2),
        "minus": lambda text: text.replace("-", "−"),
        "listed": join_words,
    }
    return environment


def data_uri(image: Image.Image, longest_side: int, quality: int) -> str:
    """Encode the image as a WebP data URI, shrunk in place to `longest_side` px if it is larger."""
    image.thumbnail((longest_side, longest_side))
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis."""

    at: float  # per cent of the axis
    text: str


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value in per cent of the axis, clipped to 0 and 100."""
        low, high, value = (math.log(max(v, 1e-300)) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(100 * min(max(share, 0.0), 1.0), 2)

    def ticks(self, count: int = 4, factor: float = 1.0, signed: bool = False) -> list[Tick]:
        """Return about `count` ticks at round values; `factor` 100 shows shares in per cent."""
        if self.log:
            values = log_values(self.low, self.high, count)
            texts = [f"{value * factor:,.6g}".replace(",", "\u202f") for value in values]
        else:
            values, digits = round_values(self.low * factor, self.high * factor, count)
            texts = [format_number(value, digits, signed) for value in values]
            values = [value / factor for value in values]
        return [Tick(self.at(value), text) for value, text in zip(values, texts, strict=True)]


def round_values(low: float, high: float, count: int) -> tuple[list[float], int]:
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


def log_values(low: float, high: float, count: int) -> list[float]:
    """Return powers of ten in the range, and multiples by 2 and 5 (or 3) if there is room."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for bases in ((1, 2, 5), (1, 3), (1,)):
        values = [base * 10.0**power for power in exponents for base in bases]
        values = [value for value in values if low <= value <= high]
        if len(values) <= count + 1:
            return values
    return values[:: math.ceil(len(values) / count)]


def format_number(value: float, digits: int, signed: bool = False) -> str:
    """Format a number with a true minus and narrow spaces between thousands; `signed` adds a plus."""
    text = f"{value:{'+' if signed and value else ''},.{digits}f}"
    return text.replace("-", "−").replace(",", "\u202f")


def list_counts(counts: dict[str, int]) -> str:
    """List the counts that are not 0: {"empty": 3, "missing": 0} → "empty 3"."""
    return ", ".join(f"{name.replace('_', ' ')} {format_integer(count)}" for name, count in counts.items() if count)


def format_integer(number: int) -> str:
    """Format a whole number with narrow no-break spaces: 12345 → "12 345"."""
    return f"{number:,}".replace(",", "\u202f").replace("-", "−")


def join_words(items: list[str]) -> str:
    """Join words in a sentence: ["a", "b", "c"] → "a, b and c"."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


BINS = 32  # of a histogram
HEIGHT = 100.0  # units of the drawing; it is stretched to the page's width and height
SMALLEST = 1.6  # units; the least height of a bin that has rows, so that it stays visible


@dataclass(frozen=True)
class Bars:
    """The bars of one series of a histogram, as an SVG path."""

    series: str
    path: str


def stacked_bars(counts: dict[str, np.ndarray], highest: int, down: bool = False) -> list[Bars]:
    """Stack the series in a drawing of 100 × HEIGHT units.

    Args:
        counts: rows in each bin, (bins,), by series from the axis outwards.
        highest: number of rows of a bar of full height.
        down: whether the bars hang from the top.
    """
    width = 100 / len(next(iter(counts.values())))
    floor = np.zeros(len(next(iter(counts.values()))))
    bars = []
    for series, numbers in counts.items():
        heights = np.where(numbers > 0, np.maximum(numbers / highest * HEIGHT, SMALLEST), 0)
        places = zip(range(len(numbers)), floor, np.minimum(heights, HEIGHT - floor), strict=True)
        path = "".join(_bar(index * width, width, start, height, down) for index, start, height in places if height > 0)
        floor = np.minimum(floor + heights, HEIGHT - SMALLEST)
        if path:
            bars.append(Bars(series, path))
    return bars


def _bar(left: float, width: float, start: float, height: float, down: bool) -> str:
    top = start if down else HEIGHT - start - height
    gap = 0.12 * width
    return f"M{left + gap / 2:.2f} {top:.2f}h{width - gap:.2f}v{height:.2f}h{gap - width:.2f}z"
