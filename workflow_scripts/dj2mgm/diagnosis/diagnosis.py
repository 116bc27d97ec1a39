"""From a log to cause, evidence and remedy: the first cause that is known, or that none is."""

import re
import textwrap
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dj2mgm.diagnosis.signature import HEADING, Evidence, Explanation, Signature, StageLog
from dj2mgm.diagnosis.signatures import SIGNATURES

GUIDE = "docs/troubleshooting.md"
STATED = re.compile(r"^error: .+", re.MULTILINE)  # command_line's one sentence for a user's mistake
FAILURE = re.compile(r"Traceback|\b\w*(?:error|exception)\b|\bfatal\b|\bkilled\b|^exit status [1-9]", re.I | re.M)
STILL = (
    "wait if the stage is running (`python workflow_scripts/watch.py`). If it is not, it was ended from outside before "
    "it could say so: run the same command again"
)
LONGEST_EVIDENCE = 400
LAST_LINES = 8
WIDTH = 110
REMEDY_OF_UNKNOWN = (
    "read the log upwards from its end to the first error; `python workflow_scripts/doctor.py` checks this machine; "
    f"{GUIDE} says where else to look"
)


@dataclass(frozen=True)
class Diagnosis:
    signature: Signature
    explanation: Explanation
    evidence: Evidence

    def __str__(self) -> str:
        log, match = self.evidence.log, self.evidence.match
        evidence = " ".join(self.evidence.line.split())
        if len(evidence) > LONGEST_EVIDENCE:
            evidence = f"{evidence[:LONGEST_EVIDENCE]}…"
        return (
            f"{HEADING}{self.signature.title}\n"
            f"{_item('cause', self.explanation.cause)}"
            f"  evidence: line {log.line_of(match.start())}: {evidence}\n"
            f"{_item('remedy', self.explanation.remedy)}"
            f"{_item('more', f'{GUIDE}#{anchor(self.signature.title)}')}"
        )


def find_cause(log: StageLog) -> Diagnosis | None:
    """The failure that comes first in the log; symptoms count only if there is nothing else."""
    for symptom in (False, True):
        signatures = [signature for signature in SIGNATURES if signature.symptom == symptom]
        diagnoses = [diagnosis for signature in signatures if (diagnosis := _look(signature, log))]
        if diagnoses:
            return min(diagnoses, key=lambda diagnosis: diagnosis.evidence.match.start())
    return None


def stated_mistake(log: StageLog) -> str | None:
    """A sentence about the user's input with which a stage of this workflow stopped: a diagnosis already."""
    match = STATED.search(log.text)
    return match and match[0]


def mistake_with_cause(log: StageLog) -> str | None:
    """Return the sentence of `stated_mistake`, with the diagnosis of the failure that it states, if it states one."""
    if not (stated := stated_mistake(log)):
        return None
    cause = find_cause(log)
    return f"{stated}\n{cause if cause and cause.evidence.line == stated else ''}"


def healthy(log: StageLog) -> str | None:
    """Return what is to be said of a stage that has finished; None if it has not.

    Snakemake writes a stage's benchmark file when the stage has ended successfully.
    """
    benchmark = _benchmark_of(log)
    if not (benchmark.is_file() and benchmark.stat().st_mtime >= log.path.stat().st_mtime):
        return None
    ended = datetime.fromtimestamp(benchmark.stat().st_mtime).isoformat(" ", "minutes")
    return (
        f"{HEADING}healthy\n"
        f"{_item('cause', f'none: the stage finished successfully at {ended}')}"
        f"  evidence: Snakemake wrote {benchmark.name} behind the last line of this log\n"
    )


def no_failure(log: StageLog) -> str | None:
    """Return what is to be said of a log whose lines speak of no failure; None if one does."""
    if FAILURE.search(log.text):
        return None
    return (
        f"{HEADING}no failure found\n"
        f"{_item('cause', f'no line of {log.path} speaks of a failure')}"
        f"  evidence: {_benchmark_of(log).name}, which Snakemake writes when a stage finishes, is not there or older\n"
        f"{_item('remedy', STILL)}"
    )


def unknown(log: StageLog) -> str:
    lines = "".join(f"    {line}\n" for line in log.last_lines(LAST_LINES)) or "    (nothing)\n"
    return (
        f"{HEADING}not known\n"
        f"{_item('cause', f'no line of {log.path} is one of a failure that this workflow knows')}"
        f"  evidence: its last lines are\n{lines}"
        f"{_item('remedy', REMEDY_OF_UNKNOWN)}"
    )


def _benchmark_of(log: StageLog) -> Path:
    return log.path.with_suffix(".benchmark.tsv")


def anchor(title: str) -> str:
    """The fragment under which a Markdown heading is found."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _item(name: str, text: str) -> str:
    """A wrapped paragraph behind its name; paths and commands stay whole."""
    first = f"  {name + ':':<10}"
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * 12, break_on_hyphens=False) + "\n"


def _look(signature: Signature, log: StageLog) -> Diagnosis | None:
    """The first place that the signature explains."""
    for match in re.finditer(signature.pattern, log.text, re.MULTILINE):
        evidence = Evidence(log, match)
        if explanation := signature.explain(evidence):
            return Diagnosis(signature, explanation, evidence)
    return None
