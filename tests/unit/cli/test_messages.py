"""Lines that stages mark for the console, and reading them from a growing log."""

import pytest

from dj2mgm.cli import messages
from dj2mgm.cli.console import KILLED, LogTail
from dj2mgm.cli.messages import Progress, note, report_activity, report_progress, warn


@pytest.mark.parametrize(
    ("tell", "line"),
    [
        (lambda: note("resuming from step 20"), "note: resuming from step 20"),
        (lambda: report_activity("loading the model"), "progress: loading the model …"),
        (lambda: warn("GPU 0 is 81% full"), "warning: GPU 0 is 81% full"),
        (
            lambda: report_progress("steps", 20, 135, "loss 0.8039", 157.2),
            "progress: 2 min 37 s left, 20 of 135 steps, loss 0.8039",
        ),
        (
            lambda: report_progress("rows", 3, 3, "9.0 per second", 0),
            "progress: 3 of 3 rows, 9.0 per second",
        ),
    ],
    ids=["note", "activity", "warning", "progress", "end"],
)
def test_each_message_is_one_marked_line(capsys, tell, line):
    tell()
    assert capsys.readouterr() == ("", f"{line}\n")


def test_progress_is_shown_periodically_and_at_the_end(capsys, monkeypatch):
    times = iter([0.0, 4.0, 12.0, 16.0])
    monkeypatch.setattr(messages, "monotonic", lambda: next(times))
    assert list(Progress("captions", 3).follow("abc")) == ["a", "b", "c"]
    assert capsys.readouterr().err == (
        "progress: 6 s left, 2 of 3 captions, 0.2 per second\nprogress: 3 of 3 captions, 0.2 per second\n"
    )
    monkeypatch.setattr(messages, "monotonic", lambda: 0.0)
    assert list(Progress("captions", 3).follow("abc")) == ["a", "b", "c"]
    assert capsys.readouterr().err == "", "a loop of a few seconds is not shown"


def test_a_log_is_read_line_by_line_while_it_grows(tmp_path):
    path = tmp_path / "stage.log"
    log = LogTail(path)
    assert log.read_new_lines() == []
    path.write_text("first\nsec")
    assert log.read_new_lines() == ["first"]
    with open(path, "a") as file:
        file.write("ond\n")
    assert log.read_new_lines() == ["second"] and log.read_new_lines() == []


def test_lines_of_an_earlier_run_are_ignored(tmp_path):
    path = tmp_path / "stage.log"
    path.write_text("progress: 0 s left, 135 of 135 steps\n")
    log = LogTail(path)
    assert log.read_new_lines() == []
    for text in ("new", "b"):
        path.write_text(f"{text}\n")
        assert log.read_new_lines() == [text]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("error: a\nlauncher: b\n", "error: a"),
        ("error: a\n\ndiagnosis: CUDA\n  cause: c\n", "diagnosis: CUDA\n  cause: c"),
        (
            "".join(f"{number}\n" for number in range(20)),
            f"{KILLED}. Its last lines:\n" + "\n".join(map(str, range(10, 20))),
        ),
        ("ValueError: 3\nend\n", "ValueError: 3\nend"),
        (None, ""),
    ],
    ids=["mistake", "diagnosis", "killed", "unexpected error", "no log"],
)
def test_failure_reason_is_taken_from_the_log(tmp_path, text, words):
    path = tmp_path / "stage.log"
    if text is not None:
        path.write_text(text)
    assert LogTail(path).find_failure_reason() == words
