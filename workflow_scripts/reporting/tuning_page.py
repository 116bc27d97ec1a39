"""The table of reporting/tuning.py as one small page."""

from pathlib import Path

from evaluation.intervals import Estimate
from files import write_text
from reporting.comparison import HEADLINES, chance_note, ends, figure, interval
from reporting.record import duration
from reporting.scales import Scale, grouped
from reporting.templates import environment
from reporting.tuning import KEPT, Kept, Tuning

COSTS = {  # title, text
    "trained_parameters": ("Parameters trained", grouped),
    "train_seconds": ("Time", duration),
    "gpu_gib": ("Peak GPU memory", "{:.2f} GiB".format),
    "host_gib": ("Peak host memory", "{:.2f} GiB".format),
}
SHARE = f"{100 * KEPT:.0f} %"
VERDICTS = {True: ("better", "yes"), False: ("worse", "no"), None: ("same", "not shown")}  # class, and in words


def write_page(rows: list[Tuning], title: str, path: str | Path) -> None:
    """Write one file without scripts that fetches nothing."""
    costs = [key for key in COSTS if any(getattr(row, key) is not None for row in rows)]
    scores = list(rows[0].scores)
    scales = {score: _scale([row.scores[score] for row in rows if score in row.scores]) for score in scores}
    page = (
        environment()
        .get_template("tuning.html.j2")
        .render(
            title=title,
            reference=rows[0].name,
            chance_note=chance_note(sum(len(row.kept) for row in rows)),
            seeds=max((score["seeds"] for row in rows for score in row.scores.values()), default=0),
            share=SHARE,
            cost_titles=[COSTS[key][0] for key in costs],
            score_titles=[HEADLINES[score][0] for score in scores],
            rows=[
                {
                    "name": row.name,
                    "costs": [_cost(rows, row, key) for key in costs],
                    "scores": [_score(row, score, scales[score]) for score in scores],
                }
                for row in rows
            ],
        )
    )
    write_text(path, page)


def _cost(rows: list[Tuning], row: Tuning, key: str) -> tuple[str, float]:
    """As text, and in per cent of the most expensive."""
    value, most = getattr(row, key), max(getattr(other, key) or 0 for other in rows)
    return ("–", 0.0) if value is None else (COSTS[key][1](value), round(100 * value / most, 2) if most else 0.0)


def _scale(estimates: list[Estimate]) -> Scale:
    low, high = min(ends(one)[0] for one in estimates), max(ends(one)[1] for one in estimates)
    margin = 0.05 * (high - low) or 0.01
    return Scale(low - margin, high + margin)


def _score(row: Tuning, score: str, scale: Scale) -> dict | None:
    """The score, its places in per cent of an axis that all rows share, and what is kept of the reference's."""
    if score not in row.scores:
        return None
    estimate = row.scores[score]
    shown = {
        "value": figure(score, estimate["mean"]),
        "interval": interval(score, estimate),
        "places": dict(zip(("mean", "low", "high"), map(scale.at, (estimate["mean"], *ends(estimate))), strict=True)),
    }
    return shown | _kept(row.kept.get(score))


def _kept(kept: Kept | None) -> dict:
    if kept is None:
        return {"class": "same", "kept": []}
    style, words = VERDICTS[kept.enough]
    return {"class": style, "kept": [f"{100 * kept.share:.1f} % kept", f"at least {SHARE}: {words}"]}
