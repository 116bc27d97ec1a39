"""The second half of an operator that selects: once all rows are measured, those that it keeps are written."""

import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa

from dj2mgm.files import replace_folder
from dj2mgm.juicer.chain import ChainStep
from dj2mgm.juicer.data_juicer import OP, Fields
from dj2mgm.juicer.ledger import Ledger
from dj2mgm.juicer.operators import declarations
from dj2mgm.juicer.operators.selection import Selection
from dj2mgm.juicer.partitions import ROWS, batches, column_values, count_rows, list_partitions, write_partition
from dj2mgm.juicer.recipe import operator_named


class Rows:
    """The rows of a folder, as often as they are asked for: id, text, stats, and columns that operators have added."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __len__(self) -> int:
        return count_rows(self.folder)

    def __iter__(self) -> Iterator[dict]:
        for identifier, text, stats, others in column_values(self.folder, "id", "text", "stats", "others"):
            yield {"id": identifier, "text": text, Fields.stats: json.loads(stats)} | json.loads(others)


def keep_selected(step: ChainStep, operator: OP, source: Path, target: Path) -> None:
    """Write the partitions of `source` with the rows that the operator keeps, all or none of them."""
    if target.exists():
        return
    started = perf_counter()
    with operator_named(step.name):
        selection = operator.select(Rows(source))
    first, counts = 0, {"report": declarations.take_report(operator)}
    with replace_folder(target) as folder:
        for partition in list_partitions(source):
            ledger = Ledger()
            for table in batches(partition):
                _add(ledger, step, table, selection.part(first, len(table)), declarations.column(operator))
                first += len(table)
            ledger.add_counts(step.number, counts | {"seconds": perf_counter() - started})
            started, counts = perf_counter(), {}
            (folder / partition.name).mkdir()
            write_partition(folder / partition.name, ledger.kept, ledger.counts, ledger.trace)


def _add(ledger: Ledger, step: ChainStep, table: pa.Table, selection: Selection, column: str | None) -> None:
    """Account for some rows; the operator's `column` has served its purpose."""
    known, others = (list(map(json.loads, table[name].to_pylist())) for name in ("stats", "others"))
    stats = [row | new for row, new in zip(known, selection.stats_of_rows(), strict=True)]
    for place in np.flatnonzero(~selection.kept):
        event = {"id": table["id"][place].as_py(), "event": "dropped", "step": step.number, "operator": step.name}
        ledger.add_event(event | {"stats": stats[place]})
    others = [{name: value for name, value in row.items() if name != column} for row in others]
    for name, rows in (("stats", stats), ("others", others)):
        texts = pa.array([json.dumps(row, ensure_ascii=False) for row in rows], pa.string())
        table = table.set_column(ROWS.get_field_index(name), name, texts)
    ledger.kept.append(table.filter(pa.array(selection.kept)))
