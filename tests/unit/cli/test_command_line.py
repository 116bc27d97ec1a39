"""Entry points: the environment of the processes that they start."""

import errno
import os
import pwd
import subprocess
import sys

import pytest

from dj2mgm.cli.command_line import command_line
from dj2mgm.errors import InputError


def test_children_import_nothing_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    statuses = []
    run = command_line(lambda: statuses.append(subprocess.run([sys.executable, "-c", "import random"]).returncode))
    run()
    assert statuses == [0] and "PYTHONSAFEPATH" not in os.environ


@pytest.mark.parametrize(
    ("code", "file"),
    [(errno.EACCES, "/results/a.json"), (errno.EROFS, b"/results/a.json"), (errno.ENOSPC, None), (errno.EPERM, 3)],
)
def test_a_file_that_cannot_be_written_gets_one_line(capsys, code, file):
    def main():
        raise OSError(code, os.strerror(code), file)

    with pytest.raises(SystemExit) as raised:
        command_line(main)()
    printed = capsys.readouterr().err
    assert raised.value.code == 2 and printed.startswith(f"error: {os.strerror(code)}") and printed.count("\n") == 1
    assert ("(/results/a.json)" in printed) == (file not in (None, 3))


@pytest.fixture
def nameless(monkeypatch):
    """Let the process run as a user id without a name, as in `docker run --user 10043`."""

    def refuse(uid: int):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", refuse)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "set, so that it is restored")
        monkeypatch.delenv(name)


def test_a_user_without_a_name_is_called_by_the_number(nameless):
    names = []
    command_line(lambda: names.append(os.environ["USER"]))()
    assert names == [str(os.getuid())]


def test_a_user_without_a_home_gets_a_sentence(nameless, monkeypatch, capsys):
    monkeypatch.delenv("HOME")
    with pytest.raises(SystemExit):
        command_line(lambda: None)()
    assert capsys.readouterr().err == (
        "error: HOME is not set, and this user has no home folder. Set HOME to a writable folder\n"
    )


def test_an_input_error_prints_one_line_and_exits_with_2(capsys):
    @command_line
    def main():
        raise InputError("rows.jsonl, line 3: no\n\x1b[2Jerror: ä")

    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: rows.jsonl, line 3: no\\n\\x1b[2Jerror: ä\n"


def test_other_exceptions_keep_their_traceback():
    @command_line
    def main():
        raise KeyError("defect")

    with pytest.raises(KeyError):
        main()
