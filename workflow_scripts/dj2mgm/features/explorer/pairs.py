"""Table of a dataset's pairs, with their statistics, the step that dropped them, and rewritten captions.

Rows have the order of the dataset's file. Numbers are in memory, eight bytes each; texts are in a temporary file.

- `read_stage_table`: the pairs of a run, with the statistics and events of its data stages.
- `read_instructions`, `read_analysis`, `read_plain_table`, `read_held_out`: other kinds of rows, with fewer columns.
"""

import json
import math
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from dj2mgm.data.formats import extract_caption
from dj2mgm.errors import InputError
from dj2mgm.features.explorer.row_table import (
    DISTANCE,
    Column,
    ExplorerStep,
    RowTable,
    TextFile,
    apply_limits,
    build_column_key,
    build_number_column,
    build_steps,
    build_word_column,
)
from dj2mgm.recipes.catalogue import label_statistic
from dj2mgm.records import (
    INSTRUCTIONS_FILE,
    RecipeSummary,
    describe_clip_doubt,
    read_image_root,
    read_recipe_summary,
)
from dj2mgm.storage.files import read_jsonl, read_yaml
from dj2mgm.storage.streaming import DiskMap

QUESTION = "question"  # label of a line
CAPTION_STATES = {True: "rewritten", False: "original"}


@dataclass(frozen=True)
class StageFolder:
    """The folder of a stage that ran a recipe."""

    name: str
    folder: Path

    @property
    def recipe(self) -> dict:
        return read_yaml(self.folder / "config.yaml")["recipe"]

    @property
    def image_root(self) -> Path:
        return read_image_root(self.folder)

    @property
    def note(self) -> str:
        return describe_clip_doubt(read_yaml(self.folder / "config.yaml").get("clip"), self.image_root)

    @property
    def summary(self) -> RecipeSummary:
        return read_recipe_summary(self.folder / "summary.json")


class _Statistics:
    """A stage's statistics by row, numbers and strings."""

    def __init__(self, rows: int):
        self.rows = rows
        self._numbers: dict[str, array] = {}  # array is faster than NumPy for single values
        self.words: dict[str, list[str | None]] = {}

    def add(self, row: int, stats: dict) -> None:
        for name, value in stats.items():
            if isinstance(value, list):
                value = value[0] if len(value) == 1 else None
            if isinstance(value, str):
                if name not in self.words:
                    self.words[name] = [None] * self.rows
                self.words[name][row] = sys.intern(value)
            elif isinstance(value, int | float) and math.isfinite(value):
                if name not in self._numbers:
                    self._numbers[name] = array("d", [math.nan]) * self.rows
                self._numbers[name][row] = value

    @cached_property
    def numbers(self) -> dict[str, np.ndarray]:
        """Numbers by statistic, (N,) float64; complete once all rows are added."""
        return {name: np.frombuffer(values, dtype=np.float64) for name, values in self._numbers.items()}


def read_instructions(stage: StageFolder) -> RowTable:
    """Read the rows of a stage whose recipe is for instructions, and what it did with them."""
    return replace(
        read_stage_table(stage.folder / INSTRUCTIONS_FILE, [stage]), name="instructions", title="Instructions"
    )


def read_stage_table(data: Path, stages: list[StageFolder]) -> RowTable:
    """Read the rows of `data`, and what the stages, in their order, did with them."""
    (indices, rows), extras = _index_rows(data), DiskMap()
    fate, clusters = np.zeros(rows), _Clusters(rows)
    changed = np.zeros(rows, dtype=bool)
    columns, steps = {}, []
    for stage in stages:
        statistics = _Statistics(rows)
        first_index = len(steps) + 1
        for index, stats in _read_statistics(stage, indices):
            statistics.add(index, stats)
        for index, event in _read_events(stage, indices):
            if event["event"] == "dropped":
                statistics.add(index, event["stats"])
                fate[index] = first_index + event["step"] - 1
                if "copy_of" in event:
                    clusters.add(index, event["distance"], indices.get(event["copy_of"]))
            changed[index] |= "text_after" in event
            _record_changes(extras, event)
        steps += _build_stage_steps(stage, statistics, fate, first_index, clusters)
        columns |= _build_columns(stage, statistics, several=len(stages) > 1)
    columns |= clusters.build_columns()
    if changed.any():
        columns["caption"] = build_word_column("caption", [CAPTION_STATES[bool(is_changed)] for is_changed in changed])
    texts, sources = _write_texts(data, extras)
    recipes = {stage.name: stage.recipe for stage in stages}
    return RowTable(
        "pairs", "Pairs", stages[0].image_root, texts, columns | sources, steps, fate, recipes, note=stages[-1].note
    )


def read_analysis(data: Path, stage: StageFolder) -> RowTable:
    """Read the rows of an analysed dataset, and which of them the recipe's limits would drop."""
    indices, rows = _index_rows(data)
    statistics = _Statistics(rows)
    for index, stats in _read_statistics(stage, indices):
        statistics.add(index, stats)
    steps, fate = apply_limits(stage.name, stage.recipe, statistics.numbers)
    texts, sources = _write_texts(data, DiskMap())
    columns = _build_columns(stage, statistics, several=False) | sources
    recipes = {stage.name: stage.recipe}
    return RowTable("pairs", "Pairs", stage.image_root, texts, columns, steps, fate, recipes, note=stage.note)


def read_plain_table(data: Path, image_root: Path) -> RowTable:
    """Read the rows of a dataset without an analysis."""
    texts, sources = _write_texts(data, DiskMap())
    return RowTable("pairs", "Pairs", image_root, texts, sources)


def read_held_out(data: Path, image_root: Path) -> RowTable:
    """Read the held-out images of a dataset, with their reference captions."""
    texts = TextFile()
    for row in read_jsonl(data):
        texts.add({"id": row["id"], "lines": [["", caption] for caption in row["captions"]], "image": row["image"]})
    texts.finish()
    return RowTable("held_out", "Held-out images", image_root, texts, {})


def _index_rows(data: Path) -> tuple[DiskMap, int]:
    """Return each row's index by its id, and the number of rows."""
    indices, rows = DiskMap(), 0

    def list_pairs() -> Iterator[tuple[str, int]]:
        nonlocal rows
        for row in read_jsonl(data):
            yield row["id"], rows
            rows += 1

    indices.fill(list_pairs())
    return indices, rows


def _write_texts(data: Path, extras: DiskMap) -> tuple[TextFile, dict[str, Column]]:
    """Write each row's texts, and return them with a column of sources if there are any."""
    texts, sources = TextFile(), []
    for row in read_jsonl(data):
        sources.append(row.get("source"))
        texts.add({"id": row["id"], "lines": _build_lines(row, extras.get(row["id"])), "image": row["images"][0]})
    texts.finish()
    column = build_word_column("source", sources)
    return texts, {"source": column} if column else {}


def _read_statistics(stage: StageFolder, indices: DiskMap) -> Iterator[tuple[int, dict]]:
    for row in read_jsonl(stage.folder / "stats.jsonl"):
        yield _find_index(stage, indices, row), {name: value for name, value in row.items() if name != "id"}


def _read_events(stage: StageFolder, indices: DiskMap) -> Iterator[tuple[int, dict]]:
    for row in read_jsonl(stage.folder / "dropped.jsonl"):
        yield _find_index(stage, indices, row), row


def _find_index(stage: StageFolder, indices: DiskMap, row: dict) -> int:
    index = indices.get(row["id"])
    if index is None:
        raise InputError(
            f"{stage.folder} has the row {row['id']!r}, which is missing in its dataset; "
            f"run the stage {stage.name} again"
        )
    return index


def _record_changes(extras: DiskMap, event: dict) -> None:
    """Record what an event changed or found, as labelled lines."""
    lines = []
    if "question" in event:
        lines.append([QUESTION, event["question"]])
    if "text_after" in event:
        lines.append([f"after {event['operator']}", extract_caption(event["text_after"])])
    if problem := (event.get("recaption") or {}).get("problem"):
        lines.append(["new caption not used", problem])
    if "copy_of" in event:
        lines.append(["near-duplicate of", event["copy_of"]])
    if lines:
        earlier_lines = json.loads(extras.get(event["id"]) or "[]")
        extras.replace([(event["id"], json.dumps(earlier_lines + lines, ensure_ascii=False))])


def _build_lines(row: dict, extra: str | None) -> list[list[str]]:
    lines = json.loads(extra or "[]")
    questions, changes = (
        [line for line in lines if (line[0] == QUESTION) is is_question] for is_question in (True, False)
    )
    if not questions and row.get("question"):
        questions = [[QUESTION, row["question"]]]
    is_rewritten = any(label.startswith("after ") for label, _ in changes)
    original = []
    if not (is_rewritten and row.get("slot")):
        original = [["before" if is_rewritten else "", extract_caption(row["text"])]]
    return questions + original + changes


def _build_stage_steps(
    stage: StageFolder, statistics: _Statistics, fate: np.ndarray, first_index: int, clusters: "_Clusters"
) -> list[ExplorerStep]:
    numbers = statistics.numbers
    if clusters.has_rows:
        numbers[DISTANCE] = clusters.distance
    steps = build_steps(stage.name, stage.recipe, stage.summary, numbers, fate, first_index)
    numbers.pop(DISTANCE, None)
    return steps


def _build_columns(stage: StageFolder, statistics: _Statistics, several: bool) -> dict[str, Column]:
    """Return the columns of a stage's statistics; with several stages, labels name the stage."""
    columns = {
        name: build_number_column(_format_label(name, stage, several), values)
        for name, values in statistics.numbers.items()
    }
    columns |= {
        name: build_word_column(_format_label(name, stage, several), words) for name, words in statistics.words.items()
    }
    return {build_column_key(stage.name, name): column for name, column in columns.items() if column is not None}


def _format_label(name: str, stage: StageFolder, several: bool) -> str:
    return label_statistic(name) + (f", {stage.name}" if several else "")


class _Clusters:
    """Clusters of near-duplicates; a cluster's number is the index of its kept row."""

    def __init__(self, rows: int):
        self.distance, self.cluster = np.full(rows, np.nan), np.full(rows, np.nan)
        self.has_rows = False

    def add(self, index: int, distance: float, kept_index: int | None) -> None:
        self.has_rows = True
        self.distance[index] = distance
        if kept_index is not None:
            self.cluster[index] = self.cluster[kept_index] = kept_index

    def build_columns(self) -> dict[str, Column]:
        if not self.has_rows:
            return {}
        distance = np.where(np.isnan(self.distance) & ~np.isnan(self.cluster), 0.0, self.distance)
        return {
            "cluster": Column("near-duplicate cluster", self.cluster),
            DISTANCE: Column("distance to kept row", distance),
        }
