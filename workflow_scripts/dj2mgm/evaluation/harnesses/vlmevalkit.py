"""This workflow's models in VLMEvalKit, started by workflow_scripts/run_vlmevalkit.py."""

from pathlib import Path

from vlmeval.vlm.base import BaseModel

from dj2mgm.data.formats import IMAGE_TOKEN
from dj2mgm.models.generators import load_generator
from dj2mgm.settings.chat_templates import OF_THE_TOKENIZER


class VLMEvalKitModel(BaseModel):
    """Model of this workflow as VLMEvalKit's class.

    Args:
        model: folder of a whole model.
        finetuned: folder that a training stage wrote for it; None for the model without a stage.
        template: chat template for MGM.
        max_new_tokens: length at which an answer is cut.
    """

    def __init__(
        self,
        model: str,
        finetuned: str | None = None,
        template: str = OF_THE_TOKENIZER,
        max_new_tokens: int = 64,
        **_: object,
    ):
        super().__init__()
        self.generator = load_generator(Path(model), Path(finetuned) if finetuned else None)
        self.template, self.max_new_tokens = template, max_new_tokens

    def generate_inner(self, message: list[dict], dataset: str | None = None) -> str:
        """Return the greedy answer to the texts of a message and its first image, if it has one."""
        prompt, image = self.message_to_promptimg(message, dataset=dataset)
        prompt = prompt.replace(IMAGE_TOKEN, " ").strip()
        [answer] = self.generator.answer([image], [prompt], self.template, self.max_new_tokens, batch_size=1)
        return answer
