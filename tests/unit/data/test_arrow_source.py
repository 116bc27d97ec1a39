"""Arrow files of `save_to_disk`: only the saved rows are read, in small batches, and nothing in them is executed."""

import json
import os
import pickle
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pytest
from datasets import Dataset, DatasetDict, load_from_disk

from dj2mgm.data.images import load_image
from dj2mgm.data.sources.parquet import read_arrow
from dj2mgm.data.sources.source import Source
from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset
from dj2mgm.errors import InputError
from dj2mgm.storage.files import find_files
from source_files import CAPTIONS, IMAGES, arrow


def read_captions(folder: Path, output: Path) -> tuple[list[str], Source]:
    source = Source("a", tuple(find_files(folder, (".arrow",))), folder, output=output)
    rows = list(read_arrow(source))
    for row, content in zip(rows, IMAGES.values(), strict=False):
        assert load_image(f"{output}/{row['image']}").size == load_image(content).size
    return [row["conversations"][1]["value"] for row in rows], source


def write_stream(file: Path, table: pa.Table) -> Path:
    file.parent.mkdir(exist_ok=True)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return file


def build_table(**columns: list | pa.Array) -> pa.Table:
    return pa.table({"image": [{"bytes": IMAGES["000"], "path": None}], "caption": ["a"]} | columns)


def test_files_of_a_cache_are_not_read(tmp_path):
    folder = arrow(tmp_path / "photos")
    load_from_disk(folder).map(lambda row: {"caption": "cached"})
    load_from_disk(folder).sort("caption")
    write_stream(folder / "older.arrow", build_table())
    captions, source = read_captions(folder, tmp_path / "images")
    assert captions == list(CAPTIONS.values())
    assert source.unread.counts[".arrow"] >= 3
    described = resolve_dataset(str(folder)).settings.sources["captions"]
    assert [Path(file).name for file in find_files(described.path, (".arrow",))] == [
        "data-00000-of-00002.arrow",
        "data-00001-of-00002.arrow",
    ]


def test_the_splits_of_a_dataset_dict_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = load_from_disk(arrow(tmp_path / "photos"))
    DatasetDict({"train": rows, "test": rows.select(range(4))}).save_to_disk("splits")
    dataset = resolve_dataset("splits")
    assert {name: (source.format, source.path, source.split) for name, source in dataset.settings.sources.items()} == {
        "captions": ("arrow", "splits/train/data-00000-of-00001.arrow", "pretrain"),
        "held_out": ("arrow", "splits/test/data-00000-of-00001.arrow", "evaluation"),
    }
    assert "Not read" not in dataset.note


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_pickled_type_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    extension = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Bomb())}
    table = build_table()
    field = table.schema.field("caption").with_metadata(extension)
    write_stream(tmp_path / "photos/a.arrow", table.cast(pa.schema([table.schema.field("image"), field])))
    (tmp_path / "photos/photos.py").write_text("open('executed', 'w')")
    resolve_dataset("photos")
    assert read_captions(tmp_path / "photos", tmp_path / "images")[0] == ["a"]
    assert not Path("executed").exists()


def cut(share: float):
    def damage(file: Path) -> None:
        os.truncate(file, int(share * file.stat().st_size))

    return damage


def remove_end(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


def write_feather(file: Path) -> None:
    pyarrow.feather.write_feather(build_table(), str(file))


def write_wrong_offsets(file: Path) -> None:
    """Let the first caption end far outside of the file."""
    write_stream(file, pa.table({"image": [{"bytes": IMAGES["000"]}] * 2, "caption": ["a" * 1111, "b" * 1111]}))
    content = file.read_bytes()
    offsets, wrong_offsets = struct.pack("<3i", 0, 1111, 2222), struct.pack("<3i", 0, 1 << 30, 2222)
    assert content.count(offsets) == 1
    file.write_bytes(content.replace(offsets, wrong_offsets))


@pytest.mark.parametrize("damage", [cut(0), cut(0.8), remove_end, write_feather, write_wrong_offsets])
def test_a_damaged_stream_is_named(tmp_path, damage):
    file = write_stream(tmp_path / "photos/a.arrow", build_table())
    damage(file)
    with pytest.raises(InputError, match=r"a.arrow is (damaged or not an arrow stream|not complete)"):
        read_captions(tmp_path / "photos", tmp_path / "images")


def test_a_selection_of_rows_by_an_old_version_is_refused(tmp_path):
    folder = arrow(tmp_path / "photos")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(InputError, match="state.json: an old version of datasets saved a selection of rows"):
        resolve_dataset(str(folder))


def test_one_batch_of_many_images_is_read_in_parts(tmp_path):
    """A stream of one batch takes the memory of few rows."""
    content = os.urandom(1 << 20)
    count = 200
    table = pa.table({"image": [{"bytes": content}] * count, "caption": ["a"] * count})
    write_stream(tmp_path / "photos/a.arrow", table.combine_chunks())
    del table
    source = Source("a", (tmp_path / "photos/a.arrow",), tmp_path / "photos", output=tmp_path / "images")
    before = pa.total_allocated_bytes()
    assert sum(1 for _ in read_arrow(source)) == count and pa.total_allocated_bytes() - before < 32 << 20
    assert Dataset.from_file(str(tmp_path / "photos/a.arrow")).num_rows == count


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("photos/my cat.JPG", "my cat.JPG"),
        ("C:\\photos\\Übung.png", "Übung.png"),
        (None, "rows-000000001"),
        (f"{'a' * 120}.png", "rows-000000001.png"),
        ("two\nlines.png", "rows-000000001.png"),
        ("..", "rows-000000001"),
    ],
)
def test_copied_images_keep_their_names(tmp_path, path, name):
    write_stream(tmp_path / "a/rows.arrow", build_table(image=[{"bytes": IMAGES["000"], "path": path}]))
    [row] = read_arrow(Source("a", (tmp_path / "a/rows.arrow",), tmp_path / "a", output=tmp_path / "images"))
    assert row["image"].rpartition("/")[2] == name
    assert load_image(tmp_path / "images" / row["image"]).size == load_image(IMAGES["000"]).size
