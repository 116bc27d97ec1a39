"""The table of reporting/ablation.py as one small page: for each operator counts, and scores with their intervals."""

from pathlib import Path

from files import write_text
from reporting.ablation import SCORES, Variant, counts, difference, estimate_of
from reporting.comparison import GROUP_LABELS, HEADLINES, chance_note, ends, figure, gain, interval, verdict
from reporting.templates import environment

SUMMARY_COUNTS = {
    "rows_filtered": "Rows after filter",
    "rows_synthesized": "Rows after synthesize",
    "faults_left": "Planted faults left",
}
VERDICT_CLASSES = {"better": "better", "worse": "worse", "no difference shown": "same"}


def write_page(variants: list[Variant], judge_note: str, path: str | Path) -> None:
    """Write one file without scripts that fetches nothing; `judge_note` says what the scores of CLIP are worth."""
    complete, *others = variants
    measured = [(group, metric) for group, metric in SCORES if estimate_of(complete.scores, group, metric)]
    counted = [name for name, own, _ in counts(complete, complete) if name in SUMMARY_COUNTS and own is not None]
    scales = {key: _scale(others, *key) for key in measured}
    page = (
        environment()
        .get_template("ablation.html.j2")
        .render(
            complete=complete,
            judge_note=judge_note,
            chance_note=chance_note(len(measured) * len(others)),
            count_titles=[SUMMARY_COUNTS[name] for name in counted],
            score_titles=[(HEADLINES[metric][0], GROUP_LABELS[group].lower()) for group, metric in measured],
            complete_counts=[count_text(getattr(complete, name)) for name in counted],
            complete_scores=[_value(complete, *key) for key in measured],
            rows=[
                {
                    "operator": variant.without,
                    "counts": [_count(variant, complete, name) for name in counted],
                    "faults": fault_text(variant, complete),
                    "scores": [_score(variant, *key, scales[key]) for key in measured],
                }
                for variant in others
            ],
        )
    )
    write_text(path, page)


def count_text(value: float) -> str:
    """12345.0 → "12 345" with narrow spaces; a small mean over seeds keeps one digit."""
    text = f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:,.1f}"
    return text.replace(",", "\u202f").replace("-", "−")


def signed(value: float) -> str:
    return "±0" if value == 0 else ("+" if value > 0 else "") + count_text(value)


def _count(variant: Variant, complete: Variant, name: str) -> tuple[str, str]:
    """What is left without the operator, and what the operator changes."""
    own, brought = getattr(variant, name), difference(getattr(variant, name), getattr(complete, name))
    return ("–", "") if own is None or brought is None else (count_text(own), signed(brought))


def fault_text(variant: Variant, complete: Variant) -> str:
    """ "mismatched −1 930, duplicate −12": what the operator changes, by kind, largest first."""
    changes = {
        name.removeprefix("faults_"): difference(own, reference) or 0
        for name, own, reference in counts(variant, complete)
        if name.startswith("faults_") and name != "faults_left"
    }
    kinds = sorted(changes, key=lambda kind: -abs(changes[kind]))
    return ", ".join(f"{kind.replace('_', ' ')} {signed(changes[kind])}" for kind in kinds if changes[kind])


def _value(variant: Variant, group: str, metric: str) -> tuple[str, str]:
    estimate = estimate_of(variant.scores, group, metric)
    return figure(metric, estimate["mean"]), interval(metric, estimate)


def _score(variant: Variant, group: str, metric: str, scale: float) -> dict | None:
    """The operator's worth as text and as places in per cent of an axis from −scale to scale."""
    worth = estimate_of(variant.worth, group, metric)
    if not worth:
        return None
    marked = zip(("mean", "low", "high"), (worth["mean"], *ends(worth)), strict=True)
    places = {key: round(50 + 50 * value / scale, 2) for key, value in marked}
    shown = verdict(metric, worth)
    return {
        "worth": gain(metric, worth["mean"]),
        "interval": interval(metric, worth),
        "value": figure(metric, estimate_of(variant.scores, group, metric)["mean"]),
        "verdict": shown,
        "class": VERDICT_CLASSES[shown],
        "places": places,
    }


def _scale(variants: list[Variant], group: str, metric: str) -> float:
    """Half the length of a score's axis, the same for all operators so that they can be compared."""
    worths = [worth for variant in variants if (worth := estimate_of(variant.worth, group, metric))]
    return 1.05 * max((abs(end) for worth in worths for end in ends(worth)), default=0.0) or 1.0
