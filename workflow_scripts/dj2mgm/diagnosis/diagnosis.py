"""From a log to cause, evidence and remedy: the first cause that is known, or that none is."""

import re
import textwrap
from dataclasses import dataclass

from dj2mgm.diagnosis.signature import HEADING, Evidence, Explanation, Signature, StageLog
from dj2mgm.diagnosis.signatures import SIGNATURES

GUIDE = "docs/troubleshooting.md"
STATED = re.compile(r"^error: .+", re.MULTILINE)  # command_line's one sentence for a user's mistake
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
        start = log.text.rfind("\n", 0, match.start()) + 1
        end = log.text.find("\n", match.end())
        evidence = " ".join(log.text[start : end if end >= 0 else None].split())
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


def unknown(log: StageLog) -> str:
    lines = "".join(f"    {line}\n" for line in log.last_lines(LAST_LINES)) or "    (nothing)\n"
    return (
        f"{HEADING}not known\n"
        f"{_item('cause', f'no line of {log.path} is one of a failure that this workflow knows')}"
        f"  evidence: its last lines are\n{lines}"
        f"{_item('remedy', REMEDY_OF_UNKNOWN)}"
    )


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
