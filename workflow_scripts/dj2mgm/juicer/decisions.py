"""Decisions about all rows once they are measured (selected rows, repeats, near-duplicates), and their records.

`PartitionAccount` collects the outcomes of a chain or of a decision: the kept rows, the trace, and the counts of each
operator.
"""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dj2mgm.errors import InputError
from dj2mgm.juicer.chain import (
    ERROR_COLUMN,
    OUTCOME_SCHEMA,
    Step,
    check_ids,
    check_special_tokens,
    naming_operator,
    restore_text,
    show_text,
)
from dj2mgm.juicer.operators.declarations import DecidesLast, Decision, merge_reports, take_report
from dj2mgm.juicer.partitions import (
    ROW_SCHEMA,
    WHOLE_TEXT,
    count_rows,
    iterate,
    iterate_batches,
    iterate_column_values,
    iterate_tables,
    list_partitions,
    load_partitions,
    read_recaption,
    write_partition,
    write_partitions,
)
from dj2mgm.juicer.patched_data_juicer import OP, Fields
from dj2mgm.storage.files import replace_folder
from dj2mgm.storage.streaming import DiskMap


class PartitionAccount:
    """A partition's kept rows, its trace, and the counts of each operator by its number in the recipe.

    Counts are `dropped`, `changed` and `repeated` rows, `seconds`, `statistics` (rows by name of a new
    statistic), and the operator's own `report`.
    """

    def __init__(self):
        self.tables: list[pa.Table] = []  # kept rows
        self.trace: dict[int, list[str]] = {}  # JSON
        self.counts: dict[int, dict] = {}

    def add_outcomes(self, outcomes: pa.Table) -> None:
        """Add the outcomes of some rows; raise InputError if an operator failed on one."""
        for reports in map(json.loads, filter(None, outcomes["report"].to_pylist())):
            if ERROR_COLUMN in reports:
                raise InputError(reports[ERROR_COLUMN])
            for number, report in reports.items():
                self.add_counts(int(number), report)
        for line in (line for events in outcomes["events"].to_pylist() for line in events):
            self.add_event(json.loads(line), line)
        self.tables.append(outcomes.filter(pc.invert(outcomes["dropped"])).select(ROW_SCHEMA.names))

    def add_event(self, event: dict, line: str = "") -> None:
        """Add one row of the trace."""
        number = event["step"]
        self.trace.setdefault(number, []).append(line or json.dumps(event, ensure_ascii=False))
        self.add_counts(number, {event["event"]: 1})

    def add_counts(self, number: int, counts: dict) -> None:
        self.counts[number] = merge_reports(self.counts.get(number, {}), counts)

    def share_time(self, seconds: float) -> None:
        """Scale the operators' seconds, which are summed over processes, to the elapsed time."""
        total = sum(counts.get("seconds", 0.0) for counts in self.counts.values())
        for counts in self.counts.values():
            counts["seconds"] = counts.get("seconds", 0.0) * seconds / total if total else 0.0

    def write(self, partition: Path) -> None:
        with replace_folder(partition) as folder:
            write_partition(folder, self.tables, self.counts, self.trace)


class RowStream:
    """A stream of rows made of tables."""

    def __init__(self, tables: Iterable[pa.Table]):
        self.tables = iter(tables)
        self.rest = OUTCOME_SCHEMA.empty_table()

    def take(self, count: int) -> Iterator[pa.Table]:
        """Yield the next `count` rows."""
        while count:
            if not len(self.rest):
                self.rest = next(self.tables)
            table, self.rest = self.rest.slice(0, count), self.rest.slice(min(count, len(self.rest)))
            count -= len(table)
            yield table


class MeasuredRows:
    """The rows of a folder for an operator: id, text, stats, and added columns. They can be iterated repeatedly."""

    def __init__(self, folder: Path, operator: OP):
        self.folder = folder
        self.operator = operator

    def __len__(self) -> int:
        return count_rows(self.folder)

    def __iter__(self) -> Iterator[dict]:
        for identifier, text, stats, others in iterate_column_values(self.folder, "id", "text", "stats", "others"):
            row = {"id": identifier, "text": show_text(self.operator, text), Fields.stats: json.loads(stats)}
            yield row | json.loads(others)


def decide_about_all_rows(step: Step, source: Path, target: Path) -> None:
    """Write the rows of `source` that an operator keeps, or all rows if the step only measures.

    Dropped rows are recorded, or repeated ones. `target` appears only when all partitions are complete.
    """
    with replace_folder(target) as folder:
        if isinstance(step.operator, DecidesLast):
            _apply_decision(step, source, folder)
        else:
            _run_on_dataset(step, source, folder)


def _apply_decision(step: Step, source: Path, target: Path) -> None:
    """Let an operator of this workflow decide, and write the rows partition by partition."""
    started, operator = perf_counter(), step.operator
    with naming_operator(step.name):
        decision = operator.decide(MeasuredRows(source, operator), source.parent)
    ids = _read_copied_ids(source, decision)
    first, counts = 0, {"report": take_report(operator)}
    for partition in list_partitions(source):
        account = PartitionAccount()
        for table in iterate_batches(partition):
            rows = range(first, first + len(table))
            first += len(table)
            stats = [
                json.loads(text) | {name: values[row].item() for name, values in decision.stats.items()}
                for row, text in zip(rows, table["stats"].to_pylist(), strict=True)
            ]
            mask = decision.mask[rows.start : rows.stop]
            columns = zip(rows, mask, table["id"].to_pylist(), stats, table["meta"].to_pylist(), strict=True)
            for row, keeps, identifier, row_stats, meta in columns:
                if not keeps:
                    event = _make_event(step, identifier, row_stats, json.loads(meta))
                    account.add_event(event | _describe_copy(decision, ids, row))
            table = _replace_column(table, "stats", stats)
            others = map(json.loads, table["others"].to_pylist())
            table = _replace_column(
                table, "others", ({key: row[key] for key in row if key != operator.column} for row in others)
            )
            account.tables.append(table if step.only_measures else table.filter(pa.array(mask)))
        account.add_counts(step.number, counts | {"seconds": perf_counter() - started})
        started, counts = perf_counter(), {}
        account.write(target / partition.name)


def _make_event(step: Step, identifier: str, stats: dict, meta: dict | None) -> dict:
    event = step.make_event(identifier, "repeated" if step.only_measures else "dropped")
    return event | {"stats": stats} | read_recaption(meta)


def _read_copied_ids(source: Path, decision: Decision) -> DiskMap:
    """Return the ids of kept rows that other rows resemble, by index."""
    ids = DiskMap()
    if decision.copy_of is not None:
        is_copied = np.zeros(len(decision.copy_of), dtype=bool)
        is_copied[decision.copy_of[decision.copy_of >= 0]] = True
        rows = enumerate(iterate_column_values(source, "id"))
        ids.fill((str(index), identifier) for index, (identifier,) in rows if is_copied[index])
    return ids


def _describe_copy(decision: Decision, ids: DiskMap, row: int) -> dict:
    if decision.copy_of is None:
        return {}
    return {
        "copy_of": ids.get(str(decision.copy_of[row])),
        "distance": round(float(decision.distance[row]), 4),
    }


def _replace_column(table: pa.Table, name: str, values: Iterable[dict]) -> pa.Table:
    strings = pa.array([json.dumps(value, ensure_ascii=False) for value in values], pa.string())
    return table.set_column(ROW_SCHEMA.get_field_index(name), name, strings)


def _run_on_dataset(step: Step, source: Path, target: Path) -> None:
    """Run one of Data-Juicer's own deduplicators or selectors on the whole dataset."""
    started, operator, account = perf_counter(), step.operator, PartitionAccount()
    dataset = load_partitions(source, source.parent, partial(show_text, operator))
    with naming_operator(step.name):
        kept_rows = operator.run(dataset)
    ids = [identifier for (identifier,) in iterate(kept_rows, "id")] if "id" in kept_rows.column_names else None
    check_ids(step.name, {identifier for (identifier,) in iterate(dataset, "id")}, ids)
    kept_ids = set(ids)
    for identifier, stats, meta in iterate(dataset, "id", Fields.stats, Fields.meta):
        if identifier not in kept_ids:
            account.add_event(_make_event(step, identifier, stats or {}, meta))
    for identifier, text, shown in iterate(kept_rows, "id", WHOLE_TEXT, "text"):
        if (new_text := restore_text(operator, text, shown)) != text:
            check_special_tokens(step.name, identifier, text, new_text)
            account.add_event(step.make_change(identifier, text, new_text))
    account.add_counts(step.number, {"seconds": perf_counter() - started})
    rows = iterate_tables(dataset if step.only_measures else kept_rows, partial(restore_text, operator))
    write_partitions(target, rows, account.counts, account.trace)
