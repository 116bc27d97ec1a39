"""Encoder of one question and one answer for processors without a chat template (PaliGemma).

The question is a prefix whose tokens all attend to each other; the answer is its suffix (Beyer et al., PaliGemma, 2024,
section 3.2).
"""

import torch
from PIL import Image

from dj2mgm.data.formats import IMAGE_TOKEN
from dj2mgm.errors import InputError
from dj2mgm.models.vision_language import IGNORE_INDEX, check_image_fits
from dj2mgm.models.vlm.encoder import ProcessorEncoder

PREFIX, SUFFIX = 0, 1  # token_type_ids


class PrefixEncoder(ProcessorEncoder):
    """Encoder of rows with one image, one question as prefix and one answer as suffix."""

    fillers = ProcessorEncoder.fillers | {"token_type_ids": SUFFIX}  # the prefix must not attend to padding
    reads_text_alone = False

    def encode_text(self, row: dict, replacement: str) -> dict:
        item = super().encode_text(row, replacement)
        return item | {"token_type_ids": [PREFIX if label == IGNORE_INDEX else SUFFIX for label in item["labels"]]}

    def _encode(self, row: dict, replacements: list[str]) -> dict[str, list[int]]:
        question, answer = self._split_turns(row)
        if len(replacements) != 1:
            raise InputError(f"row {row['id']}: this model takes one image, found {len(replacements)}; delete the row")
        prefix = self._render_prompt(replacements[0], question)
        suffix = answer + self.tokenizer.eos_token
        encoded = self.tokenizer(prefix, text_pair=suffix, return_token_type_ids=True)
        check_image_fits(row, encoded["input_ids"], self.image_token_id, self.max_length)
        ids, type_ids = encoded["input_ids"][: self.max_length], encoded["token_type_ids"][: self.max_length]
        labels = [token if type_id == SUFFIX else IGNORE_INDEX for token, type_id in zip(ids, type_ids, strict=True)]
        return {"input_ids": ids, "labels": labels}

    def _process(self, row: dict, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        question, answer = self._split_turns(row)
        output = self.processor(
            text=[self.processor.image_token + question], suffix=[answer], images=[images], return_tensors="pt"
        )
        return {name: values for name, values in output.items() if name not in ("attention_mask", "labels")}

    def _render_prompt(self, replacement: str, question: str) -> str:
        return f"{replacement}{self.tokenizer.bos_token}{question.strip()}\n"

    def _find_control_tokens(self) -> tuple[str, ...]:
        return tuple(sorted(token for token in set(self.special) - {IMAGE_TOKEN} if token.strip()))

    def _split_turns(self, row: dict) -> tuple[str, str]:
        if len(row["conversations"]) != 2:
            raise InputError(f"row {row['id']}: this model takes one question and one answer; divide the conversation")
        return tuple(turn["value"].replace(IMAGE_TOKEN, " ").strip() for turn in row["conversations"])
