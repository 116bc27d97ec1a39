"""Curves of loss and memory over time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dj2mgm.memory.memory_csv import joined_seconds, read_rows
from dj2mgm.reporting.drawing import Scale, Tick
from dj2mgm.reporting.experiment import Experiment, RunResults

POINTS = 240  # most points of a line


@dataclass(frozen=True)
class CurveLine:
    """A line of a chart."""

    index: int  # of the experiment, for its color
    kind: str  # seed: one run; mean: the mean over the seeds; band: the range of the seeds
    path: str  # in a box of 100 × 100 units, which the page stretches


@dataclass(frozen=True)
class LossCurves:
    """A chart of the loss of one training stage."""

    lines: list[CurveLine]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    last: list[tuple[int, str, str]]  # experiment's index and name, mean loss at the end


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over at most `window` // 2 values on both sides, so that the result has no lag. (N,) → (N,)."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    starts = np.maximum(places - window // 2, 0)
    ends = np.minimum(places + window // 2 + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def loss_curves(experiments: list[Experiment], stage: str) -> LossCurves:
    """Draw each run's loss by optimizer step, and each experiment's mean over its runs, smoothed over 1/20 of it."""
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
            lines += [CurveLine(index, "seed", _path(x, y, steps, losses)) for steps, losses in runs]
        else:
            lines.append(CurveLine(index, "seed", _path(x, y, *runs[0])))
        smooth = running_mean(mean_losses, len(mean_losses) // 20)
        lines.append(CurveLine(index, "mean", _path(x, y, mean_steps, smooth)))
        last.append((index, name, f"{smooth[-1]:.3f}"))
    lines.sort(key=lambda line: line.kind == "mean")
    return LossCurves(lines, x.ticks(4), y.ticks(4), last)


def _mean_curve(runs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps of the longest run up to the end of the shortest, and the mean loss at them."""
    end = min(steps[-1] for steps, _ in runs)
    steps = max((steps for steps, _ in runs), key=len)
    steps = steps[steps <= end]
    return steps, np.mean([np.interp(steps, *run) for run in runs], axis=0)


def _path(x: Scale, y: Scale, steps: np.ndarray, losses: np.ndarray) -> str:
    finite = np.flatnonzero(np.isfinite(losses))
    chosen = finite[np.unique(np.linspace(0, len(finite) - 1, min(POINTS, len(finite))).round().astype(int))]
    points = [f"{x.at(steps[place]):.2f} {100 - y.at(losses[place]):.2f}" for place in chosen]
    return "M" + "L".join(points)


SERIES = {"host": "host memory of the job's processes", "gpu": "memory of the fullest GPU"}
TIME_UNITS = (("hours", 3600, 3 * 3600), ("minutes", 60, 3 * 60), ("seconds", 1, 0))  # name, seconds, least total


@dataclass(frozen=True)
class StageMemory:
    """N memory readings of one stage, all attempts joined."""

    stage: str
    seconds: np.ndarray  # since the stage began; (N,)
    phases: list[str]
    sizes: dict[str, np.ndarray]  # GiB, (N,), by series: host and, with a GPU, gpu
    predicted: dict[str, float]  # GiB by series; empty without a memory plan
    limits: dict[str, float]  # GiB by series

    def peak(self, series: str) -> float:
        """Return the highest reading in GiB."""
        return float(self.sizes[series].max())


@dataclass(frozen=True)
class MemoryLine:
    """A line of the memory chart."""

    kind: str  # host or gpu, for a prediction followed by " predicted"
    path: str


@dataclass(frozen=True)
class Band:
    """A stage's part of the time axis."""

    stage: str
    left: float  # per cent
    width: float
    marks: list[tuple[float, str]]  # places at which training and saving begin


@dataclass(frozen=True)
class Timeline:
    """The memory chart of an experiment's training stages, one after the other, and its table."""

    lines: list[MemoryLine]
    bands: list[Band]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    unit: str  # of the time axis
    series: dict[str, str]  # measured series with their meaning
    rows: list[dict]  # of the table


def read_stage_memory(run: RunResults, stage: str) -> StageMemory:
    """Read the memory readings of a training stage, with the plan's predictions and the limits."""
    record = run.records[stage]
    rows = read_rows(Path(run.stages[stage]) / "memory.csv")
    gpus = [name for name in rows[0] if name.startswith("gpu")]
    sizes = {"host": np.array([float(row["job_gib"]) for row in rows])}
    if gpus:
        sizes["gpu"] = np.array([max(float(row[name] or 0) for name in gpus) for row in rows])
    limits, plan = record.get("memory") or {}, record.get("memory_plan") or {}
    return StageMemory(
        stage=stage,
        seconds=np.array(joined_seconds(rows)),
        phases=[row["phase"] for row in rows],
        sizes=sizes,
        predicted={series: plan[f"{series}_gib"] for series in sizes if plan.get(f"{series}_gib") is not None},
        limits={series: limits[f"{series}_limit_gib"] for series in sizes if limits.get(f"{series}_limit_gib")},
    )


def memory_timeline(experiment: Experiment) -> Timeline:
    """Draw the memory of the experiment's first run."""
    stages = [read_stage_memory(experiment.runs[0], stage) for stage in experiment.runs[0].records]
    starts = np.cumsum([0.0, *(stage.seconds[-1] for stage in stages)])
    unit, unit_seconds, _ = next(u for u in TIME_UNITS if starts[-1] >= u[2])
    x = Scale(0, float(starts[-1]))
    heights = [height for stage in stages for s in stage.sizes for height in (stage.peak(s), stage.predicted.get(s, 0))]
    y = Scale(0, 1.08 * max(heights))
    lines, bands = [], []
    for stage, start, end in zip(stages, starts, starts[1:], strict=False):
        lines += _lines(x, y, stage, float(start), float(end))
        left, marks = x.at(float(start)), _marks(x, stage, float(start))
        bands.append(Band(stage.stage, left, round(x.at(float(end)) - left, 2), marks))
    return Timeline(
        lines=lines,
        bands=bands,
        x_ticks=x.ticks(4, factor=1 / unit_seconds),
        y_ticks=y.ticks(4),
        unit=unit,
        series={series: SERIES[series] for series in SERIES if any(series in stage.sizes for stage in stages)},
        rows=[_row(stage, series) for stage in stages for series in stage.sizes],
    )


def _lines(x: Scale, y: Scale, stage: StageMemory, start: float, end: float) -> Iterator[MemoryLine]:
    for series, sizes in stage.sizes.items():
        points = [f"{x.at(start + at):.2f} {100 - y.at(size):.2f}" for at, size in _peaks(stage.seconds, sizes)]
        yield MemoryLine(series, "M" + "L".join(points))
        if series in stage.predicted:
            height = 100 - y.at(stage.predicted[series])
            yield MemoryLine(f"{series} predicted", f"M{x.at(start):.2f} {height:.2f}H{x.at(end):.2f}")


def _peaks(seconds: np.ndarray, sizes: np.ndarray) -> Iterator[tuple[float, float]]:
    """Return at most POINTS readings, each the largest of a group of neighbors, so that no peak is lost."""
    for group in np.array_split(np.arange(len(sizes)), min(POINTS, len(sizes))):
        largest = group[sizes[group].argmax()]
        yield float(seconds[largest]), float(sizes[largest])


def _marks(x: Scale, stage: StageMemory, start: float) -> list[tuple[float, str]]:
    changes = [place for place in range(1, len(stage.phases)) if stage.phases[place] != stage.phases[place - 1]]
    return [(x.at(start + float(stage.seconds[place])), f"{stage.phases[place]} begins") for place in changes]


def _row(stage: StageMemory, series: str) -> dict:
    peak, predicted, limit = stage.peak(series), stage.predicted.get(series), stage.limits.get(series)
    return {
        "stage": stage.stage,
        "of": "GPU" if series == "gpu" else series,
        "peak": f"{peak:.2f} GiB",
        "predicted": "–" if predicted is None else f"{predicted:.2f} GiB",
        "error": "–" if predicted is None else f"{100 * (predicted / peak - 1):+.0f} %".replace("-", "−"),
        "limit": "–" if limit is None else f"{limit:.1f} GiB",
    }
