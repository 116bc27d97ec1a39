"""Consecutive operators of a recipe as one Data-Juicer operator that accounts for every row.

A chain processes one batch of rows after another. Each operator gets the rows that earlier ones have kept. Drops and
changes are recorded with the row, and no row is ever removed. A batch therefore gives the same table in this process,
in a forked process, and in a task that Ray repeats.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from time import perf_counter

import numpy as np
import pyarrow as pa

from dj2mgm.data.formats import extract_caption, replace_caption
from dj2mgm.data.images import BadImageError
from dj2mgm.errors import InputError, quote_value
from dj2mgm.juicer.operators.declarations import (
    get_batch_method,
    get_decision_method,
    get_declarations,
    has_model,
    is_unforkable,
    take_report,
)
from dj2mgm.juicer.partitions import ROW_SCHEMA, read_recaption
from dj2mgm.juicer.patched_data_juicer import (
    OP,
    Fields,
    Mapper,
    MissingPackageError,
    SpecialTokens,
    make_package_error,
    patch_data_juicer,
)

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
CHANGE_REMEDY = "Change the operator's arguments or remove it from the recipe"
TOKEN_NAMES = {"SpecialTokens", "remove_special_tokens", "remove_non_special_tokens"}  # of data_juicer.utils.mm_utils


@dataclass(frozen=True)
class Step:
    """One operator of a recipe."""

    number: int  # its position in the recipe, from 1
    operator: OP
    only_measures: bool = False  # True: here it drops and edits no rows
    is_first_phase: bool = False  # True: it decides in the next pass, when all rows are measured

    @property
    def name(self) -> str:
        return self.operator._name

    def make_event(self, identifier: str, event: str) -> dict:
        """Return the beginning of a row of the trace."""
        return {"id": identifier, "event": event, "step": self.number, "operator": self.name}

    def make_change(self, identifier: str, before: str, after: str, more: dict | None = None) -> dict:
        """Return the row of the trace for a changed text."""
        change = {"id": identifier, "event": "changed", "text_before": before, "text_after": after} | (more or {})
        return change | self.make_event(identifier, "changed")


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
        self.in_one_process = any(get_declarations(step.operator).budget for step in steps if not step.only_measures)
        # an actor loads a model once, while a task loads it in each new process
        self.ray_execution_mode = "actor" if any(map(has_model, operators)) else "task"

    def process_batched(self, samples: dict, rank: int | None = None) -> pa.Table:
        patch_data_juicer()  # in a worker of Ray this is the entry point
        batch = RowBatch(samples)
        try:
            for step in self.steps:
                batch.apply(step, {"rank": rank} if step.operator.use_cuda() else {})
        except InputError as error:  # returned as an outcome, since Ray would wrap it, log it and try again
            columns = {name: [None] for name in OUTCOME_SCHEMA.names}
            return pa.table(columns | {"report": [_dump({ERROR_COLUMN: str(error)})]}, schema=OUTCOME_SCHEMA)
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
        texts = dict(zip(before["id"], before["text"], strict=True))
        columns = {key: list(values) for key, values in before.items()}
        columns["text"] = [show_text(operator, text) for text in before["text"]]
        after = _run_on_batch(step, columns, arguments)
        check_ids(operator._name, set(before["id"]), after.get("id"))
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
            self._note_changes(step, before, after)
        return after

    def _note_dropped(self, step: Step, before: dict, kept_ids: set[str]) -> None:
        for index, identifier in enumerate(before["id"]):
            if identifier not in kept_ids:
                row = self.dropped[identifier] = {key: values[index] for key, values in before.items()}
                event = step.make_event(identifier, "dropped") | {"stats": row[Fields.stats]}
                self.events.setdefault(identifier, []).append(event | read_recaption(row[Fields.meta]))

    def _note_changes(self, step: Step, before: dict, after: dict) -> None:
        indices = {identifier: index for index, identifier in enumerate(before["id"])}
        for index, (identifier, text) in enumerate(zip(after["id"], after["text"], strict=True)):
            if text != (original := before["text"][indices[identifier]]):
                check_special_tokens(step.name, identifier, original, text)
                question = after["question"][index] if "question" in after else None
                is_new = question is not None and question != before["question"][indices[identifier]]
                change = step.make_change(identifier, original, text, {"question": question} if is_new else {})
                self.events.setdefault(identifier, []).append(change)

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


@contextmanager
def naming_operator(name: str) -> Iterator[None]:
    """Turn any exception of the operator into an `InputError` that names it."""
    try:
        yield
    except MissingPackageError as error:
        raise make_package_error(name, error.package) from None
    except ModuleNotFoundError as error:
        raise make_package_error(name, error.name) from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"operator {name} failed: {type(error).__name__}: {error}. {CHANGE_REMEDY}") from error


def _run_on_batch(step: Step, samples: dict, arguments: dict) -> dict:
    """Run the operator's method for a batch, so that its errors name the row on which it fails."""
    method = get_batch_method(step.operator, step.only_measures)
    try:
        return dict(method(samples, **arguments))
    except (InputError, ModuleNotFoundError):
        raise
    except Exception as error:
        row = _find_failing_row(lambda row: method(row, **arguments), samples)
        location = "" if row is None else f" on row {quote_value(row)}"
        remedy = "No row fails alone, so run it again" if row is None else "Fix the row"
        if isinstance(error, BadImageError):
            remedy = "Put `image_integrity_filter: {}` before it, which drops such rows, fix the row"
        raise InputError(
            f"operator {step.name} failed{location}: {type(error).__name__}: {error}. "
            f"{remedy}, change the operator's arguments or remove it from the recipe"
        ) from error


def _find_failing_row(method: Callable[[dict], object], samples: dict) -> str | None:
    for position, identifier in enumerate(samples["id"]):
        try:
            method({key: [samples[key][position]] for key in samples})
        except Exception:
            return identifier
    return None


@functools.cache
def _handles_tokens(operator: type[OP]) -> bool:
    """Return whether an operator declares that it handles tokens, or its module uses Data-Juicer's names for that."""
    if (declared := getattr(operator, "handles_tokens", None)) is not None:
        return declared
    return any(not TOKEN_NAMES.isdisjoint(vars(sys.modules[base.__module__])) for base in operator.__mro__)


def show_text(operator: OP, text: str) -> str:
    """Return a row's text as the operator gets it.

    It is the caption alone, so that limits in words and characters are those of the caption. Operators that match the
    chunks of a text with images get the whole text, with image token and end of chunk.
    """
    return text if _handles_tokens(type(operator)) else extract_caption(text)


def restore_text(operator: OP, text: str, shown: str) -> str:
    """Return a row's whole text after an operator that got it from `show_text` and returned `shown`."""
    return shown if _handles_tokens(type(operator)) else replace_caption(text, extract_caption(shown))


def check_ids(name: str, before: set[str], after: list[str] | None) -> None:
    """Raise InputError if an operator has added or repeated rows, or removed their ids (None)."""
    if after is None:
        raise InputError(f"operator {name} removed the column 'id'. Remove it from the recipe")
    ids = set(after)
    if len(ids) != len(after) or not ids <= before:
        raise InputError(
            f"operator {name} added rows ({len(after)} rows, {len(ids & before)} of them from the {len(before)} "
            "input rows). This stage keeps, drops or edits rows. Switch that off or remove the operator from the recipe"
        )


def check_special_tokens(name: str, row: str, before: str, after: str) -> None:
    """Check that an operator keeps the number of image tokens in a text, and the end of its chunk.

    Otherwise the row could not be matched with its images, or its caption would end in a damaged token. This is an
    error and not a reason to drop the row, since an operator that takes a token for text does so in every row.
    """
    expected, actual = (text.count(SpecialTokens.image) for text in (before, after))
    if expected != actual:
        raise InputError(
            f"operator {name} changed the image tokens of row {quote_value(row)}: its text had {expected} times "
            f"{SpecialTokens.image}, and now has it {actual} times. {CHANGE_REMEDY}"
        )
    if SpecialTokens.eoc in before and SpecialTokens.eoc not in after:
        raise InputError(
            f"operator {name} changed the {SpecialTokens.eoc} at the end of row {quote_value(row)}. {CHANGE_REMEDY}"
        )
