"""What became of each row of a partition, and what each operator did: counted once, from the outcomes of a chain."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from disk_map import DiskMap
from errors import InputError
from juicer.chain import ERROR, OUTCOMES, Link
from juicer.operators.image_integrity_filter import NAME as INTEGRITY
from juicer.operators.image_integrity_filter import STAT as IMAGE_INTEGRITY
from juicer.operators.image_text_deduplicator import HASH
from juicer.operators.image_text_deduplicator import NAME as DEDUPLICATOR
from juicer.operators.recaptioning.report import merge_reports
from juicer.partitions import ROWS


class Ledger:
    """A partition's rows that are left, its trace, and what each operator did, by its number in the recipe."""

    def __init__(self):
        self.kept: list[pa.Table] = []
        self.trace: dict[int, list[str]] = {}  # JSON
        self.operators: dict[int, dict] = {}

    def add(self, outcomes: pa.Table) -> None:
        """Take in what became of some rows.

        Raises:
            InputError: an operator failed on them.
        """
        for report in map(json.loads, filter(None, outcomes["report"].to_pylist())):
            if ERROR in report:
                raise InputError(report[ERROR])
            for number, said in report.items():
                self._add_to(int(number), **said)
        for line in (line for events in outcomes["events"].to_pylist() for line in events):
            self.note(json.loads(line), line)
        self.kept.append(outcomes.filter(pc.invert(outcomes["dropped"])).select(ROWS.names))

    def drop_repeats(self, link: Link, seen: DiskMap) -> None:
        """Drop rows whose hash a row before them has; `seen` knows those of the partitions before."""
        for place, table in enumerate(self.kept):
            columns = (table[name].to_pylist() for name in ("id", "stats", "others"))
            first = []
            for identifier, stats, others in zip(*columns, strict=True):
                first.append(seen.setdefault(json.loads(others)[HASH], identifier) == identifier)
                if not first[-1]:
                    event = {"id": identifier, "event": "dropped", "step": link.number, "operator": DEDUPLICATOR}
                    self.note(event | {"stats": json.loads(stats)})
            self.kept[place] = table.filter(pa.array(first, pa.bool_()))

    def note(self, event: dict, line: str = "") -> None:
        """One row of the trace."""
        number = event["step"]
        self.trace.setdefault(number, []).append(line or json.dumps(event, ensure_ascii=False))
        self._add_to(number, **{event["event"]: 1})
        if event["operator"] == INTEGRITY:
            self._add_to(number, broken_images={event["stats"][IMAGE_INTEGRITY]: 1})

    def share_time(self, seconds: float) -> None:
        """Scale the operators' seconds, which those of several processes add up to, to those that went by."""
        total = sum(said.get("seconds", 0.0) for said in self.operators.values())
        for said in self.operators.values():
            said["seconds"] = said.get("seconds", 0.0) * seconds / total if total else 0.0

    def _add_to(self, number: int, **said) -> None:
        self.operators[number] = merge(self.operators.get(number, {}), said)


def merge(one: dict, other: dict) -> dict:
    """What an operator did to some rows and to others, together."""
    merged = dict(one)
    for key, value in other.items():
        if key == "recaption":
            merged[key] = merge_reports(one[key], value) if key in one else value
        elif isinstance(value, dict):
            merged[key] = dict(Counter(one.get(key, {})) + Counter(value))
        else:
            merged[key] = one.get(key, 0) + value
    return merged


class Rows:
    """Tables as one stream of rows, from which any number can be taken."""

    def __init__(self, tables: Iterable[pa.Table]):
        self.tables = iter(tables)
        self.rest = OUTCOMES.empty_table()

    def take(self, count: int) -> Iterator[pa.Table]:
        while count:
            if not len(self.rest):
                self.rest = next(self.tables)
            table, self.rest = self.rest.slice(0, count), self.rest.slice(min(count, len(self.rest)))
            count -= len(table)
            yield table
