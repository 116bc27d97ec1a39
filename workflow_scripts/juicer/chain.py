"""Consecutive operators of a recipe as one Data-Juicer operator that accounts for every row.

A chain works on one batch of rows after another, each operator on the rows that those before it have left. What an
operator drops or changes is noted beside the row, and no row is ever removed, so that a batch gives the same table
wherever and however often it is computed: in this process, in forked ones, or in a task of Ray that is tried again.
"""

import json
from dataclasses import dataclass
from itertools import compress
from time import perf_counter

import numpy as np
import pyarrow as pa

from errors import InputError
from juicer.dataset import recaption_of
from juicer.failures import check_ids, operator_named, row_named
from juicer.library import OP, UNFORKABLE, Deduplicator, Fields, Filter, Mapper
from juicer.operators.recaptioning import LowSimilarityRecaptionMapper
from juicer.partitions import ROWS
from juicer.recipe import build_operator

OUTCOMES = pa.schema(
    [
        *ROWS,
        pa.field("dropped", pa.bool_()),
        pa.field("events", pa.list_(pa.string())),  # JSON: the row's part of the trace
        pa.field(
            "report", pa.string()
        ),  # JSON, in a batch's first row: what each operator says about the batch, or its `ERROR`
    ]
)
ERROR = "error"
AS_TEXT = {"stats": Fields.stats, "meta": Fields.meta}
COLUMNS = ("id", "text", "images", "input_row")


@dataclass(frozen=True)
class Link:
    """One operator of a chain.

    Args:
        number: its place in the recipe, from 1.
        spec: {operator: {argument: value}}.
        measures: it only measures rows; what becomes of them is decided when all were seen.
    """

    number: int
    spec: dict
    measures: bool = False


class Chain(Mapper):
    """Runs the operators of its links on batches with the columns `ROWS`; returns tables with those of `OUTCOMES`."""

    _name = "chain"
    _batched_op = True

    def __init__(self, links: list[Link], settings: dict, *args, **kwargs):
        """`settings` are Data-Juicer's, of all operators.

        Raises:
            InputError: names the operator that cannot be built and why.
        """
        super().__init__(*args, auto_op_parallelism=False, batch_size=None, **kwargs)
        self.links = [(link, build_operator(link.spec, settings)) for link in links]
        operators = [operator for _, operator in self.links]
        self.accelerator = "cuda" if any(operator.use_cuda() for operator in operators) else "cpu"
        self.unforkable = self.use_cuda() or any(operator._name in UNFORKABLE.modules for operator in operators)
        # an actor loads a model once, a task whenever it lands in a new process
        self.ray_execution_mode = "actor" if any(holds_model(operator) for operator in operators) else "task"

    def process_batched(self, samples: dict, rank: int | None = None) -> pa.Table:
        batch = Batch(samples)
        try:
            for link, operator in self.links:
                batch.apply(link, operator, {"rank": rank} if operator.use_cuda() else {})
        except InputError as error:  # handed over as an outcome: Ray would wrap it, log it and try again
            return batch.failed(error)
        return batch.outcomes()

    def close(self) -> None:
        """Let go of files that operators keep open."""
        for _, operator in self.links:
            if isinstance(operator, LowSimilarityRecaptionMapper):
                operator.close()


def holds_model(operator: OP) -> bool:
    return operator._accelerator == "cuda" or operator._name in UNFORKABLE.modules


class Batch:
    """Rows on their way through a chain."""

    def __init__(self, samples: dict):
        self.order: list[str] = samples["id"]
        self.live = {key: samples[key] for key in COLUMNS}  # columns of the rows that no operator has dropped
        self.live |= {key: [json.loads(text) for text in samples[name]] for name, key in AS_TEXT.items()}
        others = [json.loads(text) for text in samples["others"]]
        self.live |= {key: [row[key] for row in others] for key in (others[0] if others else ())}
        self.gone: dict[str, dict] = {}  # by id: what the others were when they were dropped
        self.events: dict[str, list[dict]] = {}  # by id
        self.reports: dict[int, dict] = {}  # by the operator's number

    def apply(self, link: Link, operator: OP, arguments: dict) -> None:
        started = perf_counter()
        size = operator.batch_size if operator.is_batched_op() else 1  # as Data-Juicer does it
        results = []
        for start in range(0, len(self.live["id"]), size):
            part = {key: values[start : start + size] for key, values in self.live.items()}
            with operator_named(operator._name):
                results.append(self._apply(link, operator, part, arguments))
        if results:
            self.live = {key: [value for part in results for value in part[key]] for key in results[0]}
        self.reports[link.number] = {"seconds": perf_counter() - started}
        if isinstance(operator, LowSimilarityRecaptionMapper) and not link.measures:
            self.reports[link.number]["recaption"] = operator.take_report()

    def _apply(self, link: Link, operator: OP, given: dict, arguments: dict) -> dict:
        """The columns of the rows that the operator keeps of a part of the batch, as it leaves them."""
        method = row_named(operator._name, _method(operator, link.measures))
        left = dict(method({key: list(values) for key, values in given.items()}, **arguments))
        check_ids(operator._name, set(given["id"]), left)
        if isinstance(operator, Filter) and not link.measures:
            given, kept = left, [bool(keep) for keep in operator.process(left)]
            if not all(kept):
                left = {key: list(compress(values, kept)) for key, values in left.items()}
        if len(left["id"]) < len(given["id"]):
            self._note_dropped(link.number, operator._name, given, set(left["id"]))
        if left["text"] != given["text"]:
            self._note_changes(link.number, operator._name, given, left)
        return left

    def _note_dropped(self, number: int, name: str, given: dict, left: set[str]) -> None:
        for place, identifier in enumerate(given["id"]):
            if identifier not in left:
                row = self.gone[identifier] = {key: values[place] for key, values in given.items()}
                event = {"id": identifier, "event": "dropped", "step": number, "operator": name}
                self._note(event | {"stats": row[Fields.stats]} | recaption_of(row[Fields.meta]))

    def _note_changes(self, number: int, name: str, given: dict, left: dict) -> None:
        texts = dict(zip(given["id"], given["text"], strict=True))
        for identifier, text in zip(left["id"], left["text"], strict=True):
            if text != (before := texts[identifier]):
                change = {"id": identifier, "event": "changed", "text_before": before, "text_after": text}
                self._note(change | {"step": number, "operator": name})

    def _note(self, event: dict) -> None:
        self.events.setdefault(event["id"], []).append(event)

    def failed(self, error: InputError) -> pa.Table:
        """One row that says so."""
        columns = {name: [None] for name in OUTCOMES.names}
        return pa.table(columns | {"report": [_dump({ERROR: str(error)})]}, schema=OUTCOMES)

    def outcomes(self) -> pa.Table:
        """All rows of the batch in their order."""
        places = {identifier: place for place, identifier in enumerate(self.live["id"])}
        columns: dict[str, list] = {name: [] for name in OUTCOMES.names}
        for identifier in self.order:
            place = places.get(identifier)
            row = self.gone[identifier] if place is None else {key: values[place] for key, values in self.live.items()}
            for name in COLUMNS:
                columns[name].append(row[name])
            for name, key in AS_TEXT.items():
                columns[name].append(_dump(row[key]))
            others = {key: value for key, value in row.items() if key not in (*COLUMNS, *AS_TEXT.values())}
            columns["others"].append(_dump(others))
            columns["dropped"].append(place is None)
            columns["events"].append([_dump(event) for event in self.events.get(identifier, ())])
            columns["report"].append("" if columns["report"] else _dump(self.reports))
        return pa.table(columns, schema=OUTCOMES)


def _method(operator: OP, measures: bool):
    if measures and isinstance(operator, LowSimilarityRecaptionMapper):
        return operator.score
    if isinstance(operator, Filter):
        return operator.compute_stats
    return operator.compute_hash if isinstance(operator, Deduplicator) else operator.process


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise InputError(f"an operator leaves a value of type {type(value).__name__}, which no file of this stage can hold")
