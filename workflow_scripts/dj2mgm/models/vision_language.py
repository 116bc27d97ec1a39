"""Interfaces of a family of vision-language models, for training and generation.

mgm/mgm_family.py and vlm/vlm_family.py implement them. Batches go unchanged from a model's encoder to its forward
pass; other code reads only `input_ids`, `labels` and `answer_positions`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin

from dj2mgm.errors import InputError
from dj2mgm.models.questions import (
    AnswerBatch,
    Candidates,
    GivenAnswer,
    Image,
    QuestionBatch,
    batch_answers,
    batch_questions,
    restore_order,
)
from dj2mgm.settings.string_formats import find_control_token
from dj2mgm.settings.training_stages import AUTO

IGNORE_INDEX = -100  # label of tokens that carry no loss
PIXELS_KEY = "pixel_values"  # key of a batch's images


class ImageBeyondMaxLengthError(InputError):
    """Error for a row whose last image ends after `end` tokens, which are more than max_length."""

    def __init__(self, row: dict, end: int, max_length: int):
        super().__init__(
            f"row {row['id']}: its image ends after {end} tokens, but max_length is {max_length}; raise max_length, or "
            "make the image smaller"
        )
        self.end = end


def check_image_fits(row: dict, input_ids: Sequence[int], image_token_id: int, max_length: int) -> None:
    """Raise ImageBeyondMaxLengthError if tokens of a row's images lie beyond max_length."""
    if image_token_id in input_ids[max_length:]:
        raise ImageBeyondMaxLengthError(row, len(input_ids) - input_ids[::-1].index(image_token_id), max_length)


def cast_images(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a batch whose pixel values have the dtype of the weights, unless they are bytes.

    Models cast pixel values themselves, nearly all as their first operation, so casting here changes nothing. Gemma 4
    computes with them first, so its results may change. In bf16, the images that the loader holds for the next step
    take half of the memory.
    """
    pixels = batch.get(PIXELS_KEY)
    return batch if pixels is None or not pixels.is_floating_point() else batch | {PIXELS_KEY: pixels.to(dtype)}


class Encoder(Protocol):
    """Encoder of conversations into tensors with one chat template."""

    control_tokens: tuple[str, ...]  # no text may contain one
    max_length: int  # tokens at which conversations are truncated

    @property
    def blank_tokens(self) -> int:
        """Number of tokens that a micro batch without images has in addition."""

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def count_tokens(self, row: dict) -> tuple[int, int]:
        """Return the number of tokens of a conversation, and how many of them carry loss."""

    def count_image_tokens(self, row: dict) -> int:
        """Return the tokens of the row's images, to which their memory is proportional; 0 if all images take as many.

        Pixels of a file do not tell: processors scale images, and divide them into tiles by their aspect ratio.
        """

    def encode_row(self, row: dict | None) -> dict:
        """Return `input_ids`, `labels` of equal length, and further inputs; None gives an item without loss."""

    def batch(self, items: list[dict], width: int) -> dict[str, torch.Tensor]:
        """Return right-padded input_ids and labels (B, width), answer_positions (n,), and further inputs."""


@dataclass(frozen=True)
class ModelParts:
    """Parts of a loaded model, with or without wrappers."""

    towers: Sequence[nn.Module]  # Layers of the vision towers in the order in which they run, without gradients
    compiled_tower_modules: Sequence[nn.Module]  # Modules of the towers, in addition to their layers, to compile
    decoder: nn.ModuleList  # Layers of the language model
    head: nn.Module  # Module from hidden states to logits or their loss (loss.py)
    # Modules whose parameters other modules read directly, without a call of their forward pass
    externally_read: Sequence[nn.Module]
    initialized_in_stage_1: Sequence[nn.Module]  # Modules whose weights stage 1 initializes from the run's seed
    # Depthwise convolutions of the towers, one of each shape, with the side of their inputs
    depthwise_convolutions: Sequence[tuple[nn.Conv2d, int]] = ()


class Answerer(ABC):
    """Model that answers questions about images greedily, and measures the likelihood of other answers."""

    def answer(
        self,
        images: Sequence[Image],
        questions: list[str],
        template: str | dict,
        max_new_tokens: int,
        batch_size: int | str,
    ) -> Iterator[str]:
        """Yield one answer for each pair of image and question; an empty question requests a plain caption.

        Args:
            images: one image for each question, or None for all questions, which are then asked without an image
                (PaliGemma receives a black one).
            template: name or content of a chat template (settings/models.py), for a model without its own.
            max_new_tokens: length at which an answer is cut.
            batch_size: number of questions in a batch, or "auto" for the number that fits the device's memory.
        """
        if batch_size == AUTO:
            batch_size = self.choose_batch_size(max_new_tokens)
        numbers, batches = batch_questions(images, questions, batch_size)
        yield from restore_order(numbers, self.answer_batches(batches, template, max_new_tokens))

    def compute_log_likelihoods(
        self, images: Sequence[Image], questions: Sequence[str], answers: Sequence[str], template: str | dict
    ) -> Iterator[list[float]]:
        """Yield the log-likelihoods of the tokens of each answer (nats); none if it has a control token.

        Images may be None for all questions, as in `answer`.
        """
        numbers, batches = batch_answers(images, questions, answers)
        yield from restore_order(numbers, self.compute_batch_log_likelihoods(batches, template))

    @abstractmethod
    def choose_batch_size(self, max_new_tokens: int) -> int:
        """Return the batch size for "auto"."""

    @abstractmethod
    def answer_batches(
        self, batches: list[QuestionBatch], template: str | dict, max_new_tokens: int
    ) -> Iterator[list[str]]:
        """Yield the answers of each batch."""

    @abstractmethod
    def compute_batch_log_likelihoods(
        self, batches: list[AnswerBatch], template: str | dict
    ) -> Iterator[list[list[float]]]:
        """Yield the log-likelihoods of each batch."""


class Generator(Answerer):
    """Trained model in this process, which also writes captions by beam search."""

    def compute_batch_log_likelihoods(
        self, batches: list[AnswerBatch], template: str | dict
    ) -> Iterator[list[list[float]]]:
        control = self.list_control_tokens(template)
        for images, answers in batches:
            allowed = [answer for answer in answers if not find_control_token(answer.text, control)]
            log_likelihoods = dict(
                zip(allowed, self.compute_answer_log_likelihoods(images, allowed, template), strict=True)
            )
            yield [log_likelihoods.get(answer, []) for answer in answers]

    @abstractmethod
    def generate_candidates(
        self,
        images: Sequence[str | Path],
        question: str,
        template: str | dict,
        num_beams: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> Iterator[Candidates]:
        """Yield up to `num_beams` different captions for each image, with their log-likelihoods.

        Captions are sorted by beam search's score, the log-likelihood per token. The yielded log-likelihood is the sum
        over a caption's tokens and its stop token.
        """

    @abstractmethod
    def compute_answer_log_likelihoods(
        self, images: Sequence[Image], answers: Sequence[GivenAnswer], template: str | dict
    ) -> list[list[float]]:
        """Return the log-likelihood in nats of each token of each answer, including the tokens that end it.

        Args:
            answers: answers; those with an empty question are plain captions.
            template: name or content of a chat template, for a model without its own.
        """

    @abstractmethod
    def list_control_tokens(self, template: str | dict) -> Collection[str]:
        """Return the template's control tokens, in addition to those of all (settings/string_formats.py)."""

    @abstractmethod
    def close(self) -> None:
        """Free the model's memory, even if other objects still refer to the generator."""


class ModelFamily(Protocol):
    """Vision-language model in a folder, which needs this project unless transformers `has_stock_class` for it."""

    has_stock_class: bool
    folder: Path
    config: PretrainedConfig
    processor: ProcessorMixin

    def make_encoder(self, template: str | dict, max_length: int) -> Encoder:
        """Return an encoder for a chat template (settings/models.py) that cuts rows at `max_length`."""

    def load(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        """Load the model for training; `attention` is transformers' name of the language model's implementation."""

    def prepare_inputs(self, batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Return the forward pass's inputs for a batch, without waiting for a GPU."""

    def find_parts(self, model: nn.Module) -> ModelParts: ...

    def load_trained_model(self, stage: Path | None, dtype: torch.dtype | str) -> PreTrainedModel:
        """Load the model with the weights of a stage, an adapter merged; None for the model without a stage."""

    def save_processor(self, folder: Path) -> None:
        """Save the processor in a model's folder."""

    def make_generator(self, stage: Path | None, device: str | torch.device | None) -> Generator:
        """Return a generator of the model with the weights of a stage.

        Args:
            stage: folder of the stage; None for the model without a stage.
            device: a GPU, on which the model runs in bf16, or the CPU, with float32; None: a GPU if there is one.
        """
