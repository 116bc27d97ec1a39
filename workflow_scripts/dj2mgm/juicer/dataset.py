"""Rows on disk, in partitions, and as Data-Juicer datasets; from and to the workflow's jsonl.

A partition is the unit in which a stage's work is done, kept and resumed. `<folder>/<partition>/` holds
- rows.arrow: rows with the columns `ROWS`, in record batches of at most `BATCH` rows;
- counts.json: how many rows these are, and the counts of each operator;
- trace-<operator's number>.jsonl: rows of the trace.

Operators see the columns `id`, `text` and `images` (absolute paths). Anything else in a row, stats of an earlier run
included (Data-Juicer would not compute them again), travels beside them in one column, and comes out unchanged; the
record of a new caption comes out with it, and a record that a row came with is called `earlier_recaption`.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, Features, Json, Value
from datasets.arrow_writer import ArrowWriter

from dj2mgm.data.formats import read_dj_jsonl
from dj2mgm.data.images import absolute_path
from dj2mgm.errors import InputError
from dj2mgm.files import read_json, replace_folder, write_json
from dj2mgm.juicer.data_juicer import Fields, NestedDataset

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
    """{"rows": rows, "operators": {number: counts}}."""
    return read_json(partition / COUNTS)


def row_count(folder: Path) -> int:
    return sum(counts_of(partition)["rows"] for partition in partitions_of(folder))


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
        operators: counts of each, by number.
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
        "images": [[absolute_path(image_root, image) for image in row["images"]] for row in rows],
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


INPUT_ROW = "input_row"
RECAPTION = "recaption"  # the key of `low_similarity_recaption_mapper` in a row's meta
FEATURES = Features(
    {"id": Value("string"), "text": Value("string"), "images": [Value("string")], INPUT_ROW: Value("string")}
)


def iterate(dataset: NestedDataset, *columns: str) -> Iterator[tuple]:
    """Yield the columns' values row by row, without loading the others; None for a column that is not there."""
    present = [column for column in columns if column in dataset.column_names]
    for batch in dataset.select_columns(present).iter(BATCH):
        yield from zip(*(batch.get(column, [None] * len(batch[present[0]])) for column in columns), strict=True)


def recaption_of(meta: dict | None) -> dict:
    """`{"recaption": record}` of a row that a captioner was asked about, as its operator left it; otherwise empty."""
    record = (meta or {}).get(RECAPTION)
    if record is None:
        return {}
    return {RECAPTION: {key: value for key, value in record.items() if key != "problem" or value is not None}}


def dataset_of(folder: Path, working: Path) -> NestedDataset:
    """The partitions of `folder` as one dataset, for operators that need all rows; written to `working`."""
    columns = {Fields.stats: "stats", Fields.meta: "meta"}
    arrow = working / f"{folder.name}.arrow"
    features = Features(FEATURES | {"others": Value("string")} | {column: Json() for column in columns})
    with ArrowWriter(features=features, path=str(arrow)) as writer:
        for row in column_values(folder, *ROWS.names):
            row = dict(zip(ROWS.names, row, strict=True))
            writer.write(row | {column: json.loads(row.pop(name)) for column, name in columns.items()})
        writer.finalize()
    return NestedDataset(Dataset.from_file(str(arrow)))


def tables_of(dataset: NestedDataset) -> Iterator[pa.Table]:
    """The rows of a dataset that `dataset_of` gave and an operator has worked on, as partitions hold them."""
    columns = ("id", "text", "images", INPUT_ROW, Fields.stats, Fields.meta, "others")
    rows = iterate(dataset, *columns)
    while part := list(islice(rows, BATCH)):
        values = dict(zip(ROWS.names, map(list, zip(*part, strict=True)), strict=True))
        for name in ("stats", "meta"):
            values[name] = [json.dumps(value or {}, ensure_ascii=False) for value in values[name]]
        yield pa.table(values, schema=ROWS)


def output_rows(folder: Path, image_root: Path) -> Iterator[dict]:
    """The rows as they came in, with the text as the operators left it, and `recaption` where it is a new caption.

    Args:
        folder: partitions of a dataset.

    Raises:
        InputError: an operator has replaced an image; the paths would no longer be those of the dataset.
    """
    for identifier, text, images, source, meta in column_values(folder, "id", "text", "images", INPUT_ROW, "meta"):
        row = json.loads(source)
        if images != [absolute_path(image_root, image) for image in row["images"]]:
            raise InputError(
                f"the recipe replaced the image of row {identifier!r}; take operators that edit images out"
            )
        if RECAPTION in row:  # of an earlier run, whose output is this dataset
            row[f"earlier_{RECAPTION}"] = row.pop(RECAPTION)
        record = recaption_of(json.loads(meta))
        yield row | {"text": text} | (record if record.get(RECAPTION, {}).get("caption") is not None else {})


def output_stats(folder: Path) -> Iterator[dict]:
    """One row per row of the dataset: its id and every stat that the operators computed."""
    for identifier, stats in column_values(folder, "id", "stats"):
        yield {"id": identifier} | json.loads(stats)
