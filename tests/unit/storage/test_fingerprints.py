"""Fingerprints of files by content, and of images by size, time and a sample of their contents."""

import json
import os
import shutil

import pytest

from dj2mgm.storage import fingerprints
from dj2mgm.storage.fingerprints import Fingerprints


@pytest.fixture
def settled(monkeypatch):
    """Count files that have just been written as settled, so that their digests are kept."""
    monkeypatch.setattr(fingerprints, "SETTLED_S", -1)


def hash_files(tmp_path, *files) -> str:
    fingerprints = Fingerprints(tmp_path / "kept.json")
    digest = fingerprints.hash_files(map(str, files))
    fingerprints.save()
    return digest


def hash_images(tmp_path, file) -> str:
    fingerprints = Fingerprints(tmp_path / "kept.json")
    digest = fingerprints.hash_images([(str(file), str(tmp_path))])
    fingerprints.save()
    return digest


def test_fingerprints_depend_on_content_and_not_on_times(tmp_path, settled):
    file = tmp_path / "a.jsonl"
    file.write_text("one")
    first, times = hash_files(tmp_path, file), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    os.utime(file, (1, 1))
    assert hash_files(tmp_path, file) == first
    file.write_text("two")
    os.utime(file, ns=times)
    assert hash_files(tmp_path, file) != first, "same size, same time, another content"
    file.unlink()
    assert hash_files(tmp_path, file) != first


def test_only_digests_of_settled_files_are_kept(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one")
    hash_files(tmp_path, tmp_path / "a.txt")
    assert not (tmp_path / "kept.json").exists(), "a recently changed file is read again"
    monkeypatch.setattr(fingerprints, "SETTLED_S", -1)
    first = hash_files(tmp_path, tmp_path / "a.txt")
    monkeypatch.setattr(fingerprints, "_digest_content", lambda *_: pytest.fail("read again"))
    assert hash_files(tmp_path, tmp_path / "a.txt") == first


@pytest.mark.parametrize("damage", ["{", '{"content x": 3}'])
def test_damaged_records_are_rewritten(tmp_path, settled, damage):
    (tmp_path / "a.txt").write_text("one")
    first = hash_files(tmp_path, tmp_path / "a.txt")
    (tmp_path / "kept.json").write_text(damage)
    assert hash_files(tmp_path, tmp_path / "a.txt") == first


def test_large_files_are_compared_by_size_time_and_blocks(tmp_path, settled, monkeypatch):
    monkeypatch.setattr(fingerprints, "MAX_READ_BYTES", 1 << 16)
    file = tmp_path / "weights.safetensors"
    file.write_bytes(bytes(1 << 22))
    first = hash_files(tmp_path, file)
    os.utime(file, (1, 1))
    later = hash_files(tmp_path, file)
    assert later != first
    with open(file, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")
    os.utime(file, (1, 1))
    assert hash_files(tmp_path, file) != later


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", '{"images": ["a/Ä 1.PNG", "b.jpg", "a, b.png"]}\n{"images": ["a\\/\\u00c4 1.PNG"]}\n'),
        ("rows.json", '[{"image":"a/Ä 1.PNG"},\n{"image":"b.jpg"}]'),
        ("rows.csv", "image,text\na/Ä 1.PNG,x\nb.jpg,y"),
        ("rows.tsv", "image\ttext\na/Ä 1.PNG\tx\nb.jpg\ty\r\n"),
    ],
)
def test_only_images_named_by_a_file_count(tmp_path, settled, name, text):
    (tmp_path / "a").mkdir()
    for image in ("a/Ä 1.PNG", "b.jpg", "c.jpg", "a, b.png"):
        (tmp_path / image).write_bytes(b"one")
    (tmp_path / name).write_text(text, encoding="utf-8")
    first = hash_images(tmp_path, tmp_path / name)
    (tmp_path / "c.jpg").write_bytes(b"other")
    assert hash_images(tmp_path, tmp_path / name) == first
    for image in ("a/Ä 1.PNG", "b.jpg", *(["a, b.png"] if name == "rows.jsonl" else [])):
        status = (tmp_path / image).stat()
        shutil.copy2(tmp_path / image, tmp_path / "kept")
        (tmp_path / image).write_bytes(b"two")
        os.utime(tmp_path / image, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert hash_images(tmp_path, tmp_path / name) != first, "same size, same time, another content"
        shutil.copy2(tmp_path / "kept", tmp_path / image)
        assert hash_images(tmp_path, tmp_path / name) == first


def test_the_sample_of_images_does_not_depend_on_order(tmp_path, settled, monkeypatch):
    monkeypatch.setattr(fingerprints, "MAX_IMAGES", 5)
    monkeypatch.setattr(fingerprints, "CONTENT_READS", 2)
    names = [f"{number}.png" for number in range(50)]
    for name in names:
        (tmp_path / name).touch()
    digests = set()
    for order in (names, names[::-1]):
        (tmp_path / "rows.jsonl").write_text(json.dumps(order))
        digests.add(hash_images(tmp_path, tmp_path / "rows.jsonl"))
    assert len(digests) == 1


def test_special_files_count_as_missing(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"images": ["pipe.png", "device.png", "null\\u0000.png"]}')
    fingerprints = Fingerprints(tmp_path / "kept.json")
    assert fingerprints.hash_images([(str(rows), str(tmp_path))])
    assert fingerprints.hash_files([str(tmp_path / "pipe.png")])
