"""Order of the console's lines, for any order of Snakemake's events, and the patches of the installed Snakemake."""

import logging
from types import SimpleNamespace

import pytest
from snakemake.cli import get_argument_parser
from snakemake.exceptions import WorkflowError
from snakemake.rules import Rule
from snakemake.scheduling.job_scheduler import JobRateLimiter, JobScheduler
from snakemake.settings.types import MaxJobsPerTimespan
from snakemake.workflow import Workflow
from snakemake_interface_logger_plugins.common import LogEvent

from dj2mgm.cli import console as console_module
from dj2mgm.cli.console import (
    INTERRUPTED_MESSAGE,
    Console,
    Job,
    Lines,
    UserError,
    lift_default_job_limit,
    record_input_errors,
    replace_graph_builder,
)
from dj2mgm.errors import InputError

STAGE = 'train 2>&1 | tee train.log 3> /dev/null >&"${STAGE_OUTPUT:-3}"'
STOPPED = ["interrupted; the same command continues", "train small: stopped after 0.0 s"]


@pytest.fixture
def console():
    """Console of a run with one job."""
    console = Console(lambda rule: False, Lines())
    console.emit(new_record(LogEvent.JOB_INFO, "", jobid=1, output=["model"], shellcmd=STAGE))
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


def test_progress_is_not_shown_after_an_interruption(console, monkeypatch):
    console.emit(new_record(None, f"{INTERRUPTED_MESSAGE}, this might take some time."))
    updates = []
    monkeypatch.setattr(console.screen, "update", lambda *arguments: updates.append(arguments))
    console._update()
    console.emit(new_record(LogEvent.JOB_ERROR, "", jobid=1))
    assert updates == []


def test_failed_job_is_shown_before_the_path_of_the_log(console, capsys):
    console.emit(new_record(LogEvent.JOB_ERROR, "", jobid=1))
    console.emit(new_record(None, "Complete log(s): snakemake.log"))
    assert capsys.readouterr().err.splitlines() == [
        "train small: failed after 0.0 s",
        "Complete log(s): snakemake.log",
    ]


def test_the_log_of_a_failed_job_is_the_only_one(console, capsys, tmp_path):
    (tmp_path / "train.log").write_text("error: a mistake\n")
    record = new_record(LogEvent.JOB_ERROR, "", jobid=1)
    record.log = [str(tmp_path / "train.log")]
    console.emit(record)
    console.emit(new_record(None, "Complete log(s): snakemake.log"))
    console.close()
    assert capsys.readouterr().err.lower().count("complete log") == 1


def test_a_graceful_end_is_announced(console, capsys):
    console.emit(new_record(None, "Will exit after finishing currently running jobs (scheduler)."))
    assert capsys.readouterr().err == "stopping when the running stages end; the same command continues\n"


REFUSED = "SLURM sbatch failed. The error message was 'sbatch: error: invalid partition: gpuu\nsbatch: error: no'.\n"
CALL = "    sbatch call:\n        sbatch --wrap=python -m snakemake --config base64//AAAA\n"
ADVICE = "For further error details see the cluster/cloud log and the log files of the involved rule(s)."


def fail(console, message: str | None, log=()) -> None:
    record = new_record(LogEvent.JOB_ERROR, "", jobid=1, rule_msg=message)
    record.log = list(log)
    console.emit(record)


def test_a_pipe_shows_running_stages_with_their_activity_and_its_time(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(console_module, "BETWEEN_LINES_S", 0.0)
    monkeypatch.setattr(console_module, "format_duration", lambda seconds: "31 s")
    console, log = Console(lambda rule: True, Lines()), tmp_path / "train.log"
    record = new_record(LogEvent.JOB_INFO, "", jobid=1, output=["model"], shellcmd=STAGE)
    record.log = [str(log)]
    console.emit(record)
    for number, line in enumerate(("", "progress: compiling cpu_adam …\n", "progress: 1 of 9 steps, loss 2.1\n")):
        log.write_text(log.read_text() + line if number else line)
        console._update()
    console.close()
    lines = [line.removeprefix("[1/1] train small: ") for line in capsys.readouterr().err.splitlines()]
    old = "1 of 9 steps, loss 2.1 (31 s ago)"
    assert list(dict.fromkeys(lines[1:])) == ["running … 31 s", "compiling cpu_adam … 31 s", old]


def test_a_job_that_is_not_a_stage_begins_with_its_message(console, capsys):
    console.emit(new_record(LogEvent.JOB_INFO, "", jobid=2, output=["plan"], shellcmd="plan", rule_msg="tracing"))
    assert capsys.readouterr().err == "train small: tracing\n"


def test_the_executors_reason_is_shown_without_the_command(console, capsys):
    fail(console, REFUSED + CALL + ADVICE)
    console.close()
    assert capsys.readouterr().err.splitlines() == [
        "train small: failed after 0.0 s",
        "SLURM sbatch failed. The error message was 'sbatch: error: invalid partition: gpuu",
        "sbatch: error: no'.",
    ]


def test_a_check_that_found_something_did_not_crash(console, capsys, tmp_path):
    log = tmp_path / "doctor.log"
    log.write_text("error: not ready: disk. The remedies are above, after each →\n")
    fail(console, None, log=[log])
    console.close()
    assert capsys.readouterr().err.splitlines()[0] == "train small: ended with an error after 0.0 s"


def test_attempts_keep_their_number_and_repeat_no_reason(capsys, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("error: no more memory\n")
    console = Console(lambda rule: True, Lines())
    console.emit(new_record(LogEvent.RUN_INFO, "", stats={"train": 1, "all": 3}))
    for message in (REFUSED, REFUSED, "SLURM-job '7' failed, SLURM status is: 'TIMEOUT'."):
        console.emit(new_record(LogEvent.JOB_INFO, "", jobid=1, output=["model"], shellcmd="train"))
        fail(console, message + ADVICE, [str(log)])
        console.emit(new_record(None, "Trying to restart job 1."))
    console.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        "[1/4] train small",
        "[1/4] train small: failed after 0.0 s",
        "[1/4] train small (attempt 2)",
        "[1/4] train small (attempt 2): failed after 0.0 s, for the same reason as [1/4] train small",
        "[1/4] train small (attempt 3)",
        "[1/4] train small (attempt 3): failed after 0.0 s",
    ]
    assert "SLURM-job '7' failed, SLURM status is: 'TIMEOUT'." in lines
    assert lines.count("error: no more memory") == 2 and "restart" not in " ".join(lines)


def test_a_stage_without_any_output_was_killed(capsys, tmp_path):
    console = Console(lambda rule: False, Lines())
    record = new_record(LogEvent.JOB_INFO, "", jobid=1, output=["model"], shellcmd=STAGE)
    record.log = [str(tmp_path / "missing.log")]
    console.emit(record)
    fail(console, None, record.log)
    console.close()
    assert "It ended without an error message, so it was killed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "shown"), [("", []), (' 3> /dev/null >&"${STAGE_OUTPUT:-3}"', ["train small: note: x"])]
)
def test_a_command_that_prints_its_output_is_not_repeated(capsys, tmp_path, output, shown):
    console, log = Console(lambda rule: False, Lines()), tmp_path / "train.log"
    record = new_record(LogEvent.JOB_INFO, "", jobid=1, output=["model"], shellcmd=f"train 2>&1 | tee {log}{output}")
    record.log = [str(log)]
    console.emit(record)
    log.write_text("note: x\n")
    console.emit(new_record(LogEvent.JOB_FINISHED, "", job_id=1))
    console.close()
    assert capsys.readouterr().err.splitlines() == shown


@pytest.mark.parametrize(
    ("wildcards", "shown"),
    [
        ({"run": "photos/qwen/baseline"}, "train baseline"),
        ({"run": "photos/qwen/baseline/seed-1"}, "train baseline/seed-1"),
        ({"page": "photos/qwen/mine/report"}, "train mine/report"),
        ({"dataset": "photos"}, "train photos"),
    ],
)
def test_jobs_are_named_without_dataset_and_model(wildcards, shown):
    record = new_record(LogEvent.JOB_INFO, "", jobid=1, output=["model"], shellcmd="train")
    record.wildcards = wildcards
    assert Job(record, None).name == shown


def test_the_default_limit_of_jobs_is_lifted():
    default = get_argument_parser().get_default("max_jobs_per_timespan")
    scheduler = SimpleNamespace(job_rate_limiter=JobRateLimiter(MaxJobsPerTimespan.parse_choice(str(default))))
    lift_default_job_limit(scheduler)
    assert scheduler.job_rate_limiter is None
    lift_default_job_limit(scheduler)
    assert scheduler.job_rate_limiter is None


@pytest.mark.parametrize("limit", ["10/1s", "100/1m"])
def test_a_limit_of_the_user_stays(limit):
    limiter = JobRateLimiter(MaxJobsPerTimespan.parse_choice(limit))
    scheduler = SimpleNamespace(job_rate_limiter=limiter)
    lift_default_job_limit(scheduler)
    assert scheduler.job_rate_limiter is limiter


def test_snakemake_calls_the_replaced_builder_with_its_own():
    calls = []
    assert callable(Workflow._build_dag) and callable(JobScheduler._schedule_reevalutation), "Snakemake still has them"
    workflow = SimpleNamespace(_build_dag=lambda: calls.append("own"))
    replace_graph_builder(workflow, lambda build: (calls.append("before"), build(), calls.append("after")))
    workflow._build_dag()
    assert calls == ["before", "own", "after"]


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (InputError("a.yaml: wrong"), (UserError, "a.yaml: wrong")),
        (FileExistsError(17, "File exists"), (WorkflowError, "Input function failed")),
    ],
)
def test_a_failure_of_an_input_function_is_recorded_without_a_wrapper(monkeypatch, error, recorded):
    """An error without a remedy for the user keeps Snakemake's wrapper, which has the traceback."""

    def apply(rule):
        try:
            raise error
        except Exception:
            raise WorkflowError("Input function failed") from None

    monkeypatch.setattr(Rule, "apply_input_function", apply)
    errors = record_input_errors()
    with pytest.raises(WorkflowError):
        Rule.apply_input_function(None)
    assert [(type(found), str(found)) for found in errors] == [recorded]
