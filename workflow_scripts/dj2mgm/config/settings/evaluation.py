"""Settings of the stages that ask a trained model and score its answers."""

from typing import Literal

from dj2mgm.config.settings.base import Section, setting
from dj2mgm.config.settings.data import BatchSize, Tokens
from dj2mgm.config.settings.strings import FilePath, Question, QuestionPrompt


class EvaluateSection(Section):
    """Generation and CLIPScore."""

    batch_size: BatchSize | Literal["auto"] = setting(
        "auto", "questions that are answered together; auto: the number that fits the GPU's memory"
    )
    max_new_tokens: Tokens = setting(64, "maximum length of an answer")
    caption_question: Question = setting(
        "Describe the image.",
        "question for a caption, after stage 2 and after a stage 1 with a chat format; empty: the image alone",
    )
    question_prompt: QuestionPrompt = setting("{question}", "prompt of a VQA question")
    clip_prompt: str = setting("A photo depicts ", "text before every caption that CLIPScore judges")
    judge_clip: FilePath | None = setting(
        None,
        "CLIP or SigLIP that judges captions: folder or hub id with safetensors weights; null: the model's "
        "`clip_score`, which also selects data (docs/evaluation.md)",
    )
    second_judge: FilePath | None = setting(
        None, "another judge; the report shows its scores too, and how far both agree"
    )
