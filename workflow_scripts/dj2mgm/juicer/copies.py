"""The second half of a deduplicator of similar images: what all rows' signatures tell are copies is dropped."""

import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa

from dj2mgm.data.near_duplicates.clusters import NearDuplicates
from dj2mgm.files import replace_file, replace_folder
from dj2mgm.juicer.chain import ChainStep
from dj2mgm.juicer.data_juicer import OP
from dj2mgm.juicer.ledger import Ledger
from dj2mgm.juicer.operators import declarations
from dj2mgm.juicer.partitions import batches, column_values, list_partitions, read_counts, write_partition
from dj2mgm.juicer.recipe import operator_named
from dj2mgm.streaming import DiskMap


def drop_copies(step: ChainStep, operator: OP, source: Path, target: Path) -> None:
    """Write the partitions that are not yet in `target`: those of `source` without copies, and without signatures.

    Where the step only measures, copies are noted and stay. Which rows are copies is found once and kept in a file
    beside the partitions.
    """
    started = perf_counter()
    copies = _find(operator, source, target.with_name(f"{target.name}.npz"))
    accounts = _Accounts(step, declarations.hash_key(operator), copies, _ids_of_kept(source, copies))
    first = 0
    for number, partition in enumerate(list_partitions(source)):
        if not (target / partition.name).exists():
            ledger = accounts.of(partition, first)
            if not number:
                ledger.add_counts(step.number, {"report": {"clusters": copies.sizes()}})
            ledger.add_counts(step.number, {"seconds": perf_counter() - started})
            with replace_folder(target / partition.name) as folder:
                write_partition(folder, ledger.kept, ledger.counts, ledger.trace)
            started = perf_counter()
        first += read_counts(partition)["rows"]


def _find(operator: OP, source: Path, file: Path) -> NearDuplicates:
    if not file.exists():
        key = declarations.hash_key(operator)
        rows = column_values(source, "others", "stats")
        with operator_named(operator._name):
            found = operator.find_copies(
                ((json.loads(others)[key], json.loads(stats)) for others, stats in rows), source.parent
            )
        with replace_file(file, "wb") as whole:
            np.savez(whole, copy_of=found.copy_of, distance=found.distance)
    with np.load(file) as found:
        return NearDuplicates(found["copy_of"], found["distance"])


def _ids_of_kept(source: Path, copies: NearDuplicates) -> DiskMap:
    """Id by place, of rows that others are copies of."""
    ids, kept = DiskMap(), np.zeros(len(copies.copy_of), dtype=bool)
    kept[copies.copy_of[copies.copy_of >= 0]] = True
    rows = enumerate(column_values(source, "id"))
    ids.fill((str(place), identifier) for place, (identifier,) in rows if kept[place])
    return ids


@dataclass(frozen=True)
class _Accounts:
    step: ChainStep
    hash_key: str
    copies: NearDuplicates
    ids: DiskMap

    def of(self, partition: Path, first: int) -> Ledger:
        """What becomes of the rows of a partition, whose first one is row `first` of all."""
        ledger, kind = Ledger(), "repeated" if self.step.measures else "dropped"
        for table in batches(partition):
            copy_of = self.copies.copy_of[first : first + len(table)]
            for place in np.flatnonzero(copy_of >= 0):
                event = {"id": table["id"][place].as_py(), "event": kind, "step": self.step.number}
                event |= {"operator": self.step.name, "stats": json.loads(table["stats"][place].as_py())}
                event |= {"copy_of": self.ids.get(str(copy_of[place]))}
                ledger.add_event(event | {"distance": round(float(self.copies.distance[first + place]), 4)})
            others = pa.array(self._others(table), pa.string())
            table = table.set_column(table.column_names.index("others"), "others", others)
            ledger.kept.append(table if self.step.measures else table.filter(pa.array(copy_of < 0)))
            first += len(table)
        return ledger

    def _others(self, table: pa.Table) -> list[str]:
        """The column without signatures, which may be a KiB a row."""
        rows = map(json.loads, table["others"].to_pylist())
        others = ({key: value for key, value in row.items() if key != self.hash_key} for row in rows)
        return [json.dumps(row, ensure_ascii=False) for row in others]
