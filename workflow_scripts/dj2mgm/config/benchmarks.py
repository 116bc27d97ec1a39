"""Which benchmarks there are, one a file in evaluation/benchmarks, and what each file declares.

The declarations are read from the files' text: the configuration stands below the benchmarks, and Snakemake, which
checks it at every start, imports none of what they need.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "evaluation" / "benchmarks"


@dataclass(frozen=True)
class Declaration:
    """What evaluation/benchmarks/__init__.py asks of a file."""

    files: dict[str, str]  # keys of `benchmarks.<name>`, with their descriptions
    variants: tuple[str, ...]  # of its prompts
    has_submission: bool


def declarations() -> dict[str, Declaration]:
    """By the benchmark's name, which is its file's."""
    return {path.stem: _declaration(path) for path in sorted(FOLDER.glob("[!_.]*.py"))}


@cache
def _declaration(path: Path) -> Declaration:
    constants, functions = {}, set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value
        elif isinstance(node, ast.FunctionDef):
            functions.add(node.name)
    files, variants = (ast.literal_eval(constants[name]) for name in ("FILES", "VARIANTS"))
    return Declaration(dict(files), tuple(variants), "write_submission" in functions)
