"""Declarations of benchmarks, one for each module in evaluation/benchmarks.

They are read from the modules' source, since Snakemake checks the configuration at every start and must not import the
benchmarks' dependencies.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MODULES = Path(__file__).resolve().parents[1] / "evaluation" / "benchmarks"


@dataclass(frozen=True)
class Declaration:
    """Constants and functions of a benchmark's module (evaluation/benchmarks/__init__.py)."""

    files: dict[str, str]  # keys of `benchmarks.<name>`, with their descriptions
    variants: tuple[str, ...]  # names of its prompts
    has_submission: bool


def read_declarations() -> dict[str, Declaration]:
    """Return the declarations by benchmark, which has the name of its module."""
    return {path.stem: _read_declaration(path) for path in sorted(MODULES.glob("[!_.]*.py"))}


@cache
def _read_declaration(path: Path) -> Declaration:
    constants, functions = {}, set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value
        elif isinstance(node, ast.FunctionDef):
            functions.add(node.name)
    files, variants = (ast.literal_eval(constants[name]) for name in ("FILES", "VARIANTS"))
    return Declaration(dict(files), tuple(variants), "write_submission" in functions)
