"""The headline metrics as panels of bars: experiments, models and controls on one scale."""

from collections.abc import Iterator
from dataclasses import dataclass

from reporting.comparison import GROUP_LABELS, HEADLINES, figure, gain, interval, is_share
from reporting.experiment import Experiment

Estimate = dict[str, float]


@dataclass(frozen=True)
class Bar:
    """One group's value and 95 % interval; width, low and high in per cent of the panel's scale."""

    label: str
    kind: str  # own, shuffled or reference
    text: str
    interval: str
    width: float
    low: float
    high: float


@dataclass(frozen=True)
class Part:
    """One experiment's part of a panel."""

    experiment: str
    index: int  # of the experiment, for its colour
    value: str  # of the most trained model, on own images
    gain: str  # the difference to the same model on shuffled images
    bars: list[Bar]


@dataclass(frozen=True)
class Panel:
    title: str
    meaning: str
    parts: list[Part]


def headline_panels(experiments: list[Experiment]) -> list[Panel]:
    """One panel for each headline metric that any experiment measured; bars start at 0."""
    panels = []
    for metric, (title, meaning) in HEADLINES.items():
        measured = [_measured(experiment, metric) for experiment in experiments]
        highest = max((estimate["high"] for groups in measured for estimate in groups.values()), default=0)
        scale = 1 if is_share(metric) else 1.05 * highest or 1
        if parts := list(_parts(experiments, measured, metric, scale)):
            panels.append(Panel(title, meaning, parts))
    return panels


def _measured(experiment: Experiment, metric: str) -> dict[str, Estimate]:
    """The metric's estimates by group, in the order of GROUP_LABELS."""
    groups = experiment.groups
    return {name: groups[name][metric] for name in GROUP_LABELS if metric in groups.get(name, {})}


def _parts(
    experiments: list[Experiment], measured: list[dict[str, Estimate]], metric: str, scale: float
) -> Iterator[Part]:
    for index, (experiment, groups) in enumerate(zip(experiments, measured, strict=True)):
        if not groups:
            continue
        model = next(iter(groups)).split("/")[0]  # GROUP_LABELS puts the most trained model first
        value = figure(metric, groups[f"{model}/own"]["mean"])
        difference = gain(metric, groups[f"{model}/difference"]["mean"])
        bars = [
            _bar(name, metric, estimate, scale) for name, estimate in groups.items() if not name.endswith("/difference")
        ]
        yield Part(experiment.name, index, value, f"{difference} over shuffled images", bars)


def _bar(group: str, metric: str, estimate: Estimate, scale: float) -> Bar:
    width, low, high = (round(100 * min(max(estimate[key] / scale, 0), 1), 2) for key in ("mean", "low", "high"))
    text = figure(metric, estimate["mean"])
    return Bar(GROUP_LABELS[group], group.split("/")[-1], text, interval(metric, estimate), width, low, high)
