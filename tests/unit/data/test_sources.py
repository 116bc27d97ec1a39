"""Datasets of several sources have the same rows and images in every format."""

import csv
import errno
import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import make_dataset
from dj2mgm.data.formats import build_dj_text, extract_caption, read_llava, read_pairs
from dj2mgm.data.images import BadImageError, join_image_path, load_image, locate_image, read_image_size
from dj2mgm.data.merged_sources import write_merged_sources
from dj2mgm.data.sources.image_folders import read_webdataset
from dj2mgm.data.sources.parquet import read_parquet
from dj2mgm.data.sources.source import Source, read_table
from dj2mgm.dataset_resolution.experiment_dataset import check_files, list_dataset_files, resolve_dataset
from dj2mgm.errors import InputError
from dj2mgm.storage.files import find_files, read_json, read_jsonl, read_yaml, write_json_list, write_jsonl, write_yaml
from dj2mgm.storage.image_files import compute_image_digest, read_file, read_file_size, read_members
from run_main import run_main
from source_files import (
    CAPTIONS,
    IMAGES,
    WRITERS,
    data_juicer,
    folder,
    llava,
    parquet,
    png,
    sharegpt,
    table,
    webdataset,
    write_loose,
    write_tar,
)


@pytest.fixture
def make(tmp_path, monkeypatch, capsys):
    """Return a function that makes a dataset of sources (`{format: …, …}`) in a separate project."""
    monkeypatch.chdir(tmp_path)

    def make(**sources: dict) -> Path:
        for name, values in sources.items():
            if "path" not in values:
                values["path"] = str(WRITERS[values["format"]](tmp_path / "data" / name))
        write_yaml(tmp_path / "config/datasets/mixed.yaml", {"sources": sources})
        dataset = resolve_dataset("mixed")
        output = tmp_path / "results/datasets/mixed"
        write_yaml(output / "config.yaml", dataset.settings.file_content())
        done = run_main(make_dataset, "--config", f"{output}/config.yaml", "--output-dir", str(output), capture=capsys)
        if done.status:
            raise InputError(done.stderr)
        assert dataset.images["pretrain"] == "results/datasets/mixed/sources.json"
        return output

    return make


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_captions_and_images(make, kind):
    output = make(one={"format": kind, "license": "CC-BY-4.0"})
    rows = list(read_pairs(output / "pretrain.jsonl"))
    held_out = {row["image"] for row in map(json.loads, open(output / "evaluation.jsonl", encoding="utf-8"))}
    assert len(rows) == len(CAPTIONS) - len(held_out) and len(held_out) == 2
    for row in rows:
        assert row["id"].startswith("one/") and row["source"] == "one"
        path = locate_image(output / "sources.json", row["images"][0])
        key = next(key for key, text in CAPTIONS.items() if text == extract_caption(row["text"]))
        assert read_file(path) == IMAGES[key] and read_file_size(path) == len(IMAGES[key])
        assert load_image(path).size == read_image_size(path) == (8 + int(key), 8)
        assert locate_image(output / "sources.json", join_image_path(output / "sources.json", row["images"][0])) == path
    read = read_json(output / "summary.json")["sources"]["one"]
    assert read == {"split": "pretrain", "rows": len(CAPTIONS), "format": kind}
    if kind == "parquet":  # the project can be moved
        moved = output.rename(output.with_name("moved"))
        assert read_file(locate_image(moved / "sources.json", rows[0]["images"][0])) in IMAGES.values()


def test_rows_of_two_splits_name_their_sources(make):
    output = make(a={"format": "table"}, b={"format": "webdataset"}, c={"format": "llava", "split": "finetune"})
    pairs = list(read_pairs(output / "pretrain.jsonl"))
    assert {row["source"] for row in pairs} == {"a", "b"} and len({row["id"] for row in pairs}) == len(pairs)
    instructions = list(read_llava(output / "finetune.json"))
    assert {row["source"] for row in instructions} == {"c"}
    assert all("Describe the image." in row["conversations"][0]["value"] for row in instructions)
    assert len(instructions) < len(CAPTIONS), "images that are held out from the pairs are so under every name"


def test_a_shards_conversations_keep_turns_and_images(make, tmp_path):
    conversation = {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Same?"}]}
    conversation["messages"].append({"role": "assistant", "content": "No."})
    members = [("x.0.png", png(1)), ("x.1.png", png(2)), ("x.json", json.dumps(conversation).encode())]
    shard = write_tar(tmp_path / "web.tar", members)
    output = make(a={"format": "table"}, b={"format": "webdataset", "path": str(shard), "split": "finetune"})
    [row] = read_llava(output / "finetune.json")
    assert row["conversations"][0]["value"] == "<image>\n<image>\nBe short.\nSame?"
    images = [locate_image(output / "sources.json", image) for image in row["image"]]
    assert [read_file(image) for image in images] == [png(1), png(2)]


COMMIT = "0" * 40  # of a repository in the hub's cache
STRAY = {  # keys of rows in the other format
    "data_juicer": {"conversations": [{"from": "human", "value": "stray"}], "image": None},
    "llava": {"text": None, "images": None, "question": "stray?", "messages": "stray"},
    "sharegpt": {"text": build_dj_text("stray"), "question": "stray?"},
}


@pytest.mark.parametrize("split", ["pretrain", "finetune"])
@pytest.mark.parametrize("kind", STRAY)
def test_the_format_of_a_source_determines_its_rows(make, tmp_path, kind, split):
    written, captions = {}, str(table(tmp_path / "data/captions"))
    for stray in ({}, STRAY[kind]):
        path = WRITERS[kind](tmp_path / f"data/{len(stray)}")
        if path.suffix == ".jsonl":
            write_jsonl(path, [stray | row for row in list(read_jsonl(path))])
        else:
            write_json_list(path, [stray | row for row in read_json(path, list)])
        source = {"format": kind, "path": str(path), "split": split}
        output = make(a={"format": "table", "path": captions}, b=source)
        rows = read_pairs(output / "pretrain.jsonl") if split == "pretrain" else read_llava(output / "finetune.json")
        keys = ("id", "source", *(("text", "images") if split == "pretrain" else ("image", "conversations")))
        written[len(stray)] = [[row[key] for key in keys] for row in rows if row["source"] == "b"]
    assert written.pop(0) == written.popitem()[1] != []


def damaged(content: bytes):
    def write(folder: Path) -> None:
        (folder / "00001.tar").write_bytes(content)

    return write


def cut_off(size: int):
    def write(folder: Path) -> None:
        os.truncate(folder / "00001.tar", size)

    return write


def repeat_key(folder: Path) -> None:
    (folder / "00002.tar").write_bytes((folder / "00000.tar").read_bytes())


def zip_up(folder: Path) -> None:
    (folder / "00001.tar").write_bytes(gzip.compress((folder / "00001.tar").read_bytes()))


def make_tar(*names: str, **options):
    return lambda folder: write_tar(folder / "00001.tar", [(name, png(1)) for name in names], **options)


def append_member(kind: bytes = tarfile.REGTYPE, size: int = 0):
    """Append the header of a member to a shard."""

    def write(folder: Path) -> None:
        info = tarfile.TarInfo("b.png")
        info.type, info.linkname, info.size = kind, "a.png", size
        shard = make_tar("a.png", "a.txt")(folder)
        shard.write_bytes(shard.read_bytes()[:2048] + info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))

    return write


def write_id(value: object):
    columns = {"id": [value], "image": [png(1)], "caption": ["a"]}
    return lambda folder: pq.write_table(pa.table(columns), folder / "part.parquet")


LATIN_1 = {"format": tarfile.GNU_FORMAT, "encoding": "latin-1"}
ELSEWHERE = [tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE]  # contents of members


def write_rows_as(*rows: dict):
    return lambda folder: write_jsonl(folder / "b.jsonl", rows)


def write_table_as(content: bytes):
    return lambda folder: (folder / "rows.csv").write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "damage", "sentence"),
    [
        ("webdataset", cut_off(1100), "00001.tar is damaged .*end-of-archive block"),
        ("webdataset", cut_off(600), "00001.tar is damaged"),
        ("webdataset", damaged(b"no archive"), "00001.tar is damaged or not a plain tar file"),
        ("webdataset", repeat_key, r"00002.tar: key '000' is already used in .*00000.tar; rename the sample"),
        ("parquet", lambda folder: (folder / "part.parquet").write_bytes(b"PAR1"), "part.parquet is damaged"),
        ("folder", lambda folder: [file.unlink() for file in folder.glob("*.txt")], "has no image with a caption"),
        (
            "table",
            lambda folder: (folder / "rows.csv").write_text("picture,words\n"),
            "no column for the image .*the columns are",
        ),
        ("table", write_table_as(b"image,text\na.png\n"), "rows.csv, line 2: .* 1 values, but the first line has 2"),
        ("table", write_table_as(b'image,text\n\na.png,"b\nc"\nb.png,"c\nd,e'), "line 5: .*quote that is not closed"),
        (
            "table",
            write_table_as(b"image,text\n" + b"a.png,b\n" * 3000 + b"a,caf\xe9"),
            "line 3002: not UTF-8 .byte 0xe9",
        ),
        ("table", write_table_as(b"image,text,text\n"), "several columns are named 'text'"),
        ("webdataset", zip_up, r"00001.tar is compressed.*gunzip < 00001.tar > plain/00001.tar"),
        ("webdataset", make_tar("a.png", "b.png", "a.txt", "b.txt"), "key 'a' are in two places.* must be neighbors"),
        ("webdataset", make_tar("b.txt"), "key 'b': it has 0 images.* must be neighbors"),
        ("webdataset", append_member(size=-512), "00001.tar is damaged or not a plain"),
        *(("webdataset", append_member(kind), "not a plain tar file .the member 'b.png' is") for kind in ELSEWHERE),
        *(
            ("webdataset", make_tar(f"{name}.png", f"{name}.txt"), "00001.tar: the name '.*' has line breaks or other")
            for name in ("a\nb", "a.\n")
        ),
        *(
            ("webdataset", make_tar(name, **LATIN_1), r"the name '.*\\udce4.png' is not UTF-8; write the archive again")
            for name in ("ä.png", "a.ä.png")
        ),
        *(("parquet", write_id(value), "row 1: 'id' must be a string or an integer, found") for value in (1.5, True)),
        ("table", lambda folder: (folder / "rows.csv").write_text("image,text\n"), "has no rows"),
        (
            "table",
            write_rows_as({"image": ["a.png", "b.png"], "text": "a"}),
            "b.jsonl, row 1: it has 2 images, but a caption",
        ),
        ("table", write_rows_as({"image": "000.png"}), "b.jsonl, row 1: no column for the text"),
        ("sharegpt", lambda folder: (folder / "rows.jsonl").write_text('{"id": "1"}\n'), "row 1: it has neither"),
    ],
)
def test_a_damaged_source_is_named_with_its_file_and_row(make, tmp_path, kind, damage, sentence):
    path = WRITERS[kind](tmp_path / "data/bad")
    damage(path if path.is_dir() else path.parent)
    path = next(path.parent.glob("b.jsonl"), path)
    with pytest.raises(InputError, match=sentence):
        make(good={"format": "data_juicer"}, bad={"format": kind, "path": str(path)})


def remove_two_captions(kind: str, path: Path) -> None:
    keys = list(CAPTIONS)[3:5]
    if kind == "folder":
        for key in keys:
            (path / f"{key}.txt").unlink()
        return
    members = [(f"{key}.txt", text.encode()) for key, text in CAPTIONS.items() if key not in keys]
    members += [(f"{key}.png", content) for key, content in IMAGES.items()]
    for shard in path.iterdir():
        shard.unlink()
    write_tar(path / "00000.tar", sorted(members))


@pytest.mark.parametrize("kind", ["folder", "webdataset"])
def test_images_without_a_caption_are_counted_and_named(make, tmp_path, capsys, kind):
    path = WRITERS[kind](tmp_path / "data/one")
    remove_two_captions(kind, path)
    texts = {}
    for values in ({}, {"uncaptioned": "keep"}):
        output = make(one={"format": kind, "path": str(path)} | values)
        counts = read_json(output / "summary.json")["sources"]["one"]
        assert counts["uncaptioned"] == 2 and "not_read" not in counts
        texts[counts["rows"]] = [extract_caption(row["text"]) for row in read_jsonl(output / "pretrain.jsonl")]
        references = [row["captions"] for row in read_jsonl(output / "evaluation.jsonl")]
        assert [""] not in references
    assert {rows: captions.count("") for rows, captions in texts.items()} == {
        len(CAPTIONS) - 2: 0,
        len(CAPTIONS): 2,
    }
    files = list_dataset_files(resolve_dataset("mixed").settings)
    assert all(map(os.path.isfile, files))
    write_merged_sources(resolve_dataset("mixed").settings, tmp_path / "out", tmp_path)
    assert f"2 of {len(CAPTIONS)}, " in (printed := capsys.readouterr().err) and "the first is " in printed
    with pytest.raises(InputError, match="sources.two: uncaptioned: table has no files of captions"):
        make(two={"format": "table", "uncaptioned": "keep"})


def test_earlier_copies_of_a_source_read_in_place_are_removed(make, tmp_path):
    make(one={"format": "parquet"}, two={"format": "parquet"})
    shards = webdataset(tmp_path / "shards")
    output = make(one={"format": "webdataset", "path": str(shards)}, two={"format": "parquet", "path": "data/two"})
    assert [folder.name for folder in (output / "images").iterdir()] == ["two"]
    assert {locate_image(output / "sources.json", row["images"][0]) for row in read_pairs(output / "pretrain.jsonl")}


def test_shards_in_the_hubs_cache_are_read_through_its_links(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub/datasets--me--photos"
    snapshot = repository / "snapshots" / COMMIT
    for number, shard in enumerate(sorted(webdataset(repository / "blobs").iterdir())):
        blob = shard.rename(repository / f"blobs/{number:040d}")
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / shard.name).symlink_to(f"../../blobs/{blob.name}")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    output = make(one={"format": "webdataset", "path": "me/photos"})
    rows = list(read_pairs(output / "pretrain.jsonl"))
    images = {read_file(locate_image(output / "sources.json", row["images"][0])) for row in rows}
    assert len(images) == len(CAPTIONS) - 2 and images <= set(IMAGES.values())


def test_caption_files_next_to_images_belong_to_the_dataset(make):
    make(one={"format": "folder"})
    settings = resolve_dataset("mixed").settings
    files = list_dataset_files(settings)
    assert sum(file.endswith(".txt") for file in files) == sum(file.endswith(".png") for file in files) == len(CAPTIONS)
    assert len(json.dumps(settings.file_content())) < 1000, "settings do not grow with the number of files"


def test_json_of_a_sample_has_question_and_named_caption(make, tmp_path):
    described = json.dumps({"question": "What?", "better": "a better text"}).encode()
    members = [
        part for key in "ab" for part in ((f"{key}.png", IMAGES["000"] + key.encode()), (f"{key}.txt", b"a text"))
    ]
    members = [*members[:2], ("a.json", described), *members[2:], ("b.json", described)]
    shard = write_tar(tmp_path / "x.tar", members)
    source = {"format": "webdataset", "path": str(shard), "split": "finetune"}
    for columns, answer in (({}, "a text"), ({"text": "better"}, "a better text")):
        output = make(base=base(tmp_path), one=source | {"columns": columns})
        row = next(read_llava(output / "finetune.json"))
        assert [turn["value"] for turn in row["conversations"]] == ["<image>\nWhat?", answer]


def shards(path: Path) -> dict:
    return {"format": "webdataset", "path": str(path)}


def base(folder: Path) -> dict:
    """Return a source of pairs, for tests of another source."""
    if not (folder / "base").exists():
        table(folder / "base")
    return {"format": "table", "path": str(folder / "base/rows.csv")}


@pytest.mark.parametrize("extra", [{"images": None}, {"text": "x"}])
def test_conversation_with_other_keys_is_not_a_pair(make, tmp_path, extra):
    path = llava(tmp_path / "data/one")
    rows = [row | extra for row in json.loads(path.read_text(encoding="utf-8"))]
    write_json_list(path, rows)
    output = make(
        one={"format": "llava", "path": str(path)}, two={"format": "llava", "path": str(path), "split": "finetune"}
    )
    for row in read_llava(output / "finetune.json"):
        assert read_file(locate_image(output / "sources.json", row["image"])) in IMAGES.values()


def test_member_names_do_not_determine_paths_of_images(make, tmp_path):
    member_names = [f"d{number}/../../x{number % 2}" for number in range(6)] + ["/abs", "é" * 60]
    members = [
        (name + suffix, png(number) if suffix == ".png" else b"c")
        for number, name in enumerate(member_names)
        for suffix in (".png", ".txt")
    ]
    shard = write_tar(tmp_path / "x.TAR", members)
    output = make(base=base(tmp_path), one=shards(shard))
    rows = [row for row in read_pairs(output / "pretrain.jsonl") if row["source"] == "one"]
    contents = [read_file(locate_image(output / "sources.json", row["images"][0])) for row in rows]
    assert len(set(contents)) == len(rows) > 3


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_a_file_whose_name_is_not_utf_8_is_refused_by_the_script(make, tmp_path, capsys, kind):
    path = WRITERS[kind](tmp_path / "data/one")
    output = make(one={"format": kind, "path": str(path)})
    ending = {"folder": "png", "parquet": "parquet"}[kind]
    file = next((path if path.is_dir() else path.parent).glob(f"*.{ending}"))
    name = os.fsencode(file.parent) + b"/caf\xe9" + os.fsencode(file.suffix)
    os.rename(file, name)
    if kind == "folder":
        os.rename(file.with_suffix(".txt"), name[:-4] + b".txt")
    settings = read_yaml(output / "config.yaml")
    settings["sources"]["one"]["path"] = str(file.parent)
    write_yaml(output / "config.yaml", settings)
    done = run_main(make_dataset, "--config", f"{output}/config.yaml", "--output-dir", str(output), capture=capsys)
    assert done.status == 2 and r"caf\udce9" in done.stderr and "not UTF-8; rename it" in done.stderr


def test_an_unread_file_whose_name_is_not_utf_8_is_counted(make, tmp_path):
    path = WRITERS["folder"](tmp_path / "data/one")
    (path / os.fsdecode(b"note.\xe9")).write_text("x")
    summary = read_json(make(one={"format": "folder", "path": str(path)}) / "summary.json")
    assert list(summary["sources"]["one"]["not_read"].values()) == [1]


def test_own_column_name_is_used_and_missing_column_is_named(make, tmp_path):
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"picture": list(IMAGES.values()), "words": list(CAPTIONS.values())}), path)
    columns = {"image": "picture", "text": "words"}
    output = make(a={"format": "parquet", "path": str(path), "columns": columns})
    assert len(list(read_pairs(output / "pretrain.jsonl"))) == len(CAPTIONS) - 2
    with pytest.raises(InputError, match="column 'wrods' is missing; the columns are picture, words"):
        make(a={"format": "parquet", "path": str(path), "columns": columns | {"text": "wrods"}})


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("one/../../secret.png", "outside"),
        ("two/a.png", "missing"),
        ("one/00000.tar/512+90/../../../secret.png", "missing"),
        ("one/link.tar/512+90/a.png", "outside"),
        ("one/00000.tar/512+0/a.png", "empty"),
    ],
)
def test_references_out_of_a_sources_folder_are_refused(tmp_path, reference, reason):
    webdataset(tmp_path / "data")
    (tmp_path / "secret.png").write_bytes(png(3))
    webdataset(tmp_path / "elsewhere")
    (tmp_path / "data/link.tar").symlink_to(tmp_path / "elsewhere/00000.tar")
    (tmp_path / "sources.json").write_text(json.dumps({"one": str(tmp_path / "data")}))
    try:
        content = read_file(locate_image(tmp_path / "sources.json", reference))
    except BadImageError as error:
        assert error.reason == reason
    except OSError as error:  # a position in the archive without such a member
        assert reason == "missing" and "has changed" in str(error)
    else:
        raise AssertionError(content)


def test_changed_archive_is_noticed(tmp_path):
    webdataset(tmp_path / "data")
    shard = tmp_path / "data/00000.tar"
    with tarfile.open(shard) as tar:
        info = tar.getmembers()[2]
    reference = f"{shard}/{info.offset_data}+{info.size}/{info.name}"
    assert compute_image_digest(reference) == hashlib.sha256(IMAGES["001"]).hexdigest()
    shard.write_bytes(shard.read_bytes()[512:])
    with pytest.raises(BadImageError, match="has changed or is truncated"):
        load_image(reference)


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        (
            {"a": {"format": "table", "path": "nowhere/"}},
            "sources.a: nowhere names no file that ends with .csv or .tsv or .jsonl or .json",
        ),
        ({"a": {"format": "tabel", "path": "x"}}, "sources.a.format: expected"),
        ({"a": {"format": "table", "path": "x.csv", "split": "finetune"}}, "no source has `split: pretrain`"),
        ({"a b": {"format": "table", "path": "x.csv"}}, "sources.a b must be a name"),
        (
            {name: {"format": "table", "path": "x.csv", "split": name} for name in ("pretrain", "evaluation")},
            "the source evaluation and `evaluation` both name held-out images; remove one",
        ),
    ],
)
def test_impossible_source_is_refused_early(tmp_path, monkeypatch, sources, sentence):
    monkeypatch.chdir(tmp_path)
    Path("x.csv").write_text("image,text\n")
    held_out = {"evaluation": {"file": "x.jsonl", "images": "."}}
    write_yaml(tmp_path / "config/datasets/mixed.yaml", {"sources": sources} | held_out)
    with pytest.raises(InputError, match=sentence):
        resolve_dataset("mixed")


def test_null_counts_as_an_empty_value(make, tmp_path):
    (tmp_path / "data").mkdir()
    images = [{"bytes": content, "path": None} for content in IMAGES.values()]
    texts = list(CAPTIONS.values())
    columns = {"image": [*images, None, {"bytes": None, "path": None}, images[0]], "caption": [*texts, "a", "b", None]}
    pq.write_table(pa.table(columns), tmp_path / "data/part.parquet")
    shard = write_tar(tmp_path / "x.tar", [("a.png", b""), ("a.json", json.dumps({"caption": None}).encode())])
    output = make(one={"format": "parquet", "path": "data/part.parquet"}, two=shards(shard))
    summary = read_json(output / "summary.json")
    assert summary["sources"]["one"]["rows"] == len(CAPTIONS) + 3 and summary["sources"]["two"]["rows"] == 1
    assert summary["pretrain"] + summary["left_out"]["pretrain"] == len(CAPTIONS) + 4
    reasons = []
    for row in read_pairs(output / "pretrain.jsonl"):
        try:
            locate_image(output / "sources.json", row["images"][0])
        except BadImageError as error:
            reasons.append(error.reason)
    assert reasons == ["empty"] * 3


def test_a_caption_file_that_links_elsewhere_is_refused(make, tmp_path):
    images = folder(tmp_path / "data/one")
    (tmp_path / "secret.txt").write_text("another user's")
    (images / "000.txt").unlink()
    (images / "000.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(InputError, match="000.txt is a link to a file outside of .*; replace it by a copy"):
        make(one={"format": "folder", "path": str(images)})


def test_a_full_disk_is_not_attributed_to_the_input_file(make, tmp_path, monkeypatch):
    def full(*arguments, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    parquet(tmp_path / "data")
    monkeypatch.setattr(tarfile, "open", full)
    with pytest.raises(InputError, match="^error: No space left on device. Free space or raise the limit, and run the"):
        make(one={"format": "parquet", "path": "data/part.parquet"})


@pytest.mark.parametrize(
    ("question", "expected"),
    [("What?", "What?"), (["What?", "x"], "What?"), (None, ""), (0, 0), ({"en": "What?"}, None)],
)
def test_a_question_is_a_string_or_the_first_of_a_list(make, tmp_path, question, expected):
    (tmp_path / "data").mkdir()
    columns = {"image": list(IMAGES.values()), "caption": list(CAPTIONS.values()), "question": [question] * len(IMAGES)}
    pq.write_table(pa.table(columns), "data/part.parquet")
    described = json.dumps({"caption": "a", "question": question}).encode()
    shard = write_tar(tmp_path / "x.tar", [("a.png", IMAGES["000"]), ("a.json", described)])
    for source in ({"format": "parquet", "path": "data/part.parquet"}, shards(shard)):
        if isinstance(expected, str):
            rows = read_pairs(make(base=base(tmp_path), one=source) / "pretrain.jsonl")
            assert {row.get("question", "") for row in rows if row["source"] == "one"} <= {expected}
        else:
            with pytest.raises(InputError, match="'question' must be a string, found"):
                make(base=base(tmp_path), one=source)


def test_cells_may_be_long_and_rows_may_end_in_carriage_returns(make, tmp_path):
    path = WRITERS["table"](tmp_path / "data/one")
    long = "word " * 50_000
    path.write_text(path.read_text(encoding="utf-8").replace("\n", "\r") + f'"{long}",000.png\r', encoding="utf-8")
    output = make(one={"format": "table", "path": str(path)}, two={"format": "table"})
    assert read_json(output / "summary.json")["sources"]["one"]["rows"] == len(CAPTIONS) + 1


def test_a_broken_link_among_the_files_is_named(tmp_path):
    (tmp_path / "lost.png").symlink_to("nowhere.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match="lost.png is a broken link; delete it"):
        find_files(tmp_path, [".png"])
    (tmp_path / "lost.png").unlink()
    assert find_files(tmp_path, [".png"]) == []


def test_messages_name_sources_instead_of_intermediate_files(make, tmp_path):
    WRITERS["table"](tmp_path / "data/one")
    few = tmp_path / "data/one/few.csv"
    for rows, sentence in (
        ("000.png,a\n", "error: sources one: too few different, readable images"),
        ("000.png,a\n001.png,b\n", "error: sources one: all its images are held out"),
        ("000.png,a <__dj__image>\n", "error: sources.one: the caption of row 'few-000000002' contains <__dj__image>"),
    ):
        few.write_text("image,text\n" + rows)
        with pytest.raises(InputError, match=sentence):
            make(one={"format": "table", "path": str(few)})


def test_rows_of_all_concatenated_archives_are_read(make, tmp_path):
    parts = [
        write_tar(tmp_path / f"{number}.part", [(f"{number}{key}.png", png(number)), (f"{number}{key}.txt", b"c")])
        for number, key in enumerate("abcd")
    ]
    shard = tmp_path / "all.tar"
    shard.write_bytes(b"".join(part.read_bytes() for part in parts) + bytes(3 * 512))
    listing = subprocess.run(["tar", "--ignore-zeros", "-tf", shard], capture_output=True, text=True, check=True)
    assert [member.name for member in read_members(shard)] == listing.stdout.split()
    assert [member.read() for member in read_members(shard)][::2] == [png(number) for number in range(4)]
    output = make(base=base(tmp_path), one=shards(shard))
    assert read_json(output / "summary.json")["sources"]["one"]["rows"] == 4
    shard.write_bytes(shard.read_bytes() + b"rubbish".ljust(512))
    with pytest.raises(InputError, match="all.tar is damaged or not a plain .*end-of-archive block is missing"):
        make(base=base(tmp_path), one=shards(shard))


def test_pairs_of_held_out_images_are_noted(make, tmp_path, capsys):
    output = make(base=base(tmp_path))
    done = run_main(make_dataset, "--config", f"{output}/config.yaml", "--output-dir", str(output), capture=capsys)
    assert " pairs are kept out of the training, because the model is scored on their images" in done.stderr


def test_unread_files_of_a_source_are_counted(make, tmp_path, capsys):
    photos = folder(tmp_path / "data/photos")
    (photos / "deep").mkdir()
    for name in ("deep/phone.HEIC", "b.heic", "notes.txt", ".hidden"):
        (photos / name).write_bytes(b"x")
    shard = write_tar(tmp_path / "x.tar", [("a.png", png(1)), ("a.txt", b"c"), ("a.cls", b"3"), ("a.heic", b"x")])
    output = make(a={"format": "folder", "path": str(photos)}, b=shards(shard))
    sources = read_json(output / "summary.json")["sources"]
    assert sources["a"]["not_read"] == {".heic": 2, ".hidden": 1, ".txt": 1} and sources["a"]["rows"] == len(CAPTIONS)
    assert sources["b"]["not_read"] == {".cls": 1, ".heic": 1}
    write_merged_sources(resolve_dataset("mixed").settings, tmp_path / "out", tmp_path)
    printed = capsys.readouterr().err
    assert "a: files that are not used: 4 (" in printed and "convert .heic and .heif to JPEG" in printed
    assert "1 .txt without an image that can be read" in printed


@pytest.mark.parametrize("kind", ["folder", "parquet", "webdataset"])
def test_linked_folder_is_refused_outside_and_read_once_inside(make, tmp_path, kind):
    path = WRITERS[kind](tmp_path / "data/here" / kind).resolve()
    (path / "again").symlink_to(path)
    (path / "deep").mkdir()
    (path / "deep/up").symlink_to("..")
    output = make(one={"format": kind, "path": str(path)})
    assert read_json(output / "summary.json")["sources"]["one"]["rows"] == len(CAPTIONS)
    elsewhere = WRITERS[kind](tmp_path / "elsewhere")
    (path / "deep/more").symlink_to(elsewhere)
    with pytest.raises(InputError, match="deep/more is a link to a folder outside .*name its target"):
        make(one={"format": kind, "path": str(path)})


def test_a_pattern_does_not_follow_circular_links(tmp_path):
    loose = tmp_path / "data"
    write_loose(loose)
    (loose / "b").mkdir()
    (loose / "b/up").symlink_to("..")
    assert find_files(loose / "**/*.png", [".png"]) == sorted(loose / f"{key}.png" for key in IMAGES)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"data": png(1)}, "has the keys data, but no bytes under"),
        ({"bytes": None, "path": None, "content": png(1)}, "has the keys bytes, path, content, but no bytes under"),
        ({"path": None}, "has the keys path, but no bytes under"),
        ({"bytes": None, "path": "a.png"}, "must be bytes, found only the path 'a.png'"),
    ],
)
def test_an_image_without_bytes_under_known_keys_is_named(make, tmp_path, keys, problem):
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"image": [keys], "caption": ["a"]}), "data/part.parquet")
    with pytest.raises(InputError, match=f"row 1: its image {problem}"):
        make(one={"format": "parquet", "path": "data/part.parquet"})


UTF_16 = {  # writers of one caption in UTF-16 without a byte order mark
    "folder": lambda path: path.with_name("000.txt").write_bytes("a boat".encode("utf-16-le")),
    "table": lambda path: path.write_bytes(path.read_bytes() + "000.png,a boat\n".encode("utf-16-le")),
    "sharegpt": lambda path: path.write_bytes(path.read_text(encoding="utf-8").replace("ü", "u").encode("utf-16-be")),
    "webdataset": lambda path: write_tar(path.with_name("9.tar"), [("x.png", png(1)), ("x.txt", b"a\0 \0b\0")]),
}


@pytest.mark.parametrize("kind", UTF_16)
def test_text_in_utf_16_without_a_mark_is_refused(make, tmp_path, kind):
    path = WRITERS[kind](tmp_path / "data/one")
    UTF_16[kind](path / "any" if path.is_dir() else path)
    with pytest.raises(InputError, match="it contains null bytes, as text in UTF-16 does; save the file as UTF-8"):
        make(one={"format": kind, "path": str(path)})


def write_tsv(folder: Path, captions: list[str], **options) -> dict:
    """Return a source of photos with these captions, in a table as pandas writes it."""
    write_loose(folder)
    images = [f"{key}.png" for key in list(IMAGES)[: len(captions)]]
    pd.DataFrame({"image": images, "caption": captions}).to_csv(folder / "rows.tsv", sep="\t", index=False, **options)
    return {"format": "table", "path": str(folder / "rows.tsv")}


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_a_quoted_tsv_is_read_as_pandas_reads_it(make, tmp_path, quoting):
    captions = ['a sign says "STOP"', '"Ahoy!"', "two\nlines", "a\ttab", "plain", '5" wide', "it's", '""']
    source = write_tsv(tmp_path / "data/one", captions, quoting=quoting)
    frame = pd.read_csv(source["path"], sep="\t", keep_default_na=False)
    assert list(frame["caption"]) == captions
    rows = list(read_table(Source("one", (Path(source["path"]),), tmp_path)))
    assert [row["conversations"][1]["value"] for row in rows] == captions


@pytest.mark.parametrize("caption", ['"STOP" is written on it', '"never closed'])
def test_plain_quotes_of_a_tsv_are_refused_with_both_readings(make, tmp_path, caption):
    source = write_tsv(tmp_path / "data/one", ["a", "b", "c"])
    with open(source["path"], "a") as file:
        file.write(f"003.png\t{caption}\n")
    with pytest.raises(
        InputError, match=r"rows.tsv, line 5: .*read as quoted, as pandas does; if your quotes are plain"
    ):
        make(one=source)


@pytest.mark.parametrize("end", ["csv", "tsv"])
def test_cells_like_nan_stay_strings(make, tmp_path, end):
    words = ["nan", "NULL", "NA", "None", "N/A", "true", "007", "1e5", "-inf"]
    write_loose(tmp_path / "data")
    mark = {"csv": ",", "tsv": "\t"}[end]
    lines = [f"000.png{mark}{word}" for word in words]
    (tmp_path / f"data/rows.{end}").write_text("\r\n".join([f"image{mark}caption", *lines]))
    output = make(base=base(tmp_path), one={"format": "table", "path": f"data/rows.{end}"})
    written = list(map(json.loads, open(output / "pretrain.jsonl", encoding="utf-8")))
    held_out = list(map(json.loads, open(output / "evaluation.jsonl", encoding="utf-8")))
    captions = [extract_caption(row["text"]) for row in written] + [
        text for row in held_out for text in row["captions"]
    ]
    assert set(words) <= set(captions)


IDS = {"1": "1", 1: "1~2", 10**30: str(10**30), None: None}
OTHER_IDS = [1.5, True, [1], {"a": 1}]


@pytest.mark.parametrize("kind", ["llava", "sharegpt"])
def test_ids_are_strings_or_integers_and_repeats_are_numbered(make, tmp_path, kind):
    path = WRITERS[kind](tmp_path / "data/one")
    rows = read_json(path, list) if kind == "llava" else list(read_jsonl(path))
    expected = dict(list(IDS.items())[: 3 if kind == "llava" else 4])

    def write(ids: list) -> None:
        rows_with_ids = [rows[0] | {"id": identifier} for identifier in ids]
        write_json_list(path, rows_with_ids) if kind == "llava" else write_jsonl(path, rows_with_ids)

    write(list(expected))
    source = {"format": kind, "path": str(path), "split": "finetune"}
    captions = {"format": "table", "path": str(table(tmp_path / "data/two"))}
    written = read_llava(make(two=captions, one=source) / "finetune.json")
    assert [row["id"] for row in written] == [f"one/{name or 'rows-000000004'}" for name in expected.values()]
    for other in OTHER_IDS:
        write(["a", other])
        with pytest.raises(InputError, match="row 2: 'id' must be a string or an integer, found"):
            make(two=captions, one=source)


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L"])
def test_a_long_member_header_is_refused_unread(tmp_path, kind):
    shard = tmp_path / "x.tar"
    shard.write_bytes(header(kind, 3 * 10**8))
    os.truncate(shard, 4 * 10**8)
    assert measure_peak(lambda: list(read_members(shard)), tarfile.ReadError, "a header has 300000000 bytes") < 10**7


def test_the_total_of_global_headers_is_limited(tmp_path):
    record = b"520000 comment%d=" + b"x" * 520_000
    with open(tmp_path / "x.tar", "wb") as file:
        for number in range(4):
            content = (record % number)[:519_999] + b"\n"
            file.write(header(b"g", len(content)) + content + bytes(-len(content) % 512))
    with pytest.raises(tarfile.ReadError, match="a header has 520000 bytes"):
        list(read_members(tmp_path / "x.tar"))


def measure_peak(call, error: type[Exception], sentence: str) -> int:
    """Return the peak bytes that Python allocates while a source is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=sentence):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_size_of_a_text_member_is_limited(tmp_path):
    shard = tmp_path / "x.tar"
    info = tarfile.TarInfo("a.txt")
    info.size = 3 * 10**8
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        image = tarfile.TarInfo("a.png")
        image.size = len(png(1))
        tar.addfile(image, io.BytesIO(png(1)))
        begin = tar.offset
    shard.write_bytes(content.getvalue()[:begin] + info.tobuf())
    os.truncate(shard, begin + 512 + -(-info.size // 512) * 512 + 1024)
    source = Source("one", (shard,), tmp_path)
    sentence = "x.tar, key 'a', a.txt: the row has 300000000 bytes; at most 33554432"
    assert measure_peak(lambda: list(read_webdataset(source)), InputError, sentence) < 10**7


def test_the_size_of_a_table_row_is_limited_on_any_lines(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"image,text\na.png,")
    os.truncate(path, 3 * 10**8)
    source = Source("one", (path,), tmp_path)
    sentence = "rows.csv, line {}: the row has more than 33554432 bytes"
    assert measure_peak(lambda: list(read_table(source)), InputError, sentence.format(2)) < 2 * 10**8
    path.write_bytes(b'image,text\na.png,"' + (b"x" * 2**20 + b"\n") * 40)
    assert (
        measure_peak(lambda: list(read_table(source)), InputError, r"rows.csv, line 3\d: the row has more") < 2 * 10**8
    )


def test_size_of_parquet_rows_is_limited(tmp_path):
    texts = pa.DictionaryArray.from_arrays([0] * 24, ["x" * (2**25 + 1)])
    pq.write_table(pa.table({"image": [png(1)] * 24, "caption": texts}), tmp_path / "x.parquet", store_schema=False)
    source = Source("one", (tmp_path / "x.parquet",), tmp_path, output=tmp_path / "own")
    before = pa.default_memory_pool().bytes_allocated()
    assert measure_peak(lambda: list(read_parquet(source)), InputError, "row 1: the row has 3355\\d+ bytes") < 10**7
    assert pa.default_memory_pool().max_memory() - before < 2**29


def test_parquet_dictionaries_do_not_count_towards_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr("dj2mgm.data.sources.parquet.MAX_ROW", 1000)
    captions = ["a" * 400, "b" * 400, "c" * 400, "a" * 400]
    columns = {"id": list("1234"), "image": [png(number) for number in range(4)], "caption": captions}
    table = pa.table({name: pa.array(values).dictionary_encode() for name, values in columns.items()})
    pq.write_table(table, tmp_path / "x.parquet")
    rows = list(read_parquet(Source("one", (tmp_path / "x.parquet",), tmp_path, output=tmp_path / "own")))
    assert [row["conversations"][1]["value"] for row in rows] == captions and [row["id"] for row in rows] == list(
        "1234"
    )


def test_the_size_of_a_parquet_turn_is_limited(tmp_path):
    turns = [{"from": "human", "value": "x" * (2**25 + 1)}, {"from": "gpt", "value": "a"}]
    pq.write_table(pa.table({"image": [png(1)], "conversations": [turns]}), tmp_path / "x.parquet")
    source = Source("one", (tmp_path / "x.parquet",), tmp_path, output=tmp_path / "own")
    assert measure_peak(lambda: list(read_parquet(source)), InputError, "row 1: the row has 3355\\d+ bytes") < 10**7


@pytest.mark.parametrize("kind", ["webdataset", "parquet", "folder"])
def test_a_pipe_or_device_among_the_files_is_refused(make, tmp_path, kind):
    path = WRITERS[kind](tmp_path / "data/one")
    odd = path / ("odd" + {"webdataset": ".tar", "parquet": ".parquet", "folder": ".png"}[kind])
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        put(odd)
        with pytest.raises(InputError, match=f"{odd.name} is a pipe, a socket or a device; put a copy"):
            make(one={"format": kind, "path": str(path)})
        odd.unlink()


@pytest.mark.parametrize("kind", ["webdataset", "parquet", "table", "llava"])
def test_a_file_that_links_out_of_the_folder_is_not_read(make, tmp_path, kind):
    elsewhere, here = (WRITERS[kind](tmp_path / name / "data") for name in ("elsewhere", "here"))
    elsewhere = next(elsewhere.iterdir()) if elsewhere.is_dir() else elsewhere
    folder = here if here.is_dir() else here.parent
    (folder / f"link{elsewhere.suffix}").symlink_to(elsewhere)
    with pytest.raises(InputError, match=f"link{elsewhere.suffix} is a link out of its folder, to .*put a copy"):
        make(one={"format": kind, "path": str(folder)})


@pytest.mark.parametrize("kind", ["parquet"])
def test_message_about_outside_link_names_a_readable_path(make, tmp_path, kind):
    (tmp_path / "links").mkdir()
    for file in WRITERS[kind](tmp_path / "data").iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    with pytest.raises(InputError, match="If the link is yours, name its target") as error:
        make(one={"format": kind, "path": str(tmp_path / "links")})
    pattern = str(error.value).split("path: ")[-1].strip()
    output = make(one={"format": kind, "path": pattern})
    rows = list(read_pairs(output / "pretrain.jsonl"))
    assert rows and all(load_image(locate_image(output / "sources.json", row["images"][0])) for row in rows)


@pytest.mark.parametrize("kind", ["webdataset", "folder", "data_juicer"])
def test_files_added_by_macos_are_not_read(make, tmp_path, kind):
    path = WRITERS[kind](tmp_path / "data")
    folder = path if path.is_dir() else path.parent
    for file in list(folder.iterdir()):
        (folder / f"._{file.name}").write_bytes(b"\0\5\x16\7")
    assert make(one={"format": kind, "path": str(folder)})
    if kind == "data_juicer":
        assert resolve_dataset(str(folder)).settings.pretrain.file == str(path)


def test_a_folder_inside_a_hub_snapshot_is_read(make, tmp_path):
    repository = tmp_path / "hub/datasets--me--photos"
    blob = next(parquet(repository / "blobs").iterdir()).rename(repository / f"blobs/{0:040d}")
    (repository / "snapshots/abc/data").mkdir(parents=True)
    (repository / "snapshots/abc/data/part.parquet").symlink_to(f"../../../blobs/{blob.name}")
    output = make(one={"format": "parquet", "path": str(repository / "snapshots/abc/data")})
    assert read_json(output / "summary.json")["sources"]["one"]["rows"] == len(CAPTIONS)


def test_a_size_in_base_256_is_the_members_size(tmp_path):
    shard = write_tar(tmp_path / "x.tar", [("a.png", png(1))])
    header = bytearray(shard.read_bytes()[:512])
    header[124:136] = b"\x80" + len(png(1)).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    shard.write_bytes(header + shard.read_bytes()[512:])
    [member] = read_members(shard)
    assert member.read() == png(1)


def test_archive_members_outside_samples_are_counted(make, tmp_path):
    hidden = [("._a.png", b"\0\5\x16\7"), ("d/.DS_Store", b"x"), ("README", b"x")]
    sample = [("a.png", png(1)), ("a.txt", b"c"), ("a.other.txt", b"d"), ("a.meta.json", b"{}")]
    shard = write_tar(tmp_path / "x.tar", [*hidden, *sample])
    output = make(base=base(tmp_path), one=shards(shard))
    read = read_json(output / "summary.json")["sources"]["one"]
    assert read["rows"] == 1 and sum(read["not_read"].values()) == 5
    shard = write_tar(tmp_path / "x.tar", [("a.heic", png(1)), ("a.txt", b"c")])
    with pytest.raises(InputError, match=r"key 'a': it has 0 images, .*the suffixes are .heic, .txt"):
        make(base=base(tmp_path), one=shards(shard))


@pytest.mark.parametrize("column", ["image", "id"])
def test_columns_of_parquet_that_share_a_name_are_refused(tmp_path, column):
    columns = {"image": [png(1)], "caption": ["a"], "question": ["b"], "id": ["c"]}
    names = [*columns, column]
    table = pa.Table.from_arrays([pa.array(columns[name]) for name in names], names=names)
    pq.write_table(table, tmp_path / "x.parquet")
    source = Source("one", (tmp_path / "x.parquet",), tmp_path, output=tmp_path / "own")
    with pytest.raises(InputError, match=f"x.parquet: several columns are named '{column}'; rename all but one"):
        next(read_parquet(source))


def test_unreadable_parquet_values_name_their_rows(tmp_path):
    twice = pa.StructArray.from_arrays([pa.array([png(1)])] * 2, names=["bytes", "bytes"])
    images, day = pa.array([png(1)]), pa.array([2**31 - 1], pa.date32())
    long = pa.array([2**62], pa.duration("s"))
    for image, identifier in ((images, day), (images, long), (twice, pa.array(["a"]))):
        table = pa.Table.from_arrays([image, pa.array(["a"]), identifier], names=["image", "caption", "id"])
        pq.write_table(table, tmp_path / "x.parquet")
        source = Source("one", (tmp_path / "x.parquet",), tmp_path, output=tmp_path / "own")
        with pytest.raises(InputError, match=r"x.parquet, rows 1 to 1: a value cannot be read .*as strings"):
            next(read_parquet(source))


def test_a_repeated_parquet_image_is_written_once(make, tmp_path):
    (tmp_path / "data").mkdir()
    contents = [png(number) for number in range(20)]
    rows = [{"image": content, "caption": f"caption {turn}"} for turn in range(10) for content in contents]
    for number in range(2):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"data/{number}.parquet")
    output = make(one={"format": "parquet", "path": "data"})
    assert [len(list(read_members(shard))) for shard in (output / "images/one").iterdir()] == [20]
    summary = read_json(output / "summary.json")
    assert summary["evaluation"] == 2 and summary["left_out"] == {"pretrain": 2 * 20}


@pytest.mark.parametrize("system", [{"system": "Be short."}, {"system": ""}])
def test_a_system_prompt_outside_of_the_turns_is_kept(make, tmp_path, system):
    path = sharegpt(tmp_path / "data/one")
    write_jsonl(path, [row | system for row in list(read_jsonl(path))])
    source = {"format": "sharegpt", "path": str(path), "split": "finetune"}
    row = next(read_llava(make(base=base(tmp_path), one=source) / "finetune.json"))
    assert row["conversations"][0]["value"].startswith("Be short.") == bool(system["system"])


@pytest.mark.parametrize("value", ["my_fotos", "below/my_fotos", "{tmp}/my_fotos"])
def test_a_misspelled_folder_gets_a_suggestion(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    for name in ("my_photos", "below/my_photos"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "shape").mkdir()
    with pytest.raises(InputError, match="did you mean 'shapes'"):  # more similar than the folder
        resolve_dataset("shapess")
    value = value.format(tmp=tmp_path)
    with pytest.raises(InputError, match=f"did you mean '{value.replace('fotos', 'photos')}'"):
        resolve_dataset(value)


@pytest.mark.parametrize("put", [Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_an_unreadable_evaluation_file_is_not_ignored(tmp_path, put):
    data_juicer(tmp_path / "mine")
    put(tmp_path / "mine/evaluation.jsonl")
    with pytest.raises(InputError, match="evaluation.file: there is no file .*evaluation.jsonl"):
        check_files(resolve_dataset(str(tmp_path / "mine")).settings)
