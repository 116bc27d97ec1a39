"""Accuracy on MMBench's multiple-choice questions, circular where the file rotates their options.

Under CircularEval (Liu et al. 2023, arXiv:2307.06281) a question is asked once for each rotation of its options and is
answered right only if every rotation is: a model that always says A gets nothing.
"""

import re

from evaluation.groups import Metrics, Rows
from evaluation.intervals import Measurements
from formats.mmbench import ROTATION_STEP

LETTER = re.compile(r"\(?([A-D])(?:[).:,]+(?=\s|$)|$)", re.MULTILINE)


def chosen_option(prediction: str, options: dict[str, str]) -> str | None:
    """The letter that an answer names ("B", "B.", "(B)", "B. a cat") or whose text it repeats; None: unreadable."""
    text = prediction.strip()
    match = LETTER.match(text)
    if match and match[1] in options:
        return match[1]
    repeated = [letter for letter, option in options.items() if option.strip().lower() == text.lower()]
    return repeated[0] if len(repeated) == 1 else None


def measure_mmbench(rows: Rows) -> Metrics:
    """Accuracy in per cent: `score` of all questions, `category/<name>` and `l2_category/<name>` of some.

    {} where the answers are withheld.
    """
    if rows[0]["answer"] is None:
        return {}
    rotations: dict[int, Rows] = {}
    for row in rows:
        rotations.setdefault(row["index"] % ROTATION_STEP, []).append(row)
    by_metric: dict[str, list[int]] = {"score": list(rotations)}
    for key in ("l2_category", "category"):
        for question in sorted(rotations, key=lambda question: rotations[question][0][key]):
            if category := rotations[question][0][key]:
                by_metric.setdefault(f"{key}/{category}", []).append(question)
    right = {
        question: all(chosen_option(row["prediction"], row["options"]) == row["answer"] for row in asked)
        for question, asked in rotations.items()
    }
    return {
        name: Measurements.of([100 * right[question] for question in questions], list(map(str, questions)))
        for name, questions in by_metric.items()
    }
