"""Curves of the scores of held-out answers at each checkpoint."""

from dataclasses import dataclass

import numpy as np

from dj2mgm.evaluation.vqa import is_correct
from dj2mgm.files import read_jsonl
from dj2mgm.reporting.curves import CurveLine
from dj2mgm.reporting.drawing import Scale, Tick, join_words
from dj2mgm.reporting.experiment import Experiment, RunResults

WHAT = {"loss": "Loss of held-out answers", "accuracy": "Correct held-out answers"}


@dataclass(frozen=True)
class ScoreCurves:
    """A chart of one metric after one training stage."""

    what: str
    note: str
    lines: list[CurveLine]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    last: list[tuple[int, str, str]]  # experiment's index and name, mean at the end


def score_curves(experiments: list[Experiment], stage: str) -> list[ScoreCurves]:
    """Draw each metric of the experiments whose runs measured it."""
    return [
        _draw(metric, stage, having)
        for metric in WHAT
        if (having := [(index, each) for index, each in enumerate(experiments) if _has(each, stage, metric)])
    ]


def _has(experiment: Experiment, stage: str, metric: str) -> bool:
    return all(run.held_out.get(stage) and metric in run.held_out[stage][0] for run in experiment.runs)


def _draw(metric: str, stage: str, experiments: list[tuple[int, Experiment]]) -> ScoreCurves:
    curves = {index: _over_seeds(metric, stage, experiment) for index, experiment in experiments}
    shares = metric == "accuracy"
    x = Scale(0, max(steps[-1] for steps, _ in curves.values()))
    y = Scale(0, 1 if shares else 1.04 * max(values.max() for _, values in curves.values()) or 1)
    lines, last = [], []
    for index, experiment in experiments:
        steps, values = curves[index]
        mean = values.mean(axis=0)
        if len(values) > 1:
            around = [*_points(x, y, steps, values.min(axis=0)), *_points(x, y, steps, values.max(axis=0))[::-1]]
            lines.append(CurveLine(index, "band", "M" + "L".join(around) + "Z"))
        lines.append(CurveLine(index, "mean", "M" + "L".join(_points(x, y, steps, mean))))
        last.append((index, experiment.name, f"{100 * mean[-1]:.1f} %" if shares else f"{mean[-1]:.3f}"))
    lines.sort(key=lambda line: line.kind == "mean")
    note = _note(metric, stage, [experiment for _, experiment in experiments])
    return ScoreCurves(WHAT[metric], note, lines, x.ticks(4), y.ticks(4, factor=100 if shares else 1), last)


def _over_seeds(metric: str, stage: str, experiment: Experiment) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (N,) of the longest run up to the end of the shortest, and values (S, N) of the S runs at them."""
    runs = [
        (np.array([row["step"] for row in rows], float), np.array([row[metric] for row in rows], float))
        for rows in (run.held_out[stage] for run in experiment.runs)
    ]
    end = min(steps[-1] for steps, _ in runs)
    steps = max((steps for steps, _ in runs), key=len)
    steps = steps[steps <= end]
    return steps, np.stack([np.interp(steps, *run) for run in runs])


def _points(x: Scale, y: Scale, steps: np.ndarray, values: np.ndarray) -> list[str]:
    return [f"{x.at(step):.2f} {100 - y.at(value):.2f}" for step, value in zip(steps, values, strict=True)]


def _note(metric: str, stage: str, experiments: list[Experiment]) -> str:
    """Describe the questions, and the time they took or their agreement with the evaluation."""
    runs = [run for experiment in experiments for run in experiment.runs]
    records = [run.records[stage]["scores"] for run in runs]
    numbers = sorted({record["questions"] for record in records})
    count = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    questions = f"{count} held-out {join_words(sorted({record['asked'] for record in records}))}"
    if metric == "loss":
        most = f"{100 * max(record['share'] for record in records):.1f} %"
        return f"{questions}; loss in nats per token of the answer; scoring took at most {most} of the stage's time"
    agreeing = [same for run in runs for same in _compare_with_evaluation(run)]
    if not agreeing:
        return questions
    agreement = f"{sum(agreeing)} of {len(agreeing)}"
    return f"{questions}; at the last checkpoint, the evaluation's generated answers agree in {agreement}"


def _compare_with_evaluation(run: RunResults) -> list[bool]:
    """Return whether training and evaluation agree, for each question that both asked of the last checkpoint."""
    scored = {_key(row): row["correct"] for row in read_jsonl(run.stages["finetune"] / "scored.jsonl")}
    answers = read_jsonl(run.stages["generate"] / "answers.jsonl")
    own = (row for row in answers if row["model"] == "finetune" and row["images"] == "own")
    return [scored[_key(row)] == is_correct(row) for row in own if _key(row) in scored]


def _key(row: dict) -> tuple:
    return row["id"], row["type"], row["question"], row["answer"]
