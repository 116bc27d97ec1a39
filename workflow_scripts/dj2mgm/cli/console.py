"""Console with the stages of a Snakemake run, their progress, and the final report, and patches of Snakemake.

The console is a handler of Snakemake's log and receives the events of logger plugins. It is not a plugin itself:
Snakemake looks for plugins before it reads the Snakefile, only among installed packages, and rejects a profile that
names a missing one. So rules/lifecycle.smk replaces Snakemake's own handler by the console. Snakemake's complete log is
in .snakemake/log/.

Stages print into their logs, also on other machines. The console reads the logs while they grow, and shows the marked
lines (messages.py).

Patches (tested with Snakemake 9.27.1), which rules/graph.smk and rules/lifecycle.smk apply. Nothing changes on import.

- `replace_graph_builder` replaces `snakemake.workflow.Workflow._build_dag`. Snakemake has no hook between
  the graph and the first job that dry runs call, too; they do not call `onstart`. An issue requests one
  (https://github.com/snakemake/snakemake/issues/3967).
- `record_input_errors` replaces `snakemake.rules.Rule.apply_input_function`. If an input function fails, Snakemake
  drops the job, silently if a file further on exists, also with `--strict-dag-evaluation`. No upstream issue was found.
- `lift_default_job_limit` removes the limit of jobs per second of `snakemake.scheduling.job_scheduler.JobScheduler`,
  whose checks keep a core busy. No upstream issue was found.

training/library_patches names the modules with patches of other libraries.
"""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.rules import Rule
from snakemake_interface_logger_plugins.common import LogEvent

from dj2mgm.cli.command_line import describe_system_error, escape_control
from dj2mgm.cli.messages import NOTE, PROGRESS, WARNING, format_duration
from dj2mgm.errors import InputError

POLL_S = 1.0
INTERRUPTION_S = 1.0  # Ctrl-C also ends the jobs, and Snakemake may report their errors before the interruption
BETWEEN_LINES_S = 30.0  # pause between lines of progress that cannot be overwritten, as in a pipe
LAST_LINES = 10
SILENCING = "STAGE_OUTPUT"  # in commands whose output is only in their log; others print it themselves
MAX_LINE_LENGTH = 500  # characters shown of a line of a scheduler's message
# parts of an executor's message that explain nothing: the submitted command, and Snakemake's general advice
UNEXPLAINING = re.compile(r"\n\s*sbatch call:.*|For further error details see the cluster/cloud\b[^\n]*", re.DOTALL)
KILLED = (
    "It ended without an error message, so it was killed: by `kill`, by a limit of the scheduler (ask it about the "
    "job), or by the kernel if memory ran out (`sudo dmesg -T | grep -i 'killed process'`). The same command continues"
)
DONE, FAILED, STOPPED, WARNED = "green", "bold red", "yellow", "yellow"  # colors in a terminal
DIAGNOSIS, MISTAKE = re.compile(r"^diagnosis: ", re.MULTILINE), re.compile(r"^error: .+", re.MULTILINE)
FAILURE = re.compile(r"Traceback|\b\w*(?:error|exception)\b|\bfatal\b", re.IGNORECASE)
INTERRUPTED_MESSAGE = "Terminating processes on user request"  # Snakemake's message after Ctrl-C
STOPPING_MESSAGE = "Will exit after finishing currently running jobs"  # Snakemake's message after SIGTERM
# Snakemake's messages at each start, for each job and after a failure, which the console replaces or omits
ROUTINE_LINE = re.compile(
    r"Assuming unrestricted shared|Building DAG|Using shell|Provided (cores|resources|remote)|Rules claiming more"
    r"|Conda environments: ignored|Select jobs|Execute \d+ jobs|Elapsed time|Removing (output|temporary)|(None)?$"
    r"|Shutting down|Exiting because|Trying to restart job|RuleException:\nCalledProcessError"
    r"|WorkflowError:\nAt least one job did not"
)


class UserError(WorkflowError):
    """Mistake in the input; Snakemake prints its sentence without a traceback."""

    # hide the traceback, whose frames Snakemake would print
    __traceback__ = property(lambda self: None, lambda self, _: None)


UserError.__name__ = "Error"  # Snakemake prints the name of the class above the sentence


def attach(settings, is_stage: Callable[[str], bool]) -> bool:
    """Replace Snakemake's own handler by the console; return whether it was replaced.

    Snakemake's handler stays with --verbose or --quiet, and with a logger plugin for the terminal. It also stays in a
    dry run, but shows no list of jobs, so that the summary (runs/command_messages.py) can be seen.

    Args:
        is_stage: function that tells whether the rule of a name is a stage.
    """
    own_handlers = [handler for handler in logger.handlers if handler.name == "DefaultStreamHandler"]
    if settings.verbose or settings.quiet or not own_handlers:
        return False
    if settings.dryrun:
        for handler in own_handlers:
            handler.addFilter(_is_shown_in_dry_run)
        return False
    for handler in own_handlers:
        logger.removeHandler(handler)
    logger.addHandler(Console(is_stage, LiveLines() if sys.stderr.isatty() else Lines()))
    return True


def _is_shown_in_dry_run(record: logging.LogRecord) -> bool:
    """Return whether a record is a warning, an error, or states that nothing would run."""
    return record.levelno >= logging.WARNING or record.getMessage().startswith("Nothing to be done")


class LogTail:
    """Log of a stage, read while it grows; lines of earlier runs are skipped."""

    def __init__(self, path: Path):
        self.path = path
        self._initial_state = self._read_state()
        self._offset = 0

    def read_new_lines(self) -> list[str]:
        """Return the lines completed since the last call."""
        state = self._read_state()
        if state is None or state == self._initial_state:
            return []
        self._initial_state = None
        if state[1] < self._offset:  # another attempt started the log again
            self._offset = 0
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode("utf-8", errors="replace").splitlines()

    def find_failure_reason(self) -> str:
        """Return the diagnosis, else the sentence about a mistake in the input, else the last lines.

        A stage whose shell was killed has no diagnosis.
        """
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        if diagnoses := list(DIAGNOSIS.finditer(text)):
            return text[diagnoses[-1].start() :].rstrip()
        if mistake := MISTAKE.search(text):
            return mistake[0]
        last_lines = "\n".join(text.splitlines()[-LAST_LINES:])
        if FAILURE.search(last_lines) or not last_lines:
            return last_lines
        return f"{KILLED}. Its last lines:\n{last_lines}"

    def _read_state(self) -> tuple[int, int, int] | None:
        try:
            state = os.stat(self.path)
        except FileNotFoundError:
            return None
        return state.st_ino, state.st_size, state.st_mtime_ns


class Job:
    """Running job; only a stage has a number, which further attempts at the same job keep."""

    def __init__(self, record: logging.LogRecord, number: str | None, attempt: int = 1):
        wildcards = dict(getattr(record, "wildcards", None) or {})  # missing in errors
        self.name = " ".join([record.rule_name, *filter(None, map(_shorten, wildcards, wildcards.values()))])
        self.number = number
        self.attempt = attempt
        self.logs = [LogTail(Path(path)) for path in record.log] if SILENCING in (record.shellcmd or SILENCING) else []
        self.inputs = [str(path) for path in getattr(record, "input", ())]
        self.is_target = not (record.output or record.log or record.shellcmd)
        self.started = time.monotonic()
        self.ended: float | None = None
        self.progress = "running …"
        self.progress_at = self.printed_at = self.started  # times of the last read and the last printed line

    @property
    def title(self) -> str:
        title = f"{self.number} {self.name}" if self.number else self.name
        return title if self.attempt == 1 else f"{title} (attempt {self.attempt})"

    @property
    def elapsed(self) -> str:
        return format_duration((self.ended or time.monotonic()) - self.started)

    @property
    def state(self) -> str:
        """The last line of progress; an activity has its time, such as "running … 12 s", and an old line its age."""
        age = time.monotonic() - self.progress_at
        if self.progress.endswith("…"):
            return f"{self.progress} {format_duration(age)}"
        return f"{self.progress} ({format_duration(age)} ago)" if age > BETWEEN_LINES_S else self.progress


def _shorten(wildcard: str, value: object) -> str:
    """Return the value of a wildcard without the folders of dataset and model, which all jobs of a command share."""
    parts = str(value).split("/")
    if wildcard == "run":
        return "/".join(parts[-2:] if re.fullmatch(r"seed-\d+", parts[-1]) else parts[-1:])
    return "/".join(parts[2:]) if wildcard == "page" else str(value).strip("/")


def read_executor_reason(record: logging.LogRecord) -> str:
    """Return what the executor or its scheduler states about a failed job; empty if it states nothing."""
    text = UNEXPLAINING.sub("", getattr(record, "rule_msg", None) or "")
    lines = [escape_control(line.strip())[:MAX_LINE_LENGTH] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:LAST_LINES])


class Console(logging.Handler):
    """Handler that shows Snakemake's events as lines."""

    def __init__(self, is_stage: Callable[[str], bool], screen: "Lines"):
        super().__init__()
        self.is_stage = is_stage
        self.screen = screen
        self.started = time.monotonic()
        self.jobs: dict[int, Job] = {}
        self.ended_jobs: list[tuple[Job, logging.LogRecord]] = []  # with an error, not shown yet
        self.failed_jobs: dict[int, Job] = {}  # the last failed attempt, by number of the job
        self.shown_reasons: dict[str, str] = {}  # titles of the first failed jobs, by reason
        self.stages_begun = self.stages_done = self.stages = 0
        self.failed = self.interrupted = False
        self.names_log = False  # of a failed job; that of Snakemake is not needed then
        self.last_message = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Show an event of Snakemake; an error while showing it never ends the run."""
        events = {
            LogEvent.RUN_INFO: self._read_run_info,
            LogEvent.JOB_INFO: self._show_job_info,
            LogEvent.JOB_FINISHED: self._show_finished_job,
            LogEvent.JOB_ERROR: self._show_job_error,
            LogEvent.ERROR: self._show_message,
            None: self._show_message,
        }
        try:
            event = getattr(record, "event", None)
            fallback = self._show_message if record.levelno >= logging.ERROR else None
            if handle := events.get(event, fallback):
                handle(record)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()  # otherwise it may print a traceback while Python ends
        with self.lock:
            self._show_ended_jobs()
            self.screen.close()
        super().close()

    def _poll(self) -> None:
        while not self._ending.wait(POLL_S):
            if not self.lock.acquire(timeout=POLL_S):  # logging closes handlers while holding their locks
                continue
            try:
                with suppress(OSError):  # a log may be deleted while it is read
                    self._update()
                self._show_ended_jobs(least_age=INTERRUPTION_S)
            finally:
                self.lock.release()

    def _update(self) -> None:
        for job in self.jobs.values():
            for line in (line for log in job.logs for line in log.read_new_lines()):
                self.screen.show_log_line(job, line)
        self._show_running()

    def _show_running(self) -> None:
        if self.interrupted:  # otherwise a terminal would show the same progress below each message
            return
        running = [job for job in self.jobs.values() if job.number]
        self.screen.update(running, f"{self.stages_done} of {self.stages} stages done, {self.elapsed} so far")

    @property
    def elapsed(self) -> str:
        return format_duration(time.monotonic() - self.started)

    def _read_run_info(self, record: logging.LogRecord) -> None:
        self.stages = sum(count for rule, count in record.stats.items() if self.is_stage(rule))

    def _show_job_info(self, record: logging.LogRecord) -> None:
        self._show_ended_jobs()
        number, attempt = None, 1
        if failed_job := self.failed_jobs.get(record.jobid):
            number, attempt = failed_job.number, failed_job.attempt + 1
        elif self.is_stage(record.rule_name):
            self.stages_begun += 1
            self.stages = max(self.stages, self.stages_begun)
            number = f"[{self.stages_begun}/{self.stages}]"
        self.jobs[record.jobid] = job = Job(record, number, attempt)
        if number:
            self.screen.begin(job)
            self._show_running()
        elif message := getattr(record, "rule_msg", None):
            self.screen.say(f"{job.title}: {message}")

    def _show_finished_job(self, record: logging.LogRecord) -> None:
        self._update()
        job = self.jobs.pop(record.job_id)
        if job.number:
            self.stages_done += 1
            self.screen.say(f"{job.title}: done in {job.elapsed}", DONE)
        elif job.is_target and job.inputs:
            pages = [file for file in job.inputs if file.endswith(".html")] or job.inputs
            self.screen.say(f"{job.name}: done in {self.elapsed}; open {', '.join(pages)}", f"bold {DONE}")
        self._show_running()

    def _show_job_error(self, record: logging.LogRecord) -> None:
        self._update()
        job = self.jobs.pop(record.jobid, None) or Job(record, None)
        self.failed_jobs[record.jobid] = job
        job.ended = time.monotonic()
        self.ended_jobs.append((job, record))
        if self.interrupted:
            self._show_ended_jobs()

    def _show_ended_jobs(self, least_age: float = 0.0) -> None:
        """Show jobs that ended with an error at least `least_age` seconds ago as stopped or failed."""
        while self.ended_jobs and time.monotonic() - self.ended_jobs[0][0].ended >= least_age:
            job, record = self.ended_jobs.pop(0)
            if self.interrupted:  # the log contains no cause of an interruption
                self.screen.say(f"{job.title}: stopped after {job.elapsed}", STOPPED)
            else:
                self._show_failure(job, record)

    def _show_failure(self, job: Job, record: logging.LogRecord) -> None:
        """Show the reasons that the executor and the stage's log give, unless they are those of an earlier failure."""
        self.failed, self.last_message = True, ""
        reasons = [read_executor_reason(record)]
        for path in record.log:
            if reason := LogTail(Path(path)).find_failure_reason():
                reasons.append(f"\n{reason}\n\nIts complete log: {path}")
                self.names_log = True
        text = "\n".join(filter(None, reasons)) or (f"{KILLED}." if job.logs else "")
        if text in self.shown_reasons:
            earlier = self.shown_reasons[text]
            self.screen.say(f"{job.title}: failed after {job.elapsed}, for the same reason as {earlier}", FAILED)
            return
        if text:
            self.shown_reasons[text] = job.title
        is_finding = not job.number and MISTAKE.match(text.lstrip())  # of a check, which is not a stage
        end = "ended with an error" if is_finding else "failed"
        self.screen.say(f"{job.title}: {end} after {job.elapsed}", FAILED)
        for name, value in record.aux.items():
            self.screen.say(f"{name}: {value}")
        if text:
            self.screen.say(text)

    def _show_message(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(INTERRUPTED_MESSAGE):
            self.interrupted = True
            self.screen.close()
            self.screen.say("interrupted; the same command continues", STOPPED)
            self._show_ended_jobs()
        elif record.levelno >= logging.INFO and text != self.last_message and not ROUTINE_LINE.match(text):
            self._show_ended_jobs()
            if text.startswith("Complete log") and (not self.failed or self.names_log):
                return
            if text.startswith(STOPPING_MESSAGE):
                text = "stopping when the running stages end; the same command continues"
            self.last_message = text  # Snakemake repeats some while it waits
            self.screen.say(text, STOPPED if self.interrupted else "")


class Lines:
    """Plain lines, for a pipe or the log of a CI job."""

    def say(self, text: str, style: str = "") -> None:
        """Print a line; `style` is a style of rich, which only a terminal shows."""
        print(text, file=sys.stderr, flush=True)

    def begin(self, job: Job) -> None:
        self.say(job.title)

    def show_log_line(self, job: Job, line: str) -> None:
        if line.startswith(PROGRESS):
            job.progress, job.progress_at = line.removeprefix(PROGRESS), time.monotonic()
        elif line.startswith((NOTE, WARNING)):
            self.say(f"{job.title}: {line}", WARNED if line.startswith(WARNING) else "")

    def update(self, stages: list[Job], total: str) -> None:
        """Show the latest progress of the running stages; `total` is the progress of the run."""
        for job in stages:
            if time.monotonic() - job.printed_at > BETWEEN_LINES_S:
                self.say(f"{job.title}: {job.state}")
                job.printed_at = time.monotonic()

    def close(self) -> None:
        pass


class LiveLines(Lines):
    """Terminal with the running stages and the total below the finished stages, updated in place."""

    def __init__(self):
        from rich.console import Console as Terminal
        from rich.live import Live
        from rich.text import Text

        self.terminal = Terminal(stderr=True)
        # longer lines would wrap, and could not be updated in place
        self.new_text = lambda text: Text(text, no_wrap=True, overflow="ellipsis")
        self.new_view = lambda: Live(console=self.terminal, auto_refresh=False, transient=True)
        self.view = None

    def say(self, text: str, style: str = "") -> None:
        self.terminal.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)

    def begin(self, job: Job) -> None:
        pass  # the next update shows it

    def update(self, stages: list[Job], total: str) -> None:
        if not stages:
            self.close()
            return
        if self.view is None:
            self.view = self.new_view()
            self.view.start()
        lines = [f"{job.title}: {job.state}" for job in stages]
        self.view.update(self.new_text("\n".join([*lines, total])), refresh=True)

    def close(self) -> None:
        view, self.view = self.view, None
        if view is not None:
            try:
                view.stop()
            except IndexError:  # Ctrl-C came during its start
                self.terminal.show_cursor(True)


def replace_graph_builder(workflow, build: Callable[[Callable[[], None]], None]) -> None:
    """Make Snakemake call `build(original_builder)` to build its graph of jobs."""
    workflow._build_dag = partial(build, workflow._build_dag)


def build_user_error(error: InputError | OSError) -> UserError | None:
    """Return the error that Snakemake prints without a traceback; None for an OSError without a remedy."""
    lines = [describe_system_error(error)] if isinstance(error, OSError) else error.lines
    return UserError("\n".join(map(escape_control, lines))) if any(lines) else None


@contextmanager
def raising_user_errors() -> Iterator[None]:
    """Raise an InputError, or an OSError with a remedy, as a UserError, which Snakemake prints without a traceback."""
    try:
        yield
    except (InputError, OSError) as error:
        if user_error := build_user_error(error):
            raise user_error from None
        raise


def record_input_errors() -> list[Exception]:
    """Return a list to which every later failure of an input or params function is added, without Snakemake's wrapper.

    An InputError, or an OSError with a remedy, is added as a UserError.
    """
    errors: list[Exception] = []
    apply = Rule.apply_input_function

    @wraps(apply)
    def apply_and_record(*args, **options):
        try:
            return apply(*args, **options)
        except WorkflowError as error:  # its context is read here, because Snakemake raises it again elsewhere
            cause = error.__context__
            if isinstance(cause, InputError | OSError):
                cause = build_user_error(cause)
            errors.append(cause if isinstance(cause, WorkflowError) else error)
            raise

    Rule.apply_input_function = apply_and_record
    return errors


def lift_default_job_limit(scheduler) -> None:
    """Lift Snakemake's default limit of 100 jobs per second.

    With this limit, Snakemake 9 examines all ready jobs again each second, once for every job that has ended
    (`JobScheduler._schedule_reevalutation`). After some hundred jobs this takes a whole core.
    """
    limit = scheduler.job_rate_limiter
    if limit and (limit.max_jobs, limit.timespan) == (100, 1):
        scheduler.job_rate_limiter = None
