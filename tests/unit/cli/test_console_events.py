"""Order of the console's lines, for any order of Snakemake's events."""

import logging

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from dj2mgm.cli.console import INTERRUPTED_MESSAGE, Console, Lines

STOPPED = ["interrupted; the same command continues", "train small: stopped after 0.0 s"]


@pytest.fixture
def console():
    """Console of a run with one job."""
    console = Console(lambda rule: False, Lines())
    console.emit(new_record(LogEvent.JOB_INFO, "", jobid=1, output=["model"], shellcmd="train"))
    yield console
    console.close()


def new_record(event: LogEvent | None, message: str, **fields) -> logging.LogRecord:
    """Return an event of the job `train small`, as Snakemake logs it."""
    record = logging.makeLogRecord({"levelno": logging.INFO, "msg": message, "event": event, **fields})
    record.rule_name, record.wildcards, record.log, record.aux = "train", {"dataset": "small"}, [], {}
    return record


@pytest.mark.parametrize("error_is_first", [True, False])
def test_interrupted_jobs_are_stopped_in_any_order(console, capsys, error_is_first):
    events = [
        new_record(LogEvent.JOB_ERROR, "", jobid=1),
        new_record(None, f"{INTERRUPTED_MESSAGE}, this might take some time."),
    ]
    for record in events if error_is_first else reversed(events):
        console.emit(record)
    console.emit(new_record(None, "Complete log(s): snakemake.log"))
    assert capsys.readouterr().err.splitlines() == STOPPED


def test_failed_job_is_shown_before_the_path_of_the_log(console, capsys):
    console.emit(new_record(LogEvent.JOB_ERROR, "", jobid=1))
    console.emit(new_record(None, "Complete log(s): snakemake.log"))
    assert capsys.readouterr().err.splitlines() == [
        "train small: failed after 0.0 s",
        "Complete log(s): snakemake.log",
    ]


def test_failed_job_is_shown_at_the_end(console, capsys):
    console.emit(new_record(LogEvent.JOB_ERROR, "", jobid=1))
    console.close()
    assert capsys.readouterr().err == "train small: failed after 0.0 s\n"
