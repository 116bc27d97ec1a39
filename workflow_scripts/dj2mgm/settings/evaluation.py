"""Settings of the stages that ask a trained model and score its answers.

A section holds keys of config.yaml. `…Settings` add values of the run: a stage receives them as its config.yaml.
"""

from typing import Literal

from pydantic import ConfigDict

from dj2mgm.settings.base import Processes, Section, SeedSettings, Template, ThreadSettings, setting
from dj2mgm.settings.data import CAPTION_QUESTION, BatchSize, ImageFolders, PromptKeys, PromptSettings, Tokens
from dj2mgm.settings.string_formats import FilePath, Question


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
