import os
import re
import stat
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from dj2mgm.code import SCRIPTS
from dj2mgm.command_line import command_line
from dj2mgm.errors import InputError
from dj2mgm.files import (
    read_json,
    read_jsonl,
    replace_file,
    replace_folder,
    sha256_of,
    write_json,
    write_jsonl,
    write_yaml,
)


class Interrupted(Exception):
    pass


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(Interrupted):
        with replace_file(path) as file:
            file.write("half of the new")
            raise Interrupted
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_first_write_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(Interrupted), replace_file(tmp_path / "new folder" / "out.txt"):
        raise Interrupted
    assert list((tmp_path / "new folder").iterdir()) == []


def test_the_final_name_appears_only_after_the_block(tmp_path):
    path = tmp_path / "out.bin"
    with replace_file(path, "wb") as file:
        file.write(b"\x00\xff")
        assert not path.exists()
    assert path.read_bytes() == b"\x00\xff"
    assert list(tmp_path.iterdir()) == [path]


def test_a_row_that_fails_while_rows_are_written_leaves_the_old_jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"id": "old"}])

    def rows():
        yield {"id": "new"}
        raise Interrupted

    with pytest.raises(Interrupted):
        write_jsonl(path, rows())
    assert list(read_jsonl(path)) == [{"id": "old"}]


def test_a_failed_folder_leaves_the_old_folder_and_no_temporary(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("old")
    with pytest.raises(Interrupted):
        with replace_folder(folder) as new:
            (new / "weights").write_text("half")
            raise Interrupted
    assert (folder / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_replaced_folder_holds_nothing_of_the_old_one_nor_of_a_killed_attempt(tmp_path):
    folder = tmp_path / "model"
    for name in ("model", ".model.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stale").write_text("x")
    with replace_folder(folder) as new:
        (new / "weights").write_text("new")
    assert [path.name for path in folder.iterdir()] == ["weights"]
    assert list(tmp_path.iterdir()) == [folder]


def test_text_survives_writing_and_reading_in_any_language(tmp_path):
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
    assert sha256_of(a) == "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
    assert sha256_of(a, b) == sha256_of(c, b) != sha256_of(b, a)


def test_an_input_error_is_one_line_and_exit_status_2(capsys):
    @command_line
    def main():
        raise InputError("rows.jsonl, line 3: no\n\x1b[2Jerror: ä")

    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: rows.jsonl, line 3: no\\n\\x1b[2Jerror: ä\n"


def test_a_defect_keeps_its_traceback():
    @command_line
    def main():
        raise KeyError("defect")

    with pytest.raises(KeyError):
        main()


def test_the_base_library_needs_no_model_library():
    """`errors` and `files` are imported everywhere, also where neither torch nor Data-Juicer is installed."""
    code = "import sys; sys.path[:0] = [sys.argv[1]]; from dj2mgm import errors, files; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code, SCRIPTS], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"'(torch|numpy|transformers|data_juicer)'", loaded)


def test_weights_can_be_read_by_whom_the_umask_lets(tmp_path):
    """safetensors writes files that only their owner can read."""
    with replace_file(tmp_path / "a.safetensors", "wb") as file:
        save_file({"a": torch.zeros(1)}, file.name)
    with replace_folder(tmp_path / "folder") as folder:
        save_file({"a": torch.zeros(1)}, folder / "b.safetensors")
    umask = os.umask(0)
    os.umask(umask)
    for written in (tmp_path / "a.safetensors", tmp_path / "folder/b.safetensors"):
        assert stat.S_IMODE(written.stat().st_mode) == 0o666 & ~umask
