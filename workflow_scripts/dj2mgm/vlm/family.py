"""Any vision-language model of transformers as training sees it (dj2mgm/vision_language.py).

Chat format, image tokens and parts come from the model's own processor, configuration and class.
"""

import copy
from functools import lru_cache
from pathlib import Path
from types import MethodType

import torch
from PIL import Image
from torch import nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, ProcessorMixin
from transformers.modeling_outputs import CausalLMOutput

from dj2mgm.data.formats import IMAGE_TOKEN
from dj2mgm.data.images import BadImage, image_size, load_image
from dj2mgm.errors import InputError
from dj2mgm.mgm.loss import LanguageModelHead, loss_and_gradient
from dj2mgm.mgm.modeling_mgm import positions_of_answers
from dj2mgm.vision_language import IGNORED, Parts
from dj2mgm.vlm.processors import load_processor

ROLES = {"human": "user", "gpt": "assistant"}
OF_TOKENS = ("input_ids", "labels", "token_type_ids", "mm_token_type_ids")  # (1, T); everything else is of images


class TransformersVLM:
    can_be_planned = False

    def __init__(self, folder: Path):
        self.folder = folder
        self.processor = load_processor(folder)
        self.config = AutoConfig.from_pretrained(folder, trust_remote_code=False)

    def encoder(self, template: str | dict, max_length: int) -> "ProcessorEncoder":
        """`template` is not looked at: the processor has its own."""
        return ProcessorEncoder(self.processor, self.config.image_token_id, max_length)

    def load(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        model = AutoModelForImageTextToText.from_pretrained(
            self.folder,
            dtype=dtype,
            attn_implementation={"text_config": attention},
            trust_remote_code=False,
            use_safetensors=True,
        )
        compute_loss_in_parts(model)
        # recomputation in a backward pass needs something whose gradient is asked for, and LoRA has nothing so early
        model.enable_input_require_grads()
        return model

    def inputs(self, batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    @staticmethod
    def parts(model: nn.Module) -> Parts:
        [found] = [module for module in model.modules() if isinstance(module, PreTrainedModel) and is_whole(module)]
        tower = found.get_encoder(modality="image")
        lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList)]
        return Parts(
            towers=max(lists, key=len),
            between=[],
            decoder=found.get_decoder().layers,
            head=found.get_output_embeddings(),
            called=[],
        )


def is_whole(model: PreTrainedModel) -> bool:
    """Whether it has a language model's head."""
    return isinstance(model.get_output_embeddings(), LanguageModelHead)


def compute_loss_in_parts(model: PreTrainedModel) -> None:
    """In place: given labels, the model computes its loss at supervised positions only, without ever holding logits for
    all of them (mgm/loss.py). Names of parameters stay as they are.

    Raises:
        InputError: its head does more than multiply.
    """
    head, softcap = model.get_output_embeddings(), getattr(model.config.get_text_config(), "final_logit_softcapping", 0)
    if type(head) is not nn.Linear or head.bias is not None or softcap:
        raise InputError(f"models of type {model.config.model_type} are not supported: their logits are not a product")
    head.__class__ = LanguageModelHead
    head.loss_and_gradient = loss_and_gradient
    plain = model.forward

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        answer_positions: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ):
        if labels is None:
            return plain(input_ids=input_ids, **kwargs)
        kwargs["use_cache"] = False
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        if answer_positions is None:
            answer_positions = positions_of_answers(labels)
        targets = labels.flatten()[answer_positions + 1]
        total = self.lm_head(hidden.flatten(0, 1).index_select(0, answer_positions), targets)
        return CausalLMOutput(loss=total / (max(1, len(targets)) if num_items_in_batch is None else num_items_in_batch))

    model.forward = MethodType(forward, model)
    model.accepts_loss_kwargs = True  # else Trainer does not say how many tokens a step's loss is over


class ProcessorEncoder:
    """One image to a conversation, or none, as the processor's own chat template puts it."""

    def __init__(self, processor: ProcessorMixin, image_token_id: int, max_length: int):
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.image_token_id = image_token_id
        self.max_length = max_length
        # those that the tokenizer finds in a text; <image> stands in the data for where an image is
        self.control_tokens = tuple(token for token in self.tokenizer.get_added_vocab() if token != IMAGE_TOKEN)
        self._placeholders = lru_cache(maxsize=4096)(self._replacement)

    def tokens(self, row: dict) -> tuple[int, int]:
        try:
            sizes = [image_size(row["image"])] if "image" in row else []
        except BadImage as error:
            raise InputError(f"row {row['id']}: {error}; replace the image, or delete the row") from None
        item = self._encoded(row, [self._placeholders(size) for size in sizes])
        return len(item["input_ids"]), len(item["labels"]) - item["labels"].count(IGNORED)

    def item(self, row: dict | None) -> dict:
        if row is None:
            return {"input_ids": [self.tokenizer.pad_token_id or 0], "labels": [IGNORED]}
        images = [load_image(row["image"])] if "image" in row else []
        item = self._encoded(row, [self._placeholders(image.size) for image in images])
        output = self._processed(row, images)
        given = output.pop("input_ids")[0].tolist()[: len(item["input_ids"])]
        if given != item["input_ids"][: len(given)]:
            raise RuntimeError(f"row {row['id']}: the processor's tokens are not those that were counted")
        for name in set(output) & set(OF_TOKENS):
            values = output.pop(name)[0].tolist()
            item[name] = (values + [0] * len(item["input_ids"]))[: len(item["input_ids"])]
        return item | dict(output)

    def batch(self, items: list[dict], width: int) -> dict[str, torch.Tensor]:
        """No attention mask: under causal attention nothing looks at what stands to its right."""
        fillers = dict.fromkeys(OF_TOKENS, 0) | {"input_ids": self.tokenizer.pad_token_id or 0, "labels": IGNORED}
        batch = {}
        for name in dict.fromkeys(name for item in items for name in item):
            values = [item[name] for item in items if name in item]
            if name in OF_TOKENS:
                rows = [item.get(name, []) for item in items]
                batch[name] = torch.tensor([row + [fillers[name]] * (width - len(row)) for row in rows])
            else:
                batch[name] = _joined(values)
        return batch | {"answer_positions": positions_of_answers(batch["labels"])}

    def _messages(self, row: dict) -> list[dict]:
        messages = []
        for turn in row["conversations"]:
            text = turn["value"]
            content = [{"type": "text", "text": text.replace(IMAGE_TOKEN, "").strip()}]
            if turn["from"] == "human" and IMAGE_TOKEN in text:
                content.insert(0, {"type": "image"})
            messages.append({"role": ROLES[turn["from"]], "content": content})
        return messages

    def _rendered(self, messages: list[dict]) -> str:
        return self.processor.apply_chat_template(copy.deepcopy(messages), tokenize=False)  # which it may change

    def _answers(self, row: dict) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation, and where in it answers stand, up to what ends their turns.

        Raises:
            InputError: the template does not keep what it has written once another turn comes.
        """
        messages = self._messages(row)
        text, spans = self._rendered(messages), []
        for number in range(1, len(messages), 2):
            before, until = self._rendered(messages[:number]), self._rendered(messages[: number + 1])
            answer = messages[number]["content"][0]["text"]
            begin = until.find(answer, len(before))
            if not (text.startswith(until) and until.startswith(before)) or begin < 0:
                raise InputError(f"row {row['id']}: the model's chat template does not tell where an answer begins")
            spans.append((begin, len(until.rstrip("\n"))))
        return text, spans

    def _encoded(self, row: dict, replacements: list[str]) -> dict[str, list[int]]:
        """Token ids, image tokens included, and labels, without an image being looked at."""
        text, spans = self._answers(row)
        token = self._image_token
        begin = text.find(token) if replacements else -1
        if replacements:
            text = text[:begin] + replacements[0] + text[begin + len(token) :]
            grown = len(replacements[0]) - len(token)
            spans = [(start + grown * (start > begin), end + grown * (end > begin)) for start, end in spans]
        encoded = self.tokenizer(text, add_special_tokens=self._adds_bos(text), return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        labels = [
            token_id if any(start < stop and begin < end <= stop for begin, stop in spans) else IGNORED
            for token_id, (start, end) in zip(ids, offsets, strict=True)
        ]
        if labels[-1] != IGNORED and ids[-1] not in self.tokenizer.all_special_ids:
            ids, labels = [*ids, self.tokenizer.eos_token_id], [*labels, self.tokenizer.eos_token_id]
        if self.image_token_id in ids[self.max_length :]:
            raise InputError(f"row {row['id']}: its image lies beyond max_length {self.max_length}; raise it")
        return {"input_ids": ids[: self.max_length], "labels": labels[: self.max_length]}

    def _processed(self, row: dict, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """Everything that the processor gives for the row."""
        text = self._rendered(self._messages(row))
        output = self.processor(
            text=[text],
            images=[images] if images else None,
            add_special_tokens=self._adds_bos(text),
            return_tensors="pt",
        )
        return {name: values for name, values in output.items() if name != "attention_mask"}

    def _adds_bos(self, text: str) -> bool:
        bos = self.tokenizer.bos_token
        return not (bos and text.startswith(bos))

    @property
    def _image_token(self) -> str:
        """What the template writes for an image."""
        return getattr(self.processor, "boi_token", None) or self.processor.image_token

    def _replacement(self, size: tuple[int, int]) -> str:
        """What the processor makes of it for an image of this size (width, height)."""
        kwargs = self.processor._merge_kwargs(tokenizer_init_kwargs={})["images_kwargs"]
        return self.processor._process_images([[Image.new("RGB", size)]], **kwargs)[1][0]


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    """Along their first dimension; the second, tiles of an image, is padded to the greatest."""
    if values[0].dim() > 2:
        greatest = max(value.shape[1] for value in values)
        values = [pad(v, (0, 0) * (v.dim() - 2) + (0, greatest - v.shape[1])) for v in values]
    return torch.cat(values)
