"""Prompts of the generate stage. Training reads them, too, so that its checkpoints answer the same questions.

They are separate from settings/evaluation.py, so that training does not run again if a key is added there.
"""

from pydantic import ConfigDict

from dj2mgm.settings.base import ImageRootSettings, Section, StageSettings, Template, setting
from dj2mgm.settings.string_formats import QuestionPrompt

# default question for a caption, also in training data of stage 2 whose captions have no question
CAPTION_QUESTION = "Describe the image."


class PromptKeys(Section):
    """Keys of `evaluate` in config.yaml that contain prompts."""

    question_prompt: QuestionPrompt = setting("{question}", "prompt of a VQA question")


class CaptionPrompt(StageSettings):
    """The prompt for a caption."""

    template: Template = setting()
    question: str = setting()


class PromptSettings(PromptKeys, ImageRootSettings):
    """The part of the generate stage's config.yaml that training reads."""

    model_config = ConfigDict(extra="ignore")

    captions: dict[str, CaptionPrompt] = setting(
        ..., "by stage: `pretrain` and `finetune`; without stage 1, `base` replaces `pretrain`"
    )
