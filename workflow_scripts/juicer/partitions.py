"""A dataset on disk, cut into partitions: the unit in which a stage's work is done, kept and taken up again.

`<folder>/<partition>/` holds
- rows.arrow: rows with the columns `ROWS`, in record batches of at most `BATCH` rows;
- counts.json: how many rows these are, and what each operator did;
- trace-<operator's number>.jsonl: rows of the trace.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa

from errors import InputError
from files import read_json, replace_folder, write_json
from formats.dj_jsonl import read_dj_jsonl

ROWS = pa.schema(
    {
        "id": pa.string(),
        "text": pa.string(),
        "images": pa.list_(pa.string()),  # absolute paths
        "input_row": pa.string(),  # JSON, as it came
        "stats": pa.string(),  # JSON, as the next two: types of what operators say differ from row to row
        "meta": pa.string(),
        "others": pa.string(),  # columns that operators have added
    }
)
BATCH = 1000  # rows that operators see together
PARTITION = 10 * BATCH
FILE, COUNTS = "rows.arrow", "counts.json"


def partitions_of(folder: Path) -> list[Path]:
    """The partitions in their order."""
    return sorted(folder.glob("[0-9]*"))


def counts_of(partition: Path) -> dict:
    """{"rows": rows, "operators": {number: what it did}}."""
    return read_json(partition / COUNTS)


def batches(partition: Path) -> Iterator[pa.Table]:
    """Read, not mapped into memory, where pages that were read would stay."""
    with pa.OSFile(str(partition / FILE)) as file, pa.ipc.open_file(file) as reader:
        for number in range(reader.num_record_batches):
            yield pa.Table.from_batches([reader.get_batch(number)])


def batch_places(partition: Path) -> Iterator[tuple[str, int]]:
    """File and number of each batch, for `read_batch`."""
    with pa.OSFile(str(partition / FILE)) as file, pa.ipc.open_file(file) as reader:
        yield from ((str(partition / FILE), number) for number in range(reader.num_record_batches))


def read_batch(path: str, number: int) -> pa.Table:
    with pa.OSFile(path) as file, pa.ipc.open_file(file) as reader:
        return pa.Table.from_batches([reader.get_batch(number)])


def column_values(folder: Path, *columns: str) -> Iterator[tuple]:
    """The columns' values, row by row."""
    for partition in partitions_of(folder):
        for table in batches(partition):
            yield from zip(*(table[column].to_pylist() for column in columns), strict=True)


def write_partition(
    folder: Path, tables: Iterable[pa.Table], operators: dict[int, dict], trace: dict[int, list]
) -> None:
    """Fill the folder of one partition, in whole batches whatever the tables' sizes.

    Args:
        operators: what each did, by number.
        trace: rows of the trace, as JSON, by the operator's number.
    """
    rows = pa.concat_tables([ROWS.empty_table(), *tables]).combine_chunks()
    with pa.OSFile(str(folder / FILE), "wb") as file, pa.ipc.new_file(file, ROWS) as writer:
        writer.write_table(rows, max_chunksize=BATCH)
    for number, lines in trace.items():
        (folder / trace_name(number)).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    write_json(folder / COUNTS, {"rows": len(rows), "operators": operators})


def trace_name(number: int) -> str:
    return f"trace-{number}.jsonl"


def import_rows(data: Path, image_root: Path, folder: Path) -> None:
    """Validate every row of `data` and write the partitions of `folder`; images get absolute paths.

    Raises:
        InputError: names the file, the line and the remedy.
    """
    with replace_folder(folder) as temporary:
        tables = (_table(rows, image_root) for rows in _cut(read_dj_jsonl(data), BATCH))
        write_partitions(temporary, tables, {}, {})
        if not counts_of(partitions_of(temporary)[0])["rows"]:
            raise InputError(
                f"{data} holds no rows; check the dataset's paths in config/datasets/ or on the command line"
            )


def write_partitions(folder: Path, tables: Iterable[pa.Table], operators: dict, trace: dict) -> None:
    """Partitions of up to `PARTITION` rows from tables of `BATCH` rows, at least one.

    Args:
        operators, trace: of all rows; they go to the first partition.
    """
    parts = _cut(tables, PARTITION // BATCH)
    (folder / "000000").mkdir()
    write_partition(folder / "000000", next(parts, []), operators, trace)
    for number, part in enumerate(parts, start=1):
        partition = folder / f"{number:06d}"
        partition.mkdir()
        write_partition(partition, part, {}, {})


def _cut(items: Iterable, size: int) -> Iterator[list]:
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part


def _table(rows: list[dict], image_root: Path) -> pa.Table:
    empty = ["{}"] * len(rows)
    columns = {
        "id": [row["id"] for row in rows],
        "text": [row["text"] for row in rows],
        "images": [[os.path.join(image_root, image) for image in row["images"]] for row in rows],
        "input_row": [json.dumps(row, ensure_ascii=False) for row in rows],
        "stats": empty,
        "meta": empty,
        "others": empty,
    }
    return pa.table(columns, schema=ROWS)


def join_traces(folders: list[Path], operators: int, target: Path) -> None:
    """One trace from those of all partitions of the folders: operator by operator, rows in their order."""
    with open(target, "wb") as whole:
        for number in range(1, operators + 1):
            for folder in folders:
                for partition in partitions_of(folder):
                    part = partition / trace_name(number)
                    if part.is_file():
                        with open(part, "rb") as lines:
                            shutil.copyfileobj(lines, whole)
