"""Decisions that need all rows (selected rows, near-duplicates), and the record of each partition's rows.

The previous pass has measured every row. These functions decide, and write the partitions of the next pass.
`PartitionAccount` collects the outcomes of a chain: the kept rows, the trace, and the counts of each operator.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dj2mgm.data.near_duplicates import NearDuplicates
from dj2mgm.errors import InputError
from dj2mgm.juicer.built_operators import Step, naming_operator, show_text
from dj2mgm.juicer.chain import ERROR_COLUMN, OUTCOME_SCHEMA
from dj2mgm.juicer.operators.declarations import merge_reports, take_report
from dj2mgm.juicer.operators.deduplicators import NearDeduplicator
from dj2mgm.juicer.operators.selection import Selection, SelectionFilter
from dj2mgm.juicer.partitions import (
    ROW_SCHEMA,
    count_rows,
    iterate_batches,
    iterate_column_values,
    list_partitions,
    read_counts,
    write_partition,
)
from dj2mgm.juicer.patched_data_juicer import Fields
from dj2mgm.storage.files import replace_file, replace_folder
from dj2mgm.storage.streaming import DiskMap


@dataclass(frozen=True)
class SeenHashes:
    """The hashes that a deduplicator has seen so far."""

    step: Step  # the deduplicator's step
    hash_key: str  # added column with a row's hash
    first_ids: DiskMap = field(default_factory=DiskMap)  # id of the first row with a hash, by hash


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

    def drop_repeats(self, seen: SeenHashes) -> None:
        """Find rows with the hash of an earlier row, and drop them unless the step only measures."""
        step = seen.step
        for index, table in enumerate(self.tables):
            columns = (table[name].to_pylist() for name in ("id", "stats", "others"))
            first = []
            for identifier, stats, others in zip(*columns, strict=True):
                value = json.loads(others)[seen.hash_key]
                first.append(seen.first_ids.setdefault(value, identifier) == identifier)
                if not first[-1]:
                    event_name = "repeated" if step.only_measures else "dropped"
                    event = {"id": identifier, "event": event_name, "step": step.number, "operator": step.name}
                    self.add_event(event | {"stats": json.loads(stats)})
            if not step.only_measures:
                self.tables[index] = table.filter(pa.array(first, pa.bool_()))

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

    def __init__(self, folder: Path, operator: SelectionFilter):
        self.folder = folder
        self.operator = operator

    def __len__(self) -> int:
        return count_rows(self.folder)

    def __iter__(self) -> Iterator[dict]:
        for identifier, text, stats, others in iterate_column_values(self.folder, "id", "text", "stats", "others"):
            row = {"id": identifier, "text": show_text(self.operator, text), Fields.stats: json.loads(stats)}
            yield row | json.loads(others)


def keep_selected(step: Step, source: Path, target: Path) -> None:
    """Write the partitions of `source` with the rows that a selection filter keeps.

    `target` appears only when all partitions are complete.
    """
    if target.exists():
        return
    started, operator = perf_counter(), step.operator
    assert isinstance(operator, SelectionFilter)
    with naming_operator(step.name):
        selection = operator.select(MeasuredRows(source, operator))
    first, counts = 0, {"report": take_report(operator)}
    with replace_folder(target) as folder:
        for partition in list_partitions(source):
            account = PartitionAccount()
            for table in iterate_batches(partition):
                _add_selected(account, step, table, selection.slice(first, len(table)))
                first += len(table)
            account.add_counts(step.number, counts | {"seconds": perf_counter() - started})
            started, counts = perf_counter(), {}
            (folder / partition.name).mkdir()
            write_partition(folder / partition.name, account.tables, account.counts, account.trace)


def _add_selected(account: PartitionAccount, step: Step, table: pa.Table, selection: Selection) -> None:
    """Account for some rows, and remove the operator's column, which is no longer needed."""
    earlier_stats = list(map(json.loads, table["stats"].to_pylist()))
    stats = [row | new for row, new in zip(earlier_stats, selection.iterate_stats(), strict=True)]
    for index in np.flatnonzero(~selection.mask):
        event = {"id": table["id"][index].as_py(), "event": "dropped", "step": step.number, "operator": step.name}
        account.add_event(event | {"stats": stats[index]})
    table = _replace_column(table, "stats", map(_dump, stats))
    table = _drop_column(table, step.operator.column)
    account.tables.append(table.filter(pa.array(selection.mask)))


def drop_near_duplicates(step: Step, source: Path, target: Path) -> None:
    """Write the partitions that `target` lacks, without near-duplicates and the column of signatures.

    If the step only measures, near-duplicates are recorded and kept. They are found once and stored in a file next to
    the partitions.
    """
    started = perf_counter()
    copies = _find_near_duplicates(step.operator, source, target.with_name(f"{target.name}.npz"))
    accounts = _NearDuplicateAccounts(step, copies, _read_kept_ids(source, copies))
    first = 0
    for number, partition in enumerate(list_partitions(source)):
        if not (target / partition.name).exists():
            account = accounts.add_up(partition, first)
            if not number:
                account.add_counts(step.number, {"report": {"clusters": copies.count_clusters()}})
            account.add_counts(step.number, {"seconds": perf_counter() - started})
            with replace_folder(target / partition.name) as folder:
                write_partition(folder, account.tables, account.counts, account.trace)
            started = perf_counter()
        first += read_counts(partition)["rows"]


def _find_near_duplicates(operator: NearDeduplicator, source: Path, file: Path) -> NearDuplicates:
    if not file.exists():
        rows = iterate_column_values(source, "others", "stats")
        with naming_operator(operator._name):
            duplicates = operator.find_duplicates(
                ((json.loads(others)[operator.hash_key], json.loads(stats)) for others, stats in rows), source.parent
            )
        with replace_file(file, "wb") as output:
            np.savez(output, copy_of=duplicates.copy_of, distance=duplicates.distance)
    with np.load(file) as arrays:
        return NearDuplicates(arrays["copy_of"], arrays["distance"])


def _read_kept_ids(source: Path, copies: NearDuplicates) -> DiskMap:
    """Return the ids of kept rows that have near-duplicates, by index."""
    ids, has_duplicate = DiskMap(), np.zeros(len(copies.copy_of), dtype=bool)
    has_duplicate[copies.copy_of[copies.copy_of >= 0]] = True
    rows = enumerate(iterate_column_values(source, "id"))
    ids.fill((str(index), identifier) for index, (identifier,) in rows if has_duplicate[index])
    return ids


@dataclass(frozen=True)
class _NearDuplicateAccounts:
    step: Step
    copies: NearDuplicates
    ids: DiskMap

    def add_up(self, partition: Path, first: int) -> PartitionAccount:
        """Account for the rows of a partition; its first row has the number `first` among all rows."""
        account = PartitionAccount()
        event_name = "repeated" if self.step.only_measures else "dropped"
        for table in iterate_batches(partition):
            copy_of = self.copies.copy_of[first : first + len(table)]
            for index in np.flatnonzero(copy_of >= 0):
                event = {"id": table["id"][index].as_py(), "event": event_name, "step": self.step.number}
                event |= {"operator": self.step.name, "stats": json.loads(table["stats"][index].as_py())}
                event |= {"copy_of": self.ids.get(str(copy_of[index]))}
                account.add_event(event | {"distance": round(float(self.copies.distance[first + index]), 4)})
            table = _drop_column(table, self.step.operator.hash_key)  # signatures may take a KiB per row
            account.tables.append(table if self.step.only_measures else table.filter(pa.array(copy_of < 0)))
            first += len(table)
        return account


def _drop_column(table: pa.Table, column: str | None) -> pa.Table:
    """Return the table without an added column."""
    rows = map(json.loads, table["others"].to_pylist())
    return _replace_column(
        table, "others", (_dump({key: value for key, value in row.items() if key != column}) for row in rows)
    )


def _replace_column(table: pa.Table, name: str, values: Iterator[str]) -> pa.Table:
    return table.set_column(ROW_SCHEMA.get_field_index(name), name, pa.array(list(values), pa.string()))


def _dump(row: dict) -> str:
    return json.dumps(row, ensure_ascii=False)
