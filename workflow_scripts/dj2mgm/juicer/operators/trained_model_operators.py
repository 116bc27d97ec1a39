"""The base of operators with a model that this workflow has trained, and their captioner.

    process:
      - mgm_captioning_mapper: {base_model: results/models/tiny/mgm, stage: results/shapes/tiny/baseline/pretrain}

The captioner's prompt is the prompt of the model's stage 1. With `template: plain` it is the image alone. All captions
of beam search are kept in the row's meta with their log-likelihoods, most likely per token first. The first caption
becomes the text.
"""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
from data_juicer.ops.base_op import OP, OPERATORS, TAGGING_OPS, UNFORKABLE, Mapper
from data_juicer.utils.constant import Fields
from data_juicer.utils.model_utils import get_model

from dj2mgm.data.formats import build_dj_text
from dj2mgm.settings.string_formats import find_control_token

from .captioners import CANDIDATES_KEY, LOG_LIKELIHOODS, list_argument_defaults
from .declarations import (
    Declarations,
    argument,
    list_weight_files,
)

TRAINED_CAPTIONER = "mgm_captioning_mapper"


class TrainedModelOperator(Declarations):
    """An operator with a model that this workflow has trained."""

    _accelerator = "cuda"
    _batched_op = True

    base_model: str = argument(..., "folder of the assembled model")
    stage: str = argument(..., "output folder of `pretrain` or `finetune`")
    # a name in config/chat_templates, or the content of such a file
    template: str | dict = argument("plain", "chat template of the stage")

    @staticmethod
    def list_model_files(arguments: dict) -> list[Path]:
        """Return the files that the captions depend on; a stage's folder also has records and checkpoints."""
        base, stage = (Path(arguments.get(name, "")) for name in ("base_model", "stage"))
        trained = (stage / f"{name}.safetensors" for name in ("projector", "language_model"))
        return [
            *list_weight_files(base),
            *(file for file in trained if file.is_file()),
            *list_weight_files(stage / "adapter"),
        ]

    def _load_model(self, rank: int | None):
        return load_model(self, self.base_model, self.stage, rank)


def load_model(operator: OP, base_model: str, stage: str, rank: int | None):
    """Return the generator of a model, which is loaded once for all operators with this model."""
    return get_model(_make_model_key(base_model, stage), rank, operator.use_cuda())


@cache
def _make_model_key(base_model: str, stage: str) -> partial:
    return partial(_load_generator, base_model, stage)


def _load_generator(base_model: str, stage: str, device: str):
    from dj2mgm.models.generators import load_generator as load  # here because it imports torch and transformers

    return load(Path(base_model), Path(stage), device)


def complete_arguments(arguments: dict | None) -> dict:
    """Return the arguments of the captioner with its defaults, for another operator that uses the same model."""
    return list_argument_defaults(MGMCaptioningMapper) | (arguments or {})


def compute_log_likelihoods(
    generator, template: str | dict, questions: Sequence[tuple[object, str, str]]
) -> list[float | None]:
    """Return the log-likelihood in nats of each answer. `questions` are (image, question, answer).

    It is None if the question or the answer has a control token.
    """
    control = generator.list_control_tokens(template)
    allowed = [
        index for index, (_, *texts) in enumerate(questions) if not find_control_token("\n".join(texts), control)
    ]
    results: list[float | None] = [None] * len(questions)
    if allowed:
        columns = zip(*(questions[index] for index in allowed), strict=True)
        likelihoods = generator.compute_log_likelihoods(*map(list, columns), template)
        for index, tokens in zip(allowed, likelihoods, strict=True):
            results[index] = sum(tokens) if tokens else None
    return results


@OPERATORS.register_module(TRAINED_CAPTIONER)
@TAGGING_OPS.register_module(TRAINED_CAPTIONER)
@UNFORKABLE.register_module(TRAINED_CAPTIONER)
class MGMCaptioningMapper(TrainedModelOperator, Mapper):
    """A mapper that captions rows with exactly one image by beam search, and does not change other rows.

    It sets `text` (image token, caption, end-of-chunk token), and in the meta `caption_candidates` (strings) and
    `caption_log_likelihoods` (nats, including the token that ends the caption).
    """

    draws_at_random = False
    handles_tokens = True

    question: str = argument("", "question for the model. The template `plain` has none")
    num_beams: int = argument(4, "number of beams, and of captions for each image")
    batch_size: int = argument(64, "images captioned together")
    max_new_tokens: int = argument(40, "number of tokens at which a caption is cut")

    def process_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Replace the texts of rows with one image; other rows have no candidates."""
        rows = [row for row, images in enumerate(samples[self.image_key]) if images and len(images) == 1]
        answers = self._load_model(rank).generate_candidates(
            [samples[self.image_key][row][0] for row in rows],
            question=self.question,
            template=self.template,
            num_beams=self.num_beams,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
        )
        captions: list[list[tuple[str, float]]] = [[] for _ in samples[self.text_key]]
        for row, candidates in zip(rows, answers, strict=True):
            captions[row] = candidates
            samples[self.text_key][row] = build_dj_text(candidates[0][0])
        for meta, candidates in zip(samples[Fields.meta], captions, strict=True):
            # typed, so that a batch without captions has columns of the same types
            meta[CANDIDATES_KEY] = np.array([caption for caption, _ in candidates], dtype=np.str_)
            meta[LOG_LIKELIHOODS] = np.array([value for _, value in candidates], dtype=np.float64)
        return samples
