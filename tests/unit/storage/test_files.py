import errno
import fcntl
import os
import re
import stat
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from dj2mgm.script_modules import SCRIPTS
from dj2mgm.storage.files import (
    compute_sha256,
    read_json,
    read_jsonl,
    replace_file,
    replace_folder,
    write_json,
    write_jsonl,
    write_yaml,
)
from paths import PROJECT


class InterruptedWriteError(Exception):
    pass


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(InterruptedWriteError):
        with replace_file(path) as file:
            file.write("half of the new")
            raise InterruptedWriteError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InterruptedWriteError), replace_file(tmp_path / "new folder" / "out.txt"):
        raise InterruptedWriteError
    assert list((tmp_path / "new folder").iterdir()) == []


def test_the_file_gets_its_name_only_after_the_block(tmp_path):
    path = tmp_path / "out.bin"
    with replace_file(path, "wb") as file:
        file.write(b"\x00\xff")
        assert not path.exists()
    assert path.read_bytes() == b"\x00\xff"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_as_a_whole_or_kept(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("old")
    with pytest.raises(InterruptedWriteError):
        with replace_folder(folder) as new:
            (new / "weights").write_text("half")
            raise InterruptedWriteError
    assert (folder / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [folder]
    with replace_folder(folder) as new:
        (new / "new").touch()
    assert list(tmp_path.rglob("*")) == [folder, folder / "new"]


WRITE = """
import sys, time
from dj2mgm.storage.files import replace_file, replace_folder
with replace_file(sys.argv[1] + "/file") as file, replace_folder(sys.argv[1] + "/folder") as folder:
    file.write("whole")
    (folder / "weights").write_text("whole")
    print("open", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def writing(tmp_path):
    """Return a function that starts a process with an open temporary file and folder, until it gets input."""
    started = []

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", WRITE, str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(SCRIPTS)}, **pipes))
        assert started[-1].stdout.readline() == "open\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_temporary_files_of_killed_processes_are_removed(tmp_path, writing):
    killed = writing()
    killed.kill()
    killed.wait()
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 3, "the file, the folder, and its lock"
    living = writing()
    there = {path.name for path in tmp_path.iterdir()}
    assert len(there) == 3 and there.isdisjoint(left)
    other = writing()
    assert there < {path.name for path in tmp_path.iterdir()}
    for process in (living, other):
        process.communicate("\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == (tmp_path / "folder/weights").read_text() == "whole"


def test_temporary_files_have_unpredictable_names(tmp_path):
    names, decoy = set(), tmp_path / "decoy"
    decoy.write_text("whole")
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / f".a.{os.getpid()}.tmp").symlink_to(decoy)
        (folder / ".a.abcdefgh.dj2mgm.tmp").symlink_to(decoy)
        os.mkfifo(folder / ".b.abcdefgh.dj2mgm.tmp")
        before = set(os.listdir(folder))
        with replace_file(folder / "a") as file:
            file.write("new")
            names |= set(os.listdir(folder)) - before
        assert (folder / "a").read_text() == "new" and set(os.listdir(folder)) == before | {"a"}
    assert len(names) == 20 and decoy.read_text() == "whole"
    assert all(re.fullmatch(r"\.a\.[a-z0-9_]{8}\.dj2mgm\.tmp", name) for name in names)


def test_without_locks_no_temporary_file_is_removed(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    (tmp_path / ".a.abcdefgh.dj2mgm.tmp").touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    write_json(tmp_path / "a", {})
    assert sorted(os.listdir(tmp_path)) == [".a.abcdefgh.dj2mgm.tmp", "a"]


def test_text_in_any_language_survives_a_round_trip(tmp_path):
    rows = [{"text": "ein Hügel\n🏔 山"}, {"text": "\u2028 line separator"}]
    assert write_jsonl(tmp_path / "a.jsonl", rows) == 2
    assert list(read_jsonl(tmp_path / "a.jsonl")) == rows
    write_json(tmp_path / "a.json", rows)
    assert read_json(tmp_path / "a.json", list) == rows
    assert "Hügel" in (tmp_path / "a.jsonl").read_text(encoding="utf-8")


def test_yaml_keeps_the_order_of_keys(tmp_path):
    write_yaml(tmp_path / "a.yaml", {"zebra": 1, "ant": 2})
    assert (tmp_path / "a.yaml").read_text() == "zebra: 1\nant: 2\n"


def test_the_digest_depends_on_contents_and_order(tmp_path):
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for path, data in ((a, b"1"), (b, b"2"), (c, b"1")):
        path.write_bytes(data)
    assert compute_sha256(a) == "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
    assert compute_sha256(a, b) == compute_sha256(c, b) != compute_sha256(b, a)


def test_the_base_library_needs_no_model_library():
    """`errors` and `files` are imported everywhere, also in environments without torch and Data-Juicer."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import dj2mgm.errors, dj2mgm.storage.files; print(list(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code, SCRIPTS], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"'(torch|numpy|transformers|data_juicer)'", loaded)


def test_permissions_of_weights_follow_the_umask(tmp_path):
    """Safetensors itself writes files that only their owner can read."""
    with replace_file(tmp_path / "a.safetensors", "wb") as file:
        save_file({"a": torch.zeros(1)}, file.name)
    with replace_folder(tmp_path / "folder") as folder:
        save_file({"a": torch.zeros(1)}, folder / "b.safetensors")
    umask = os.umask(0)
    os.umask(umask)
    for written in (tmp_path / "a.safetensors", tmp_path / "folder/b.safetensors"):
        assert stat.S_IMODE(written.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("script", ["explore", "chat", "watch", "monitor_memory", "merge_adapter", "train_deepspeed"])
def test_a_wrong_environment_is_reported_in_one_line(script):
    """-S starts Python without the folder of installed packages."""
    command = [sys.executable, "-S", str(PROJECT / f"workflow_scripts/{script}.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: the package ") and "source .venv/bin/activate" in line
