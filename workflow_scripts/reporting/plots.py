"""Loss curves as paths in a box of 100 × 100 units that the page stretches."""

from dataclasses import dataclass

import numpy as np

from reporting.experiment import Experiment
from reporting.scales import Scale, Tick

POINTS = 240  # of a line; more cannot be told apart


@dataclass(frozen=True)
class Line:
    index: int  # of the experiment, for its colour
    kind: str  # seed: one run as it was; mean: the mean over the seeds, smoothed
    path: str


@dataclass(frozen=True)
class Losses:
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    last: list[tuple[int, str, str]]  # experiment's index and name, mean loss at the end


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the values at most `window` // 2 places away, on both sides: smooth without lag. (N,) → (N,)"""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    starts = np.maximum(places - window // 2, 0)
    ends = np.minimum(places + window // 2 + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def loss_curves(experiments: list[Experiment], stage: str) -> Losses:
    """Every run's loss by optimizer step, and each experiment's mean over its runs, smoothed over 1/20 of them."""
    curves = {
        experiment.name: [
            (np.array([row["step"] for row in rows], float), np.array([row["loss"] for row in rows], float))
            for rows in (run.steps[stage] for run in experiment.runs)
        ]
        for experiment in experiments
    }
    everything = [curve for runs in curves.values() for curve in runs]
    x = Scale(0, max(steps.max() for steps, _ in everything))
    y = Scale(0, 1.04 * max(losses[np.isfinite(losses)].max(initial=0) for _, losses in everything) or 1)
    lines, last = [], []
    for index, (name, runs) in enumerate(curves.items()):
        mean_steps, mean_losses = _mean_curve(runs)
        if len(runs) > 1:
            lines += [Line(index, "seed", _path(x, y, steps, losses)) for steps, losses in runs]
        else:
            lines.append(Line(index, "seed", _path(x, y, *runs[0])))
        smooth = running_mean(mean_losses, len(mean_losses) // 20)
        lines.append(Line(index, "mean", _path(x, y, mean_steps, smooth)))
        last.append((index, name, f"{smooth[-1]:.3f}"))
    lines.sort(key=lambda line: line.kind == "mean")
    return Losses(lines, x.ticks(4), y.ticks(4), last)


def _mean_curve(runs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps of the longest run up to where the shortest ends, and the mean loss there."""
    end = min(steps[-1] for steps, _ in runs)
    steps = max((steps for steps, _ in runs), key=len)
    steps = steps[steps <= end]
    return steps, np.mean([np.interp(steps, *run) for run in runs], axis=0)


def _path(x: Scale, y: Scale, steps: np.ndarray, losses: np.ndarray) -> str:
    finite = np.flatnonzero(np.isfinite(losses))
    chosen = finite[np.unique(np.linspace(0, len(finite) - 1, min(POINTS, len(finite))).round().astype(int))]
    points = [f"{x.at(steps[place]):.2f} {100 - y.at(losses[place]):.2f}" for place in chosen]
    return "M" + "L".join(points)
