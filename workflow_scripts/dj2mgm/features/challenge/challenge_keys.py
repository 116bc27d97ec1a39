"""Keys of the configuration for benchmarks and `challenge`, and the settings of their stages.

Declarations of benchmarks are read from the source of their modules, since Snakemake checks the configuration at every
start and must not import the benchmarks' dependencies.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import SerializerFunctionWrapHandler, create_model, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from dj2mgm.errors import InputError
from dj2mgm.settings.base import Number, Processes, Section, StageSettings, Template, section, setting
from dj2mgm.settings.evaluation import Decoding
from dj2mgm.settings.string_formats import FilePath

TARGETS_BY_KEY = {"challenge": ("challenge",)}
MODULES = Path(__file__).with_name("benchmarks")
DEFAULT_SCORES = {
    "textvqa": {"score": 56.2, "variant": "ocr_tokens"},
    "mmbench": {"score": 59.8, "variant": "circular"},
}


@dataclass(frozen=True)
class Declaration:
    """Arguments of a benchmark's declaration (`benchmarks/__init__.py`)."""

    files: dict[str, str]  # keys of `benchmarks.<name>`, with their descriptions
    variants: tuple[str, ...]  # names of its prompts
    has_submission: bool


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


class ChallengeScore(Section):
    """The reference model's score in a benchmark."""

    score: Number = setting(..., "percent", gt=0, le=100)
    variant: str = setting(..., "form of the prompts")


class ChallengeSection(Section):
    """`snakemake challenge`."""

    reference: str = setting(
        "MGM-2B",
        "model whose published scores, in percent, are below; the challenge itself divides by the score of its "
        "organizers' baseline",
    )
    scores: dict[str, ChallengeScore] = setting(DEFAULT_SCORES)


class _ByBenchmark(Section):
    """Settings by benchmark, of the benchmarks that the configuration states."""

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> dict:
        return {name: entry for name, entry in handler(self).items() if entry is not None}


class _Scores(_ByBenchmark):
    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if not self.model_fields_set:
            raise PydanticCustomError("empty", "no entry")
        return self


def build_keys() -> type[Section]:
    """Return the keys for several experiments, with the files and prompt variants of each declared benchmark."""
    files, scores, declared = {}, {}, read_declarations()
    for name in dict.fromkeys([*DEFAULT_SCORES, *declared]):
        keys = {key: (FilePath | None, setting(..., text)) for key, text in declared[name].files.items()}
        files[name] = create_model(name, __base__=Section, **keys), None
        variants = Literal[declared[name].variants]
        variant = variants, setting(..., ChallengeScore.model_fields["variant"].description)
        scores[name] = create_model(name, __base__=ChallengeScore, variant=variant), None
    files_type = create_model("Benchmarks", __base__=_ByBenchmark, **files)
    scores_type = create_model("Scores", __base__=_Scores, **scores)
    without_files = {name: dict.fromkeys(declared[name].files) for name in DEFAULT_SCORES}

    class Challenge(ChallengeSection):
        scores: scores_type = _default(scores_type, DEFAULT_SCORES)

    class ChallengeKeys(Section):
        """Keys for several experiments."""

        benchmarks: files_type = _default(
            files_type,
            without_files,
            "your files of published benchmarks; docs/features/challenge.md says where to get them",
        )
        challenge: Challenge = section(
            Challenge, "`snakemake challenge`: the scores of report.experiments relative to those of a reference model"
        )

    return ChallengeKeys


def _default(section_type: type[Section], values: dict, description: str = "") -> Any:
    """Return a field of a section with other defaults than those of its type."""
    return section(lambda: section_type.model_validate(values), description)


KEYS = build_keys()


def list_benchmark_files(config: Any) -> dict[str, dict[str, str]]:
    """Return the files of each benchmark whose files are all stated, by benchmark and key."""
    return {name: files for name, files in config.benchmarks.model_dump().items() if None not in files.values()}


class BenchmarkSettings(StageSettings):
    """The answers to a benchmark's questions."""

    benchmark: str = setting()
    files: dict[str, str] = setting(..., "paths by key of `benchmarks.<name>`")
    template: Template = setting()
    decoding: Decoding = setting()
    gpus: int = setting(ge=1)
    cpu_threads: Processes | None = setting(..., "null: one for each core of this process")


class ChallengeRun(Section):
    """A run in the challenge's table."""

    experiment: str = setting()
    seed: int | None = setting(..., "null: a model before training")
    benchmarks: dict[str, str] = setting(..., "folder of each benchmark")


class ChallengeSettings(ChallengeSection, StageSettings):
    """Settings of the challenge's table."""

    runs: list[ChallengeRun] = setting()
