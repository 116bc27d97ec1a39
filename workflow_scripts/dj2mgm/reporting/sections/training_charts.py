"""Charts of training by stage: loss, scores of held-out answers, and memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dj2mgm.evaluation.vqa import is_correct
from dj2mgm.monitoring.memory_files import join_seconds, read_memory_rows
from dj2mgm.reporting.charts import MAX_LINE_POINTS, Line, LineChart, Scale, draw_line
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import join_words
from dj2mgm.score_groups import FINETUNED, OWN
from dj2mgm.storage.files import read_jsonl

QUANTITIES = {"loss": "Loss of held-out answers", "accuracy": "Correct held-out answers"}
Curve = tuple[np.ndarray, np.ndarray]  # steps and values, (N,) each


def draw_loss_chart(experiments: list[ExperimentResults], stage: str) -> LineChart:
    """Draw each run's loss, and each experiment's mean over its runs, smoothed over 1/20 of it."""
    curves = [[_read_curve(run.steps[stage], "loss") for run in experiment.runs] for experiment in experiments]
    all_curves = [curve for runs in curves for curve in runs]
    x = Scale(0, max(steps.max() for steps, _ in all_curves))
    y = Scale(0, 1.04 * max(losses[np.isfinite(losses)].max(initial=0) for _, losses in all_curves) or 1)
    lines, ends = [], []
    for experiment, runs in zip(experiments, curves, strict=True):
        lines += [Line("seed", draw_line(x, y, *run), experiment.name) for run in runs]
        steps, losses = align_curves(runs)
        smooth = compute_running_mean(losses.mean(axis=0), len(steps) // 20)
        lines.append(Line("mean", draw_line(x, y, steps, smooth), experiment.name))
        ends.append((experiment.name, f"{smooth[-1]:.3f}"))
    return _build_training_chart("Loss", lines, x, y, ends)


def draw_score_charts(experiments: list[ExperimentResults], stage: str) -> list[LineChart]:
    """Draw each metric of the experiments whose runs measured it, as a mean with a band over the seeds."""
    return [
        _draw_score_chart(metric, stage, measured)
        for metric in QUANTITIES
        if (measured := [experiment for experiment in experiments if _has_metric(experiment, stage, metric)])
    ]


def _has_metric(experiment: ExperimentResults, stage: str, metric: str) -> bool:
    return all(
        run.checkpoint_scores.get(stage) and metric in run.checkpoint_scores[stage][0] for run in experiment.runs
    )


def _draw_score_chart(metric: str, stage: str, experiments: list[ExperimentResults]) -> LineChart:
    """Return the mean curve of each experiment over its seeds, with a band from the lowest to the highest seed."""
    curves = [
        align_curves([_read_curve(run.checkpoint_scores[stage], metric) for run in experiment.runs])
        for experiment in experiments
    ]
    is_share = metric == "accuracy"
    x = Scale(0, max(steps[-1] for steps, _ in curves))
    y = Scale(0, 1 if is_share else 1.04 * max(values.max() for _, values in curves) or 1)
    lines, ends = [], []
    for experiment, (steps, values) in zip(experiments, curves, strict=True):
        mean = values.mean(axis=0)
        if len(values) > 1:
            outline = np.concatenate([values.min(axis=0), values.max(axis=0)[::-1]])
            path = draw_line(x, y, np.concatenate([steps, steps[::-1]]), outline)
            lines.append(Line("band", f"{path}Z", experiment.name))
        lines.append(Line("mean", draw_line(x, y, steps, mean), experiment.name))
        ends.append((experiment.name, f"{100 * mean[-1]:.1f} %" if is_share else f"{mean[-1]:.3f}"))
    note = _describe_questions(metric, stage, experiments)
    return _build_training_chart(QUANTITIES[metric], lines, x, y, ends, note, 100 if is_share else 1)


def _build_training_chart(
    quantity: str, lines: list[Line], x: Scale, y: Scale, ends: list, note: str = "", factor: float = 1
) -> LineChart:
    last = ", ".join(f"{name} {value}" for name, value in ends)
    return LineChart(
        quantity,
        sorted(lines, key=lambda line: line.kind == "mean"),  # means are drawn last
        x.choose_ticks(4),
        y.choose_ticks(4, factor=factor),
        "optimizer step",
        f"{quantity} by optimizer step. At the end: {last}",
        ends,
        note,
    )


def _read_curve(rows: list[dict], metric: str) -> Curve:
    return np.array([row["step"] for row in rows], float), np.array([row[metric] for row in rows], float)


def align_curves(curves: list[Curve]) -> Curve:
    """Return the steps (N,) of the longest curve up to the end of the shortest, and all S curves at them, (S, N)."""
    end = min(steps[-1] for steps, _ in curves)
    steps = max((steps for steps, _ in curves), key=len)
    steps = steps[steps <= end]
    return steps, np.stack([np.interp(steps, *curve) for curve in curves])


def compute_running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over at most `window` // 2 values on both sides, so that the result has no lag. (N,) → (N,)."""
    return pd.Series(values).rolling(2 * (window // 2) + 1, center=True, min_periods=1).mean().to_numpy()


def _describe_questions(metric: str, stage: str, experiments: list[ExperimentResults]) -> str:
    """Describe the questions, and the time they took or their agreement with the evaluation."""
    runs = [run for experiment in experiments for run in experiment.runs]
    records = [run.records[stage].scores for run in runs]
    numbers = sorted({record.questions for record in records})
    count = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    scope = " in each run" if len(numbers) > 1 else ""
    questions = f"{count} held-out {join_words(sorted({record.asked for record in records}))}{scope}"
    if metric == "loss":
        max_share = f"{100 * max(record.share for record in records):.1f} %"
        return (
            f"{questions}; loss in nats per token of the answer; scoring took at most {max_share} of the stage's time"
        )
    agreements = [agrees for run in runs for agrees in _compare_with_evaluation(run)]
    if not agreements:
        return questions
    agreement = f"{sum(agreements)} of {len(agreements)}"
    return f"{questions}; the last checkpoint and the evaluation agree on {agreement} answers"


def _compare_with_evaluation(run: RunResults) -> list[bool]:
    """Return whether training and evaluation agree, for each question that both asked the last checkpoint."""
    correct = {_build_key(row): row["correct"] for row in read_jsonl(run.stages["finetune"] / "scored.jsonl")}
    answers = read_jsonl(run.stages["generate"] / "answers.jsonl")
    own_rows = (row for row in answers if row["model"] == FINETUNED and row["images"] == OWN)
    return [correct[_build_key(row)] == is_correct(row) for row in own_rows if _build_key(row) in correct]


def _build_key(row: dict) -> tuple:
    return row["id"], row["type"], row["question"], row["answer"]


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

    def find_peak(self, series: str) -> float:
        """Return the highest reading in GiB."""
        return float(self.sizes[series].max())


@dataclass(frozen=True)
class Band:
    """A stage's part of the time axis."""

    stage: str
    left: float  # percent
    width: float
    marks: list[tuple[float, str]]  # positions at which training and saving begin


@dataclass(frozen=True)
class Timeline:
    """The memory chart of an experiment's training stages, one after the other, and its table."""

    chart: LineChart
    bands: list[Band]
    series: dict[str, str]  # measured series with their meaning
    rows: list[dict]


def read_stage_memory(run: RunResults, stage: str) -> StageMemory:
    """Read the memory readings of a training stage, with the plan's predictions and the limits."""
    record = run.records[stage]
    rows = read_memory_rows(Path(run.stages[stage]) / "memory.csv")
    gpus = [name for name in rows[0] if name.startswith("gpu")]
    sizes = {"host": np.array([float(row["job_gib"]) for row in rows])}
    if gpus:
        sizes["gpu"] = np.array([max(float(row[name] or 0) for name in gpus) for row in rows])
    limits, plan = record.memory or {}, record.memory_plan or {}
    return StageMemory(
        stage=stage,
        seconds=np.array(join_seconds(rows)),
        phases=[row["phase"] for row in rows],
        sizes=sizes,
        predicted={series: plan[f"{series}_gib"] for series in sizes if plan.get(f"{series}_gib") is not None},
        limits={series: limits[f"{series}_limit_gib"] for series in sizes if limits.get(f"{series}_limit_gib")},
    )


def draw_memory_timeline(experiment: ExperimentResults) -> Timeline:
    """Draw the memory of the experiment's first run."""
    stages = [read_stage_memory(experiment.runs[0], stage) for stage in experiment.runs[0].records]
    starts = np.cumsum([0.0, *(stage.seconds[-1] for stage in stages)])
    unit, unit_seconds, _ = next(u for u in TIME_UNITS if starts[-1] >= u[2])
    x = Scale(0, float(starts[-1]))
    heights = [
        height for stage in stages for s in stage.sizes for height in (stage.find_peak(s), stage.predicted.get(s, 0))
    ]
    y = Scale(0, 1.08 * max(heights))
    lines, bands = [], []
    for stage, start, end in zip(stages, starts, starts[1:], strict=False):
        lines += _draw_memory_lines(x, y, stage, float(start), float(end))
        left, marks = x.locate(float(start)), _find_phase_marks(x, stage, float(start))
        bands.append(Band(stage.stage, left, round(x.locate(float(end)) - left, 2), marks))
    rows = [_build_row(stage, series) for stage in stages for series in stage.sizes]
    peaks = ", ".join(f"{row['stage']} {row['device']} {row['peak']}" for row in rows)
    chart = LineChart(
        "Memory",
        lines,
        x.choose_ticks(4, factor=1 / unit_seconds),
        y.choose_ticks(4),
        f"{unit} (vertical axis: GiB)",
        f"Memory over time. Peaks: {peaks}",
        ends=[],
    )
    measured = {series: SERIES[series] for series in SERIES if any(series in stage.sizes for stage in stages)}
    return Timeline(chart, bands, measured, rows)


def _draw_memory_lines(x: Scale, y: Scale, stage: StageMemory, start: float, end: float) -> Iterator[Line]:
    for series, sizes in stage.sizes.items():
        indices = _find_peaks(sizes)
        yield Line(series, draw_line(x, y, start + stage.seconds[indices], sizes[indices]))
        if series in stage.predicted:
            yield Line(f"{series} predicted", draw_line(x, y, [start, end], 2 * [stage.predicted[series]]))


def _find_peaks(sizes: np.ndarray) -> list[int]:
    """Return the indices of at most `MAX_LINE_POINTS` readings, the largest of their neighbors, to keep all peaks."""
    groups = np.array_split(np.arange(len(sizes)), min(MAX_LINE_POINTS, len(sizes)))
    return [group[sizes[group].argmax()] for group in groups]


def _find_phase_marks(x: Scale, stage: StageMemory, start: float) -> list[tuple[float, str]]:
    changes = [index for index in range(1, len(stage.phases)) if stage.phases[index] != stage.phases[index - 1]]
    return [(x.locate(start + float(stage.seconds[index])), f"{stage.phases[index]} begins") for index in changes]


def _build_row(stage: StageMemory, series: str) -> dict:
    peak, predicted, limit = stage.find_peak(series), stage.predicted.get(series), stage.limits.get(series)
    return {
        "stage": stage.stage,
        "device": "GPU" if series == "gpu" else series,
        "peak": f"{peak:.2f} GiB",
        "predicted": "–" if predicted is None else f"{predicted:.2f} GiB",
        "error": "–" if predicted is None else f"{100 * (predicted / peak - 1):+.0f} %".replace("-", "−"),
        "limit": "–" if limit is None else f"{limit:.1f} GiB",
    }
