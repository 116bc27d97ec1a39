"""What a series of memory readings says: peak, mean, and whether it keeps growing."""

from dataclasses import dataclass

import numpy as np

LEAK_SHARE = 0.02  # of the mean: growth over the second half that counts, if it also stands out of the noise
NOISE = 3.0  # standard deviations of the values around the line


@dataclass(frozen=True)
class Summary:
    """One column of readings, in GiB."""

    mean: float
    peak: float
    peak_seconds: float  # when it was reached, after the start
    slope_per_hour: float  # of a straight line through the second half, when loading is over
    grows: bool  # more than noise explains: a leak, if the work is the same all the time


def summarize(seconds: list[float], values: list[float]) -> Summary:
    """
    Args:
        seconds: (N,) times of the readings, N ≥ 1.
        values: (N,) GiB.
    """
    times, sizes = np.array(seconds, dtype=float), np.array(values, dtype=float)
    peak = int(sizes.argmax())
    slope, grows = _growth(times[len(times) // 2 :], sizes[len(sizes) // 2 :])
    return Summary(float(sizes.mean()), float(sizes[peak]), float(times[peak]), 3600 * slope, grows)


def _growth(times: np.ndarray, sizes: np.ndarray) -> tuple[float, bool]:
    """GiB a second of the least-squares line, and whether it rises by more than noise."""
    if len(times) < 4 or times[0] == times[-1]:
        return 0.0, False
    slope, start = np.polyfit(times - times[0], sizes, 1)
    noise = float(np.std(sizes - (slope * (times - times[0]) + start)))
    growth = slope * (times[-1] - times[0])
    return float(slope), bool(growth > max(NOISE * noise, LEAK_SHARE * sizes.mean()))
