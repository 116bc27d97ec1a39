"""Stacked bars of a histogram as SVG paths, one for each series."""

from dataclasses import dataclass

import numpy as np

BINS = 32
HEIGHT = 100.0  # units of the drawing; it is stretched to the page's width and height
SMALLEST = 1.6  # units that a bin with few rows still gets, so that it is seen


@dataclass(frozen=True)
class Bars:
    series: str
    path: str


def stacked_bars(counts: dict[str, np.ndarray], highest: int, down: bool = False) -> list[Bars]:
    """One series on top of the other, in drawings of 100 × HEIGHT units; `down` hangs them from the top.

    Args:
        counts: by series, from the axis outwards: (bins,) rows in each bin.
        highest: rows that a bar of full height stands for.
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
