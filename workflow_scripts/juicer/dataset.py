"""A Data-Juicer dataset from the workflow's jsonl, and its rows back again.

Data-Juicer sees the columns `id`, `text` and `images` (absolute paths). Anything else in a row, stats of an earlier run
included (Data-Juicer would not compute them again), travels beside them in one column, and comes out unchanged; the
record of a new caption comes out with it.
"""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, Features, Json, Value
from datasets.arrow_writer import ArrowWriter

from errors import InputError
from formats.dj_jsonl import read_dj_jsonl
from juicer.library import Fields, NestedDataset
from juicer.partitions import BATCH, ROWS, column_values

INPUT_ROW = "input_row"
RECAPTION = "recaption"  # the key of `low_similarity_recaption_mapper` in a row's meta
FEATURES = Features(
    {"id": Value("string"), "text": Value("string"), "images": [Value("string")], INPUT_ROW: Value("string")}
)


def read_dataset(data: str | Path, image_root: Path, working: Path) -> NestedDataset:
    """Validate every row of `data` and write them to an Arrow file in `working`; operators' caches go beside it.

    Raises:
        InputError: names the file, the line and the remedy.
    """
    arrow = working / "input.arrow"
    with ArrowWriter(features=FEATURES, path=str(arrow)) as writer:
        for row in read_dj_jsonl(data):
            text = json.dumps(row, ensure_ascii=False)
            images = [os.path.join(image_root, image) for image in row["images"]]
            writer.write({"id": row["id"], "text": row["text"], "images": images, INPUT_ROW: text})
        rows, _ = writer.finalize()
    if rows == 0:
        raise InputError(f"{data} holds no rows; check the dataset's paths in config/datasets/ or on the command line")
    return NestedDataset(Dataset.from_file(str(arrow)))


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


def stats_rows(dataset: NestedDataset) -> Iterator[dict]:
    """One row per row of the dataset: its id and every stat that the operators computed."""
    for identifier, stats in iterate(dataset, "id", Fields.stats):
        yield {"id": identifier} | (stats or {})


def dataset_of(folder: Path, working: Path) -> NestedDataset:
    """The partitions of `folder` as one dataset, for operators that want to see all of it; written to `working`."""
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
