"""Loss curves as SVG data URIs, the same bytes for the same figures."""

import base64
import io

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend must be chosen first)

EXPERIMENT_COLORS = ("#2f5bd7", "#d9622b", "#1c8c6e", "#8b48b8", "#b8891b", "#c23a6b")
INK, FAINT = "#3d444d", "#e4e2dc"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 11,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # ids do not change from run to run
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def experiment_color(index: int) -> str:
    return EXPERIMENT_COLORS[index % len(EXPERIMENT_COLORS)]


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the values at most `window` // 2 places away, on both sides: smooth without lag. (N,) → (N,)"""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    starts = np.maximum(places - window // 2, 0)
    ends = np.minimum(places + window // 2 + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def loss_curves(steps_of: dict[str, list[dict]]) -> str:
    """Loss by step, one line per experiment: the raw loss pale, its running mean over 1/20 of the run on top.

    Args:
        steps_of: rows {"step", "loss", …} by experiment name, in the order of their colours.

    Returns:
        `data:image/svg+xml;base64,…`
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.4, 3.2), layout="constrained")
        for index, (name, rows) in enumerate(steps_of.items()):
            steps, losses = (np.array([row[key] for row in rows]) for key in ("step", "loss"))
            color = experiment_color(index)
            axes.plot(steps, losses, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, running_mean(losses, len(losses) // 20), color=color, linewidth=2.2, label=name)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss")
        axes.set_ylim(bottom=0)
        axes.tick_params(length=0)
        if len(steps_of) > 1:
            axes.legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
        plt.close(figure)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
