"""The account of a partition: kept rows, the trace, and the counts of each operator, from the outcomes of a chain."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from dj2mgm.errors import InputError
from dj2mgm.juicer.chain import ERROR, OUTCOMES
from dj2mgm.juicer.operators.declarations import merge_reports
from dj2mgm.juicer.partitions import ROWS
from dj2mgm.juicer.recipe import Step
from dj2mgm.streaming import DiskMap


@dataclass(frozen=True)
class Repeats:
    """The hashes that a deduplicator has seen so far.

    Attributes:
        step: the deduplicator's step.
        hash_key: added column with a row's hash.
        first: id of the first row by hash.
    """

    step: Step
    hash_key: str
    first: DiskMap = field(default_factory=DiskMap)


class Ledger:
    """A partition's kept rows, its trace, and the counts of each operator by its number in the recipe.

    Counts are `dropped`, `changed` and `repeated` rows, `seconds`, new `statistics` (rows by name), and the operator's
    own `report`.
    """

    def __init__(self):
        self.kept: list[pa.Table] = []
        self.trace: dict[int, list[str]] = {}  # JSON
        self.counts: dict[int, dict] = {}

    def add_outcomes(self, outcomes: pa.Table) -> None:
        """Add the outcomes of some rows.

        Raises:
            InputError: If an operator failed on them.
        """
        for reports in map(json.loads, filter(None, outcomes["report"].to_pylist())):
            if ERROR in reports:
                raise InputError(reports[ERROR])
            for number, report in reports.items():
                self.add_counts(int(number), report)
        for line in (line for events in outcomes["events"].to_pylist() for line in events):
            self.add_event(json.loads(line), line)
        self.kept.append(outcomes.filter(pc.invert(outcomes["dropped"])).select(ROWS.names))

    def add_repeats(self, repeats: Repeats) -> None:
        """Find rows with the hash of an earlier row, and drop them unless the step only measures."""
        step = repeats.step
        for place, table in enumerate(self.kept):
            columns = (table[name].to_pylist() for name in ("id", "stats", "others"))
            first = []
            for identifier, stats, others in zip(*columns, strict=True):
                value = json.loads(others)[repeats.hash_key]
                first.append(repeats.first.setdefault(value, identifier) == identifier)
                if not first[-1]:
                    kind = "repeated" if step.measures else "dropped"
                    event = {"id": identifier, "event": kind, "step": step.number, "operator": step.name}
                    self.add_event(event | {"stats": json.loads(stats)})
            if not step.measures:
                self.kept[place] = table.filter(pa.array(first, pa.bool_()))

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
        self.rest = OUTCOMES.empty_table()

    def take(self, count: int) -> Iterator[pa.Table]:
        """Yield the next `count` rows."""
        while count:
            if not len(self.rest):
                self.rest = next(self.tables)
            table, self.rest = self.rest.slice(0, count), self.rest.slice(min(count, len(self.rest)))
            count -= len(table)
            yield table
