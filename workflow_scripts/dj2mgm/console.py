"""What a person sees while Snakemake runs: its stages, how far each is, and what to open at the end.

The console is a handler of Snakemake's log and gets the events that logger plugins get. It is no plugin itself:
Snakemake looks for plugins before it reads the Snakefile, only among installed packages, and refuses a profile that
asks for one that is missing. So rules/runs.smk puts the console in the place of Snakemake's own handler. Snakemake's
whole log stays in .snakemake/log/.

What stages print goes to their logs, also where they run on another machine. The console reads the logs while they
grow, and shows the lines that stages mark for it (messages.py).
"""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent

from dj2mgm.messages import NOTE, PROGRESS, WARNING, format_duration

POLL_S = 1.0
BETWEEN_LINES_S = 30.0  # where progress cannot be overwritten, in a pipe
LAST_LINES = 10
DIAGNOSIS, MISTAKE = re.compile(r"^diagnosis: ", re.MULTILINE), re.compile(r"^error: .+", re.MULTILINE)
INTERRUPTED = "Terminating processes on user request"  # by Snakemake, after Ctrl-C
# What Snakemake says at each start, for each job and after a failure: the console says it in its own way, or nobody
# needs it
ROUTINE = re.compile(
    r"Assuming unrestricted shared|Building DAG|Using shell|Provided (cores|resources|remote)|Rules claiming more"
    r"|Conda environments: ignored|Select jobs|Execute \d+ jobs|Elapsed time|Removing (output|temporary)|(None)?$"
    r"|Shutting down|Exiting because|RuleException:\nCalledProcessError|WorkflowError:\nAt least one job did not"
)


class UserError(WorkflowError):
    """A mistake in the input: Snakemake prints its sentence, and no traceback of the workflow's code."""

    # Snakemake prints the frames that it finds here
    __traceback__ = property(lambda self: None, lambda self, _: None)


def attach(settings, is_stage: Callable[[str], bool]) -> bool:
    """Put the console in the place of Snakemake's own handler; return whether it was.

    Snakemake's handler stays in a dry run, with --verbose or --quiet, and beside a logger plugin for the terminal.

    Args:
        settings: the workflow's output settings.
        is_stage: whether a rule, given by its name, is a stage.
    """
    own = [handler for handler in logger.handlers if handler.name == "DefaultStreamHandler"]
    if settings.dryrun or settings.verbose or settings.quiet or not own:
        return False
    for handler in own:
        logger.removeHandler(handler)
    logger.addHandler(Console(is_stage, LiveLines() if sys.stderr.isatty() else Lines()))
    return True


class LogTail:
    """A stage's log, read while it grows. What an earlier run wrote there does not count."""

    def __init__(self, path: Path):
        self.path = path
        self._earlier = self._state()
        self._offset = 0

    def new_lines(self) -> list[str]:
        """The lines that were completed since the last call."""
        state = self._state()
        if state is None or state == self._earlier:
            return []
        self._earlier = None
        if state[1] < self._offset:  # another attempt began it again
            self._offset = 0
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode("utf-8", errors="replace").splitlines()

    def last_words(self) -> str:
        """Why the stage failed: its diagnosis, its sentence about a mistake in the input, or else its last lines."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        if diagnoses := list(DIAGNOSIS.finditer(text)):
            return text[diagnoses[-1].start() :].rstrip()
        if mistake := MISTAKE.search(text):
            return mistake[0]
        return "\n".join(text.splitlines()[-LAST_LINES:])

    def _state(self) -> tuple[int, int, int] | None:
        try:
            state = os.stat(self.path)
        except FileNotFoundError:
            return None
        return state.st_ino, state.st_size, state.st_mtime_ns


class Job:
    """A job that runs. Only a stage has a number."""

    def __init__(self, record: logging.LogRecord, number: str | None):
        wildcards = dict(getattr(record, "wildcards", None) or {})  # an error has none
        self.name = " ".join([record.rule_name, *map(str, wildcards.values())])
        self.number = number
        self.logs = [LogTail(Path(path)) for path in record.log]
        self.inputs = [str(path) for path in getattr(record, "input", ())]
        self.is_target = not (record.output or record.log or record.shellcmd)
        self.started = time.monotonic()
        self.progress = ""
        self.shown = self.started  # when a line about it was last printed

    @property
    def title(self) -> str:
        return f"{self.number} {self.name}" if self.number else self.name

    @property
    def time(self) -> str:
        return format_duration(time.monotonic() - self.started)


class Console(logging.Handler):
    """Snakemake's events as lines of a screen."""

    def __init__(self, is_stage: Callable[[str], bool], screen: "Lines"):
        super().__init__()
        self.is_stage = is_stage
        self.screen = screen
        self.started = time.monotonic()
        self.jobs: dict[int, Job] = {}
        self.stages_begun = self.stages = 0
        self.failed = self.interrupted = False
        self.last_message = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        events = {
            LogEvent.RUN_INFO: self._run_info,
            LogEvent.JOB_INFO: self._job_info,
            LogEvent.JOB_FINISHED: self._job_finished,
            LogEvent.JOB_ERROR: self._job_error,
            LogEvent.ERROR: self._message,
            None: self._message,
        }
        try:
            event = getattr(record, "event", None)
            unknown = self._message if record.levelno >= logging.ERROR else None
            if handle := events.get(event, unknown):
                handle(record)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()  # else it may still run while Python ends, and print a traceback
        with self.lock:
            self.screen.close()
        super().close()

    def _poll(self) -> None:
        while not self._closed.wait(POLL_S):
            if not self.lock.acquire(timeout=POLL_S):  # logging closes its handlers under their locks
                continue
            try:
                with suppress(OSError):  # a log may vanish while it is read
                    self._update()
            finally:
                self.lock.release()

    def _update(self) -> None:
        for job in self.jobs.values():
            for line in (line for log in job.logs for line in log.new_lines()):
                self.screen.read(job, line)
        self.screen.update([job for job in self.jobs.values() if job.number])

    def _run_info(self, record: logging.LogRecord) -> None:
        self.stages = sum(count for rule, count in record.stats.items() if self.is_stage(rule))

    def _job_info(self, record: logging.LogRecord) -> None:
        number = None
        if self.is_stage(record.rule_name):
            self.stages_begun += 1
            self.stages = max(self.stages, self.stages_begun)  # an attempt that failed counts once more
            number = f"[{self.stages_begun}/{self.stages}]"
        self.jobs[record.jobid] = job = Job(record, number)
        if number:
            self.screen.begin(job)

    def _job_finished(self, record: logging.LogRecord) -> None:
        self._update()
        job = self.jobs.pop(record.job_id)
        if job.number:
            self.screen.say(f"{job.title}: done in {job.time}")
        elif job.is_target and job.inputs:
            took = format_duration(time.monotonic() - self.started)
            self.screen.say(f"{job.name}: done in {took}; open {', '.join(job.inputs)}")
        self.screen.update([job for job in self.jobs.values() if job.number])

    def _job_error(self, record: logging.LogRecord) -> None:
        self._update()
        job = self.jobs.pop(record.jobid, None) or Job(record, None)
        if self.interrupted:  # its log holds no reason
            self.screen.say(f"{job.title}: stopped after {job.time}")
            return
        self.failed, self.last_message = True, ""
        self.screen.say(f"{job.title}: failed after {job.time}")
        for name, value in record.aux.items():
            self.screen.say(f"{name}: {value}")
        for path in record.log:
            self.screen.say(f"\n{LogTail(Path(path)).last_words()}\n\nIts whole log: {path}")

    def _message(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(INTERRUPTED):
            self.interrupted, text = True, "interrupted; the same command goes on"
        if text.startswith("Complete log") and not self.failed:
            return
        if record.levelno >= logging.INFO and text != self.last_message and not ROUTINE.match(text):
            self.last_message = text  # some are repeated while Snakemake waits
            self.screen.say(text)


class Lines:
    """Plain lines, for a pipe or the log of a continuous integration."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def begin(self, job: Job) -> None:
        self.say(job.title)

    def read(self, job: Job, line: str) -> None:
        if line.startswith(PROGRESS):
            job.progress = line.removeprefix(PROGRESS)
        elif line.startswith((NOTE, WARNING)):
            self.say(f"{job.title}: {line}")

    def update(self, stages: list[Job]) -> None:
        """Show the newest progress of the stages that run."""
        for job in stages:
            if job.progress and time.monotonic() - job.shown > BETWEEN_LINES_S:
                self.say(f"{job.title}: {job.progress}")
                job.progress, job.shown = "", time.monotonic()

    def close(self) -> None:
        pass


class LiveLines(Lines):
    """A terminal, where the stages that run stand below the finished ones and are updated in place."""

    def __init__(self):
        from rich.console import Console as Terminal
        from rich.live import Live
        from rich.text import Text

        self.terminal = Terminal(stderr=True)
        self.text = Text
        self.new_view = lambda: Live(console=self.terminal, auto_refresh=False, transient=True)
        self.view = None

    def say(self, text: str) -> None:
        self.terminal.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, job: Job) -> None:
        self.update([job])

    def update(self, stages: list[Job]) -> None:
        if not stages:
            self.close()
            return
        if self.view is None:
            self.view = self.new_view()
            self.view.start()
        width = self.terminal.width - 1
        lines = [f"{job.title}: {job.progress or 'running'} ({job.time})" for job in stages]
        self.view.update(self.text("\n".join(line[:width] for line in lines)), refresh=True)

    def close(self) -> None:
        if self.view is not None:
            self.view.stop()
            self.view = None
