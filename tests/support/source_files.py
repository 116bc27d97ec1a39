"""The same images and captions in every format of sources."""

import csv
import io
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, Value
from datasets import Image as DatasetsImage
from PIL import Image

from dj2mgm.data.formats import build_dj_text
from dj2mgm.storage.files import write_json_list, write_jsonl

PAIR = '{"id": "1", "text": "a", "images": ["1.png"]}\n'  # a row in the format of Data-Juicer
CAPTIONS = {f"{number:03d}": f"picture number {number}, with an umlaut: ü" for number in range(24)}


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8 + number, 8), (number * 10, 100, 200)).save(file, "PNG")
    return file.getvalue()


IMAGES = {key: png(number) for number, key in enumerate(CAPTIONS)}


def write_loose(folder: Path) -> None:
    folder.mkdir(parents=True)
    for key, content in IMAGES.items():
        (folder / f"{key}.png").write_bytes(content)


def data_juicer(folder: Path) -> Path:
    write_loose(folder)
    rows = ({"id": key, "text": build_dj_text(text), "images": [f"{key}.png"]} for key, text in CAPTIONS.items())
    write_jsonl(folder / "rows.jsonl", rows)
    return folder / "rows.jsonl"


def llava(folder: Path) -> Path:
    write_loose(folder)
    turns = ([{"from": "human", "value": "<image>"}, {"from": "gpt", "value": text}] for text in CAPTIONS.values())
    rows = (
        {"id": key, "image": f"{key}.png", "conversations": conversation}
        for key, conversation in zip(CAPTIONS, turns, strict=True)
    )
    write_json_list(folder / "rows.json", rows)
    return folder / "rows.json"


def sharegpt(folder: Path) -> Path:
    write_loose(folder)
    rows = [
        {
            "id": key,
            "images": [f"{key}.png"],
            "messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": text}],
        }
        for key, text in CAPTIONS.items()
    ]
    write_jsonl(folder / "rows.jsonl", rows)
    return folder / "rows.jsonl"


def folder(folder: Path) -> Path:
    write_loose(folder)
    for key, text in CAPTIONS.items():
        (folder / f"{key}.txt").write_text(text + "\n", encoding="utf-8")
    return folder


def table(folder: Path, suffix: str = "csv", delimiter: str = ",") -> Path:
    write_loose(folder)
    with open(folder / f"rows.{suffix}", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["caption", "image"])
        writer.writerows((text, f"{key}.png") for key, text in CAPTIONS.items())
    return folder / f"rows.{suffix}"


def parquet(folder: Path) -> Path:
    folder.mkdir(parents=True)
    images = [{"bytes": content, "path": f"{key}.png"} for key, content in IMAGES.items()]
    columns = {"id": list(CAPTIONS), "image": images, "caption": list(CAPTIONS.values())}
    pq.write_table(pa.table(columns), folder / "part.parquet", row_group_size=4)
    return folder


def arrow(folder: Path) -> Path:
    images = [{"bytes": content, "path": f"{key}.png"} for key, content in IMAGES.items()]
    features = Features({"image": DatasetsImage(), "caption": Value("string")})
    rows = Dataset.from_dict({"image": images, "caption": list(CAPTIONS.values())}, features)
    rows.save_to_disk(folder, num_shards=2)
    return folder


def webdataset(folder: Path) -> Path:
    folder.mkdir(parents=True)
    keys = list(CAPTIONS)
    for number, shard_keys in enumerate((keys[:4], keys[4:])):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for key in shard_keys:
                for suffix, content in ((".png", IMAGES[key]), (".txt", CAPTIONS[key].encode())):
                    info = tarfile.TarInfo(key + suffix)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return folder


FORMATS = (data_juicer, llava, sharegpt, folder, table, parquet, arrow, webdataset)
WRITERS = {writer.__name__: writer for writer in FORMATS}


def write_tar(file: Path, members: list[tuple[str, bytes]], **options) -> Path:
    with tarfile.open(file, "w", **options) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file
