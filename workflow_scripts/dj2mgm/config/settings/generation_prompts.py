"""Prompts of the generate stage, which training also reads, to ask the same questions at its checkpoints.

They are separate from settings/evaluation.py, so that a new key there repeats no training.
"""

from pydantic import ConfigDict

from dj2mgm.config.settings.base import ImageRoot, Section, StageSettings, Template, setting
from dj2mgm.config.settings.string_formats import QuestionPrompt


class PromptKeys(Section):
    """Keys of config.yaml."""

    question_prompt: QuestionPrompt = setting("{question}", "prompt of a VQA question")


class CaptionPrompt(StageSettings):
    """The prompt for a caption."""

    template: Template = setting()
    question: str = setting()


class PromptSettings(PromptKeys, ImageRoot):
    """The part of the generate stage's config.yaml that training reads."""

    model_config = ConfigDict(extra="ignore")

    captions: dict[str, CaptionPrompt] = setting(..., "by trained stage, or `base` for a model without stage 1")
