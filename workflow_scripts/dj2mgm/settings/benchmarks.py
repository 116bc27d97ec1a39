"""Declarations of benchmarks, one for each module in evaluation/benchmarks, and sections with a key for each.

They are read from the modules' source, since Snakemake checks the configuration at every start and must not import the
benchmarks' dependencies.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from dj2mgm.errors import InputError
from dj2mgm.settings.base import Section

MODULES = Path(__file__).resolve().parents[1] / "evaluation" / "benchmarks"


@dataclass(frozen=True)
class Declaration:
    """Arguments of a benchmark's declaration (evaluation/benchmarks/__init__.py)."""

    files: dict[str, str]  # keys of `benchmarks.<name>`, with their descriptions
    variants: tuple[str, ...]  # names of its prompts
    has_submission: bool


class BenchmarkSection(Section):
    """Settings by benchmark, of the benchmarks that the configuration states."""

    @model_serializer(mode="wrap")
    def _serialize_benchmarks(self, handler: SerializerFunctionWrapHandler) -> dict:
        return {name: entry for name, entry in handler(self).items() if entry is not None}


def change_type(model: type[Section], key: str, section_type: type[Section]) -> tuple:
    """Return a field of a mapping with another type, which validates its default."""
    field = model.model_fields[key]
    return section_type, Field(
        default_factory=lambda: section_type.model_validate(field.default), description=field.description
    )


def read_declarations() -> dict[str, Declaration]:
    """Return the declarations by benchmark, which has the name of its module."""
    return {path.stem: _read_declaration(path) for path in sorted(MODULES.glob("[!_.]*.py"))}


@cache
def _read_declaration(path: Path) -> Declaration:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="BENCHMARK")], value=ast.Call(keywords=keywords)):
                arguments = {keyword.arg: keyword.value for keyword in keywords}
                if {"files", "variants"} <= set(arguments):
                    files, variants = (ast.literal_eval(arguments[name]) for name in ("files", "variants"))
                    return Declaration(files, variants, "write_submission" in arguments)
    raise InputError(f"{path}: BENCHMARK = Benchmark(files=…, variants=…, …) is missing; see docs/extending.md")
