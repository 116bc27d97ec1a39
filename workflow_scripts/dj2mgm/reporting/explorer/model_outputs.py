"""Tables of the models' captions and answers for held-out images, with their scores."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from dj2mgm.evaluation.vqa import is_correct
from dj2mgm.files import read_jsonl, read_yaml
from dj2mgm.reporting.explorer.row_table import Table, TextFile, numbers_column, words_column

OWN = "own"  # the right image, not a shuffled one
RIGHT, WRONG = "right", "wrong"
Values = dict[tuple[str, str], dict[str, float]]


def read_captions(stages: dict[str, Path], evaluation: Path) -> Table | None:
    """Return a row per caption of a held-out image, with the image's scores; None if there are no captions."""
    references = {row["id"]: row["captions"][0] for row in read_jsonl(evaluation)}

    def lines(row: dict) -> list[list[str]]:
        return [["reference", references.get(row["id"], "")], [row["model"], row["caption"].strip() or "(empty)"]]

    rows = _own(stages["generate"] / "captions.jsonl")
    words = {"model": lambda row: row["model"]}
    return _table("captions", "Captions", stages, rows, lines, words, _scores(stages["evaluate_clip"]))


def read_answers(stages: dict[str, Path], evaluation: Path) -> Table | None:
    """Return a row per answer about a held-out image, showing wrong answers first; None if there are no answers."""
    images = {row["id"]: row["image"] for row in read_jsonl(evaluation)}

    def lines(row: dict) -> list[list[str]]:
        prediction = row["prediction"].strip() or "(empty)"
        return [["question", row["question"]], ["right answer", row["answer"]], [row["model"], prediction]]

    rows = ({"image": images.get(row["id"], "")} | row for row in _own(stages["generate"] / "answers.jsonl"))
    words = {
        "verdict": lambda row: RIGHT if is_correct(row) else WRONG,
        "type": lambda row: row["type"],
        "model": lambda row: row["model"],
    }
    table = _table("answers", "Answers", stages, rows, lines, words, {})
    if table and WRONG in table.columns["verdict"].words:
        table.shown = {"verdict": WRONG}
    return table


def _own(file: Path) -> Iterator[dict]:
    return (row for row in read_jsonl(file) if row["images"] == OWN)


def _scores(folder: Path) -> Values:
    """Read {(model, image's id): {metric: mean}} of the right images."""
    return {
        (row["model"], row["id"]): {name: total / count for name, (total, count) in row["values"].items() if count}
        for row in read_jsonl(folder / "scores.jsonl")
        if row.get("images") == OWN
    }


def _table(
    name: str,
    title: str,
    stages: dict[str, Path],
    rows: Iterable[dict],
    lines: Callable[[dict], list[list[str]]],
    words: dict[str, Callable[[dict], str]],
    scores: Values,
) -> Table | None:
    texts = TextFile()
    chosen: dict[str, list[str | None]] = {key: [] for key in words}
    measured: list[dict[str, float]] = []
    for row in rows:
        texts.add({"id": row["id"], "lines": lines(row), "image": row["image"]})
        measured.append(scores.get((row["model"], row["image_id"]), {}))
        for key, of in words.items():
            chosen[key].append(of(row))
    texts.finish()
    if not len(texts):
        return None
    columns = {key: words_column(key, values) for key, values in chosen.items()}
    metrics = dict.fromkeys(metric for values in measured for metric in values)
    for metric in metrics:
        values = np.array([values.get(metric, np.nan) for values in measured])
        columns[metric] = numbers_column(metric.replace("_", " "), values)
    root = Path(read_yaml(stages["evaluate_clip"] / "config.yaml")["image_root"])
    return Table(name, title, root, texts, {key: column for key, column in columns.items() if column})
