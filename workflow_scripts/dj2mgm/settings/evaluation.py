"""Settings of the stages that ask a trained model and score its answers, and declarations of benchmarks.

A section holds keys of config.yaml. `…Settings` add values of the run: a stage receives them as its config.yaml.
Declarations are read from the source of the modules in evaluation/benchmarks, since Snakemake checks the configuration
at every start and must not import the benchmarks' dependencies.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from dj2mgm.errors import InputError
from dj2mgm.settings.base import Processes, Section, SeedSettings, Template, ThreadSettings, setting
from dj2mgm.settings.data import CAPTION_QUESTION, BatchSize, ImageFolders, PromptKeys, PromptSettings, Tokens
from dj2mgm.settings.string_formats import FilePath, Question

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


class Decoding(Section):
    """Keys of every stage in which the trained model answers."""

    batch_size: BatchSize | Literal["auto"] = setting(
        "auto",
        "questions that are answered together; auto: for MGM, as many as fit half of the GPU's free memory, at most "
        "256 (64 on a CPU); for other models, 64 (16 on a CPU)",
    )
    max_new_tokens: Tokens = setting(64, "maximum length of an answer")


class CaptionQuestion(Section):
    """The key from which a run's prompt for captions is made."""

    caption_question: Question = setting(
        CAPTION_QUESTION,
        "question for a caption, after stage 2 and after a stage 1 with a chat template; empty: the image alone",
    )


class JudgeChoice(Section):
    """Keys from which a run's first judge and its prompt are made."""

    clip_prompt: str = setting("A photo depicts ", "text before every caption that CLIPScore judges")
    judge_clip: FilePath | None = setting(
        None,
        "CLIP or SigLIP that judges captions: folder or hub id with safetensors weights; null: the model's "
        "`clip`, which also selects data (docs/evaluation.md)",
    )


class JudgeKeys(Section):
    """Keys of the evaluate_clip stage."""

    second_judge: FilePath | None = setting(
        None, "another judge; the report shows its scores too, and how far both agree"
    )


class EvaluateSection(JudgeKeys, JudgeChoice, PromptKeys, CaptionQuestion, Decoding):
    """Generation and CLIPScore."""


class GenerateRunSettings(SeedSettings):
    """Values of the run in the settings of the generate stage, before the keys of the configuration."""

    gpus: int = setting(ge=1)
    image_root: str = setting()
    template: Template = setting(..., "chat template for questions")


class GenerateSettings(PromptSettings, GenerateRunSettings):
    """The generate stage."""

    model_config = ConfigDict(extra="forbid")

    decoding: Decoding = setting()


class JudgeRunSettings(ThreadSettings):
    """Values of the run in the settings of the evaluate_clip stage, before the keys of the configuration."""

    clip: str = setting(..., "folder or hub id of the first judge")


class JudgeSettings(JudgeKeys, JudgeRunSettings):
    """The evaluate_clip stage."""

    selecting: list[str] = setting(..., "CLIPs that selected the data")
    prompt: str = setting(..., 'text before every caption, "A photo depicts " in the paper')
    image_root: str = setting(..., "the folder that image paths are relative to")


class LeakSettings(ImageFolders):
    """The search for images and questions of evaluations in a dataset."""

    benchmarks: dict[str, dict[str, str]] = setting(..., "files of each benchmark")
    folders: list[str] = setting(..., "folders of images")
    cpu_threads: Processes | None = setting(..., "null: one for each core of this process")
