"""Cause, evidence and remedy of a failure, from a stage's log."""

import re
import textwrap
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dj2mgm.health.failure_signature import HEADING, Evidence, Explanation, Signature, StageLog
from dj2mgm.health.gpu_failures import GPU_SIGNATURES
from dj2mgm.health.system_failures import SYSTEM_SIGNATURES

# docs/troubleshooting.md has a row for each
SIGNATURES = (*GPU_SIGNATURES, *SYSTEM_SIGNATURES)

GUIDE_PAGE = "docs/troubleshooting.md"
USER_ERROR = re.compile(r"^error: .+", re.MULTILINE)  # the sentence that command_line prints for a mistake of the user
FAILURE_LINE = re.compile(r"Traceback|\b\w*(?:error|exception)\b|\bfatal\b|\bkilled\b|^exit status [1-9]", re.I | re.M)
STILL = (
    "wait if the stage is running (`python workflow_scripts/watch.py`). If it is not, it was killed before it could "
    "report an error; run the same command again"
)
MAX_EVIDENCE_LENGTH = 400
LAST_LINES = 8
WIDTH = 110
UNKNOWN_REMEDY = (
    "read the log upwards from its end to the first error; `python workflow_scripts/doctor.py` checks this machine; "
    f"{GUIDE_PAGE} lists more places to look at"
)


@dataclass(frozen=True)
class Diagnosis:
    """Known failure that was found in a log."""

    signature: Signature
    explanation: Explanation
    evidence: Evidence

    def __str__(self) -> str:
        log, match = self.evidence.log, self.evidence.match
        evidence = " ".join(self.evidence.line.split())
        if len(evidence) > MAX_EVIDENCE_LENGTH:
            evidence = f"{evidence[:MAX_EVIDENCE_LENGTH]}…"
        return (
            f"{HEADING}{self.signature.title}\n"
            f"{_format_item('cause', self.explanation.cause)}"
            f"  evidence: line {log.find_line_number(match.start())}: {evidence}\n"
            f"{_format_item('remedy', self.explanation.remedy)}"
        )


def find_cause(log: StageLog) -> Diagnosis | None:
    """Return the first failure in the log; symptoms count only without any other failure."""
    for symptom in (False, True):
        signatures = [signature for signature in SIGNATURES if signature.symptom == symptom]
        diagnoses = [diagnosis for signature in signatures if (diagnosis := _match(signature, log))]
        if diagnoses:
            return min(diagnoses, key=lambda diagnosis: diagnosis.evidence.match.start())
    return None


def find_input_error(log: StageLog) -> str | None:
    """Return the sentence about the user's input with which the stage stopped; it is a diagnosis already."""
    match = USER_ERROR.search(log.text)
    return None if match is None else match[0]


def explain_input_error(log: StageLog) -> str | None:
    """Return the sentence of `find_input_error`, with the diagnosis if the sentence is also a known failure."""
    if not (sentence := find_input_error(log)):
        return None
    cause = find_cause(log)
    return f"{sentence}\n{cause if cause and cause.evidence.line == sentence else ''}"


def report_success(log: StageLog) -> str | None:
    """Return a report that the stage finished; None if it did not.

    Snakemake writes a stage's benchmark file after the stage has finished successfully.
    """
    benchmark = _find_benchmark_file(log)
    if not (benchmark.is_file() and benchmark.stat().st_mtime >= log.path.stat().st_mtime):
        return None
    ended = datetime.fromtimestamp(benchmark.stat().st_mtime).isoformat(" ", "minutes")
    return (
        f"{HEADING}healthy\n"
        f"{_format_item('cause', f'none: the stage finished successfully at {ended}')}"
        f"  evidence: Snakemake wrote {benchmark.name} after the last line of this log\n"
    )


def report_no_failure(log: StageLog) -> str | None:
    """Return a report that the log mentions no failure; None if it mentions one."""
    if FAILURE_LINE.search(log.text):
        return None
    return (
        f"{HEADING}no failure found\n"
        f"{_format_item('cause', f'no line of {log.path} mentions a failure')}"
        f"  evidence: {_find_benchmark_file(log).name}, which Snakemake writes when a stage finishes, is missing or "
        "older\n"
        f"{_format_item('remedy', STILL)}"
    )


def report_unknown(log: StageLog) -> str:
    """Return a report with the log's last lines."""
    lines = "".join(f"    {line}\n" for line in log.list_last_lines(LAST_LINES)) or "    (the log is empty)\n"
    return (
        f"{HEADING}not known\n"
        f"{_format_item('cause', f'no line of {log.path} matches a known failure')}"
        f"  evidence: its last lines\n{lines}"
        f"{_format_item('remedy', UNKNOWN_REMEDY)}"
    )


def _find_benchmark_file(log: StageLog) -> Path:
    return log.path.with_suffix(".benchmark.tsv")


def _format_item(name: str, text: str) -> str:
    """Return a labelled, wrapped paragraph; paths and commands are not split."""
    label = f"  {name + ':':<10}"
    return textwrap.fill(text, WIDTH, initial_indent=label, subsequent_indent=" " * 12, break_on_hyphens=False) + "\n"


def _match(signature: Signature, log: StageLog) -> Diagnosis | None:
    """Return the first match of the signature that it can explain; ignored errors are at most symptoms."""
    for match in re.finditer(signature.pattern, log.text, re.MULTILINE):
        if log.is_ignored(match.start()) and not signature.symptom:
            continue
        evidence = Evidence(log, match)
        if explanation := signature.explain(evidence):
            return Diagnosis(signature, explanation, evidence)
    return None
