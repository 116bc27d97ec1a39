"""Consecutive operators of a recipe as one Data-Juicer operator that accounts for every row.

A chain processes one batch of rows after another. Each operator gets the rows that earlier ones have kept. Drops and
changes are recorded with the row, and no row is ever removed. A batch therefore gives the same table in this process,
in a forked process, and in a task that Ray repeats.
"""

import json
from itertools import compress
from time import perf_counter

import numpy as np
import pyarrow as pa

from dj2mgm.errors import InputError
from dj2mgm.juicer.built_operators import (
    Step,
    check_ids,
    check_special_tokens,
    name_failing_row,
    naming_operator,
    restore_text,
    show_text,
)
from dj2mgm.juicer.operators.declarations import (
    get_batch_method,
    get_decision_method,
    get_declarations,
    has_model,
    is_unforkable,
    take_report,
)
from dj2mgm.juicer.partitions import ROW_SCHEMA, read_recaption
from dj2mgm.juicer.patched_data_juicer import Fields, Mapper, patch_data_juicer

OUTCOME_SCHEMA = pa.schema(
    [
        *ROW_SCHEMA,
        pa.field("dropped", pa.bool_()),
        pa.field("events", pa.list_(pa.string())),  # JSON: the row's part of the trace
        pa.field("report", pa.string()),  # JSON, in a batch's first row: each operator's counts, or the `ERROR_COLUMN`
    ]
)
ERROR_COLUMN = "error"
AS_TEXT = {"stats": Fields.stats, "meta": Fields.meta}
COLUMNS = ("id", "text", "images", "input_row")


class Chain(Mapper):
    """An operator that runs steps on batches with columns of `ROW_SCHEMA`, and returns tables of `OUTCOME_SCHEMA`."""

    _name = "chain"
    _batched_op = True

    def __init__(self, steps: list[Step], *args, **kwargs):
        super().__init__(*args, auto_op_parallelism=False, batch_size=None, **kwargs)
        self.steps = steps
        operators = [step.operator for step in steps]
        self.accelerator = "cuda" if any(operator.use_cuda() for operator in operators) else "cpu"
        self.unforkable = self.use_cuda() or any(map(is_unforkable, operators))
        self.in_one_process = any(
            get_declarations(step.operator).in_one_process for step in steps if not step.only_measures
        )
        # an actor loads a model once, while a task loads it in each new process
        self.ray_execution_mode = "actor" if any(map(has_model, operators)) else "task"

    def process_batched(self, samples: dict, rank: int | None = None) -> pa.Table:
        patch_data_juicer()  # in a worker of Ray this is the entry point
        batch = RowBatch(samples)
        try:
            for step in self.steps:
                batch.apply(step, {"rank": rank} if step.operator.use_cuda() else {})
        except InputError as error:  # returned as an outcome, since Ray would wrap it, log it and try again
            return batch.build_error_table(error)
        return batch.collect_outcomes()

    def close(self) -> None:
        """Close the files that operators keep open."""
        for step in self.steps:
            get_declarations(step.operator).close()


class RowBatch:
    """Rows on their way through a chain."""

    def __init__(self, samples: dict):
        self.order: list[str] = samples["id"]
        self.live = {key: samples[key] for key in COLUMNS}  # columns of the rows that no operator has dropped
        self.live |= {key: [json.loads(text) for text in samples[name]] for name, key in AS_TEXT.items()}
        others = [json.loads(text) for text in samples["others"]]
        self.live |= {key: [row[key] for row in others] for key in (others[0] if others else ())}
        self.dropped: dict[str, dict] = {}  # by id: rows as they were when dropped
        self.events: dict[str, list[dict]] = {}  # by id
        self.reports: dict[int, dict] = {}  # by the step's number

    def apply(self, step: Step, arguments: dict) -> None:
        """Run a step on the rows that no earlier step has dropped."""
        started, operator = perf_counter(), step.operator
        size = operator.batch_size if operator.is_batched_op() else 1  # like Data-Juicer
        earlier_statistics = self._list_statistics()
        results = []
        for start in range(0, len(self.live["id"]), size):
            part = {key: values[start : start + size] for key, values in self.live.items()}
            with naming_operator(operator._name):
                results.append(self._apply(step, part, arguments))
        if results:
            self.live = {key: [value for part in results for value in part[key]] for key in results[0]}
        self.reports[step.number] = {
            "seconds": perf_counter() - started,
            "statistics": {
                name: len(self.live["id"]) for name in self._list_statistics() if name not in earlier_statistics
            },
            "report": take_report(operator),
        }

    def _list_statistics(self) -> list[str]:
        """Return the names of all statistics. Each row has all of them, since filters also write missing values."""
        return list(self.live[Fields.stats][0]) if self.live[Fields.stats] else []

    def _apply(self, step: Step, before: dict, arguments: dict) -> dict:
        """Run the operator on a part of the batch, and return the columns of the rows that it keeps."""
        operator = step.operator
        method = getattr(operator, get_batch_method(operator, step.only_measures))
        texts = dict(zip(before["id"], before["text"], strict=True))
        columns = {key: list(values) for key, values in before.items()}
        columns["text"] = [show_text(operator, text) for text in before["text"]]
        after = dict(name_failing_row(operator._name, method)(columns, **arguments))
        check_ids(operator._name, set(before["id"]), after)
        decide = get_decision_method(operator)
        is_kept = [bool(keep) for keep in decide(after)] if decide and not step.only_measures else None
        rows = zip(after["id"], after["text"], strict=True)
        after["text"] = [restore_text(operator, texts[identifier], shown) for identifier, shown in rows]
        if is_kept is not None:
            before = after
            if not all(is_kept):
                after = {key: list(compress(values, is_kept)) for key, values in after.items()}
        if len(after["id"]) < len(before["id"]):
            self._note_dropped(step, before, set(after["id"]))
        if after["text"] != before["text"]:
            check_special_tokens(step.name, before, after)
            self._note_changes(step, before, after)
        return after

    def _note_dropped(self, step: Step, before: dict, kept_ids: set[str]) -> None:
        for index, identifier in enumerate(before["id"]):
            if identifier not in kept_ids:
                row = self.dropped[identifier] = {key: values[index] for key, values in before.items()}
                event = {"id": identifier, "event": "dropped", "step": step.number, "operator": step.name}
                self._note(event | {"stats": row[Fields.stats]} | read_recaption(row[Fields.meta]))

    def _note_changes(self, step: Step, before: dict, after: dict) -> None:
        indices = {identifier: index for index, identifier in enumerate(before["id"])}
        for index, (identifier, text) in enumerate(zip(after["id"], after["text"], strict=True)):
            if text != (original := before["text"][indices[identifier]]):
                change = {"id": identifier, "event": "changed", "text_before": original, "text_after": text}
                if "question" in after and after["question"][index] != before["question"][indices[identifier]]:
                    change["question"] = after["question"][index]
                self._note(change | {"step": step.number, "operator": step.name})

    def _note(self, event: dict) -> None:
        self.events.setdefault(event["id"], []).append(event)

    def build_error_table(self, error: InputError) -> pa.Table:
        """Return a table whose only row reports the error."""
        columns = {name: [None] for name in OUTCOME_SCHEMA.names}
        return pa.table(columns | {"report": [_dump({ERROR_COLUMN: str(error)})]}, schema=OUTCOME_SCHEMA)

    def collect_outcomes(self) -> pa.Table:
        """Return all rows of the batch in their order."""
        indices = {identifier: index for index, identifier in enumerate(self.live["id"])}
        columns: dict[str, list] = {name: [] for name in OUTCOME_SCHEMA.names}
        for identifier in self.order:
            index = indices.get(identifier)
            live = index is not None
            row = {key: values[index] for key, values in self.live.items()} if live else self.dropped[identifier]
            for name in COLUMNS:
                columns[name].append(row[name])
            for name, key in AS_TEXT.items():
                columns[name].append(_dump(row[key]))
            others = {key: value for key, value in row.items() if key not in (*COLUMNS, *AS_TEXT.values())}
            columns["others"].append(_dump(others))
            columns["dropped"].append(not live)
            columns["events"].append([_dump(event) for event in self.events.get(identifier, ())])
            columns["report"].append("" if columns["report"] else _dump(self.reports))
        return pa.table(columns, schema=OUTCOME_SCHEMA)


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=_to_plain)


def _to_plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise InputError(f"an operator returned a value of type {type(value).__name__}, which JSON cannot hold")
