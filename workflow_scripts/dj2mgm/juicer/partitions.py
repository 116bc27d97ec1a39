"""Rows on disk in partitions, and as Data-Juicer datasets, converted from and to the workflow's jsonl.

A partition is the unit in which a stage works, keeps results and resumes. `<folder>/<partition>/` contains
- rows.arrow: rows with the columns of `ROW_SCHEMA`, in record batches of at most `ROWS_AT_ONCE` rows;
- counts.json: the number of these rows, and the counts of each operator;
- trace-<operator's number>.jsonl: rows of the trace.

Operators see the columns `id`, `text` and `images` (absolute paths). All other keys of a row are kept in one more
column and come out unchanged. This includes stats of an earlier run, which Data-Juicer would not compute again. The
record of a new caption comes out with its row; a record from an earlier run is renamed to `earlier_recaption`.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from datasets import Dataset, Features, Json, Value
from datasets.arrow_writer import ArrowWriter

from dj2mgm.data.images import join_image_path
from dj2mgm.data.instruction_rows import COLUMNS
from dj2mgm.errors import InputError, quote_value
from dj2mgm.juicer.patched_data_juicer import Fields, load_nested_dataset_class
from dj2mgm.storage.files import read_json, read_jsonl, replace_folder, write_json

if TYPE_CHECKING:
    from data_juicer.core.data import NestedDataset

ROW_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "text": pa.string(),
        "images": pa.list_(pa.string()),  # absolute paths
        "input_row": pa.string(),  # the unchanged row as JSON
        "stats": pa.string(),  # JSON, like the next two, because an operator's values may differ in type between rows
        "meta": pa.string(),
        "others": pa.string(),  # columns that operators have added
    }
)
ROWS_AT_ONCE = 1000  # rows that operators process together
PARTITION_ROWS = 10 * ROWS_AT_ONCE
FILE, COUNTS = "rows.arrow", "counts.json"


def list_partitions(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*"))


def read_counts(partition: Path) -> dict:
    """Return {"rows": rows, "operators": {number: counts}}."""
    return read_json(partition / COUNTS)


def count_rows(folder: Path) -> int:
    return sum(read_counts(partition)["rows"] for partition in list_partitions(folder))


def list_batches(partition: Path) -> list[tuple[str, int]]:
    """Return file and number of each record batch, for `read_batch`."""
    with pa.OSFile(str(partition / FILE)) as file, pa.ipc.open_file(file) as reader:
        return [(str(partition / FILE), number) for number in range(reader.num_record_batches)]


def read_batch(path: str, number: int) -> pa.Table:
    """Return a record batch. The file is not mapped into memory, since its pages would stay there."""
    with pa.OSFile(path) as file, pa.ipc.open_file(file) as reader:
        return pa.Table.from_batches([reader.get_batch(number)])


def iterate_batches(partition: Path) -> Iterator[pa.Table]:
    return (read_batch(*location) for location in list_batches(partition))


def iterate_column_values(folder: Path, *columns: str) -> Iterator[tuple]:
    """Yield the columns' values row by row."""
    for partition in list_partitions(folder):
        for table in iterate_batches(partition):
            yield from zip(*(table[column].to_pylist() for column in columns), strict=True)


def write_partition(
    folder: Path, tables: Iterable[pa.Table], operators: dict[int, dict], trace: dict[int, list]
) -> None:
    """Fill the empty folder of one partition, in batches of `ROWS_AT_ONCE` rows for any sizes of the tables.

    Args:
        operators: counts of each operator by its number.
        trace: rows of the trace, as JSON, by the operator's number.
    """
    rows = pa.concat_tables([ROW_SCHEMA.empty_table(), *tables]).combine_chunks()
    with pa.OSFile(str(folder / FILE), "wb") as file, pa.ipc.new_file(file, ROW_SCHEMA) as writer:
        writer.write_table(rows, max_chunksize=ROWS_AT_ONCE)
    for number, lines in trace.items():
        (folder / format_trace_name(number)).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    write_json(folder / COUNTS, {"rows": len(rows), "operators": operators})


def format_trace_name(number: int) -> str:
    return f"trace-{number}.jsonl"


def import_rows(data: Path, image_root: Path, folder: Path, columns: dict[str, object] | None = None) -> None:
    """Write the rows of `data` to the partitions of `folder`, with absolute paths of images.

    `columns` are further columns that operators see, each with the value for rows without it.
    """
    with replace_folder(folder) as temporary:
        tables = (_build_table(rows, image_root, columns or {}) for rows in _cut(read_jsonl(data), ROWS_AT_ONCE))
        write_partitions(temporary, tables, {}, {})
        if not read_counts(list_partitions(temporary)[0])["rows"]:
            raise InputError(
                f"{data} has no rows. Check the dataset's paths in config/datasets/ or on the command line"
            )


def write_partitions(folder: Path, tables: Iterable[pa.Table], operators: dict, trace: dict) -> None:
    """Write tables of `ROWS_AT_ONCE` rows to an empty folder, as one or more partitions of up to `PARTITION_ROWS`.

    Counts and trace of all rows go to the first partition.
    """
    parts = _cut(tables, PARTITION_ROWS // ROWS_AT_ONCE)
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


def _build_table(rows: list[dict], image_root: Path, defaults: dict[str, object]) -> pa.Table:
    empty = ["{}"] * len(rows)
    columns = {
        "id": [row["id"] for row in rows],
        "text": [row["text"] for row in rows],
        "images": [[join_image_path(image_root, image) for image in row["images"]] for row in rows],
        "input_row": [json.dumps(row, ensure_ascii=False) for row in rows],
        "stats": empty,
        "meta": empty,
        "others": [json.dumps({key: row.get(key, value) for key, value in defaults.items()}) for row in rows],
    }
    return pa.table(columns, schema=ROW_SCHEMA)


def join_traces(folders: list[Path], operators: int, target: Path) -> None:
    """Join the traces of all partitions of the folders, ordered by operator, with rows in their order."""
    with open(target, "wb") as output:
        for number in range(1, operators + 1):
            for folder in folders:
                for partition in list_partitions(folder):
                    part = partition / format_trace_name(number)
                    if part.is_file():
                        with open(part, "rb") as lines:
                            shutil.copyfileobj(lines, output)


INPUT_ROW, WHOLE_TEXT = "input_row", "__dj__whole_text"
RECAPTION_RECORD = "recaption"  # the key of `low_similarity_recaption_mapper` in a row's meta
ROW_FEATURES = Features(
    {name: Value("string") for name in ("id", "text", INPUT_ROW, WHOLE_TEXT)} | {"images": [Value("string")]}
)


def iterate(dataset: "NestedDataset", *columns: str) -> Iterator[tuple]:
    """Yield the columns' values row by row, without loading other columns; missing columns give None."""
    present = [column for column in columns if column in dataset.column_names]
    for batch in dataset.select_columns(present).iter(ROWS_AT_ONCE):
        yield from zip(*(batch.get(column, [None] * len(batch[present[0]])) for column in columns), strict=True)


def read_recaption(meta: dict | None) -> dict:
    """Return `{"recaption": record}` for a row that needed a new caption, and an empty dict otherwise."""
    record = (meta or {}).get(RECAPTION_RECORD)
    if record is None:
        return {}
    return {RECAPTION_RECORD: {key: value for key, value in record.items() if key != "problem" or value is not None}}


def load_partitions(folder: Path, working: Path, show: Callable[[str], str]) -> "NestedDataset":
    """Return the partitions of `folder` as one dataset in `working`, for an operator that needs all rows.

    `show` turns a row's text into the one that the operator gets. The column `WHOLE_TEXT` keeps the text.
    """
    columns = {Fields.stats: "stats", Fields.meta: "meta"}
    arrow = working / f"{folder.name}.arrow"
    features = Features(ROW_FEATURES | {"others": Value("string")} | {column: Json() for column in columns})
    with ArrowWriter(features=features, path=str(arrow)) as writer:
        for row in iterate_column_values(folder, *ROW_SCHEMA.names):
            row = dict(zip(ROW_SCHEMA.names, row, strict=True))
            row |= {WHOLE_TEXT: row["text"], "text": show(row["text"])}
            writer.write(row | {column: json.loads(row.pop(name)) for column, name in columns.items()})
        writer.finalize()
    return load_nested_dataset_class()(Dataset.from_file(str(arrow)))


def iterate_tables(dataset: "NestedDataset", restore: Callable[[str, str], str]) -> Iterator[pa.Table]:
    """Yield the rows of a dataset of `load_partitions` as tables for partitions, after an operator has processed it.

    `restore` turns a row's text before the operator, and the one that it returned, into the text after it.
    """
    columns = ("id", "text", "images", INPUT_ROW, Fields.stats, Fields.meta, "others", WHOLE_TEXT)
    rows = iterate(dataset, *columns)
    while part := list(islice(rows, ROWS_AT_ONCE)):
        *lists, whole_texts = map(list, zip(*part, strict=True))
        values = dict(zip(ROW_SCHEMA.names, lists, strict=True))
        values["text"] = list(map(restore, whole_texts, values["text"]))
        for name in ("stats", "meta"):
            values[name] = [json.dumps(value or {}, ensure_ascii=False) for value in values[name]]
        yield pa.table(values, schema=ROW_SCHEMA)


def iterate_output_rows(folder: Path, image_root: Path) -> Iterator[dict]:
    """Yield the input rows with their current text and question, and with `recaption` if it is a new caption.

    Raises:
        InputError: an operator has replaced an image, so its path is not a path of the dataset.
    """
    columns = ("id", "text", "images", INPUT_ROW, "meta", "others")
    for identifier, text, images, source, meta, others in iterate_column_values(folder, *columns):
        row = json.loads(source)
        if images != [join_image_path(image_root, image) for image in row["images"]]:
            raise InputError(
                f"the recipe replaced the image of row {quote_value(identifier)}. Remove operators that edit images"
            )
        if RECAPTION_RECORD in row:  # from an earlier run, whose output is this dataset
            row[f"earlier_{RECAPTION_RECORD}"] = row.pop(RECAPTION_RECORD)
        if question := json.loads(others).get("question"):
            row = {key: value for key, value in row.items() if key not in COLUMNS} | {"question": question}
        record = read_recaption(json.loads(meta))
        yield row | {"text": text} | (record if record.get(RECAPTION_RECORD, {}).get("caption") is not None else {})


def iterate_output_stats(folder: Path) -> Iterator[dict]:
    """Yield the id of each row with every stat that the operators have computed."""
    for identifier, stats in iterate_column_values(folder, "id", "stats"):
        yield {"id": identifier} | json.loads(stats)
