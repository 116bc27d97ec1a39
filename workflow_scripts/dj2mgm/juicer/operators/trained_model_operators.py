"""Operators with a model that this workflow has trained: a captioner, and filters by the likelihoods of texts.

    process:
      - mgm_captioning_mapper: {base_model: results/models/tiny/mgm, stage: results/shapes/tiny/baseline/pretrain}
      - likelihood_gain_filter: {keep_fraction: 0.5}
      - blind_answer_filter: {max_likelihood: 0.9}
      - round_trip_filter: {min_agreement: 0.5}

- Captioner: the prompt is the prompt of the model's stage 1. With `template: plain` it is the image alone. All captions
  of beam search are kept in the row's meta with their log-likelihoods, most likely per token first. The first caption
  becomes the text.
- Gain: the gain of a token is its log-likelihood given the row's image minus its log-likelihood given an arbitrary
  image. The gain of a caption, or of the answer to the row's question, is the mean over its tokens. Lin et al.
  (Revisiting the role of language priors in vision-language models, ICML 2024, arXiv:2306.01879) rank captions by the
  pointwise mutual information of caption and image under the model, estimate its second term from images of the
  dataset, and weigh that term by α, as here. They average the likelihood of the whole caption over these images. Here
  the likelihood of each token, given the tokens before it, is averaged, so that a single token that no other image
  explains does not decide about the whole caption. The row's own image is one of the images, as in InfoNCE (van den
  Oord et al., 2018, arXiv:1807.03748), so the gain of a token is at most the logarithm of their number.
- Blind: an answer that the model gives to a gray image too teaches nothing about images (Chen et al., Are we on the
  right way for evaluating large vision-language models?, 2024, arXiv:2403.20330).
- Round trip: another question, whose answer follows from the row's answer, must get that answer (Changpinyo et al., All
  you may need for VQA are image captions, 2022, arXiv:2205.01883).
"""

from collections.abc import Sequence
from functools import cache, partial
from io import BytesIO
from math import ceil, exp
from pathlib import Path

import numpy as np
from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OP, OPERATORS, TAGGING_OPS, UNFORKABLE, Mapper
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import remove_special_tokens
from data_juicer.utils.model_utils import get_model
from PIL import Image

from dj2mgm.control_tokens import find_control_token
from dj2mgm.data.formats import build_dj_text
from dj2mgm.models.questions import GivenAnswer, split_into_parts
from dj2mgm.recipes.argument_kinds import Rewrite
from dj2mgm.recipes.catalogue import LIKELIHOOD_GAIN as GAIN

from .captioners import CANDIDATES_KEY, LOG_LIKELIHOODS, list_argument_defaults
from .declarations import (
    Declarations,
    ShareLimits,
    ValueFilter,
    argument,
    list_weight_files,
)

TRAINED_CAPTIONER = "mgm_captioning_mapper"
BLIND, ROUND_TRIP = "blind_answer_filter", "round_trip_filter"
GRAY, SIDE = (128, 128, 128), 224
YES_NO_SPELLINGS = ("yes", "Yes", "no", "No")  # answers to `VERIFICATION_QUESTION`; models prefer different spellings
VERIFICATION_QUESTION = 'Is "{answer}" the right answer to the question "{question}"? Answer with yes or no.'


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


def compute_likelihood_gain(log_likelihoods: Sequence[Sequence[float]], prior_weight: float) -> float:
    """Return the mean over T tokens of log p(token | own image) − α · log mean p(token | image) over M images, in nats.

    `log_likelihoods` are (M, T), the first row given the row's own image; `prior_weight` is α.
    """
    values = np.array(log_likelihoods)
    prior = np.logaddexp.reduce(values, axis=0) - np.log(len(values))
    return float(np.mean(values[0] - prior_weight * prior))


@OPERATORS.register_module(GAIN)
@UNFORKABLE.register_module(GAIN)
class LikelihoodGainFilter(TrainedModelOperator, ShareLimits, ValueFilter):
    """A filter that keeps rows whose caption a trained model finds likelier with their own image than with others.

    The stat `likelihood_gain` holds one number in nats per token. Rows without a gain are kept; their stat is empty:

    - rows that do not have exactly one image;
    - rows whose caption contains a control token, which the jsonl stage drops;
    - rows in a batch with fewer than `other_images` other images, since their gain would be on another scale (a
      few rows at the end of a dataset or of a part of it).
    """

    stat = "likelihood_gain"
    limit = "min_gain"
    bounds = ("min_gain", None)

    question: str = argument("", "question for rows without a question. The template `plain` has none")
    min_gain: float | None = argument(None, "lowest gain to keep, in nats per token; by default 0")
    keep_fraction: float | None = argument(None, "share of the rows, highest gain first, in place of `min_gain`")
    other_images: int = argument(8, "other images of the batch that stand for any image")
    # with 1, a caption that needs no image gains nothing; with 0, likely captions are kept
    prior_weight: float = argument(1.0, "α")
    batch_size: int = argument(32, "images whose captions are scored together, and that serve as other images")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # compute_stats_batched divides its rows into parts of similar sizes, so that none is too small
        self.images_at_once, self.batch_size = self.batch_size, DEFAULT_BATCH_SIZE
        self.min_gain = self.min_gain or 0.0

    def compute_stats_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Score the rows that have no gain yet, in parts; each image is encoded once for all its rows."""
        rows_by_image: dict[str, list[int]] = {}
        for row, stats in enumerate(samples[Fields.stats]):
            if self.stat not in stats and len(samples[self.image_key][row] or ()) == 1:
                rows_by_image.setdefault(samples[self.image_key][row][0], []).append(row)
        gains: dict[int, float] = {}
        questions = samples.get("question") or [""] * len(samples[self.text_key])
        parts = min(ceil(len(rows_by_image) / self.images_at_once), len(rows_by_image) // (self.other_images + 1))
        for images in np.array_split(np.array(list(rows_by_image), dtype=object), max(1, parts)):
            captions = {
                row: GivenAnswer(
                    index, questions[row] or self.question, remove_special_tokens(samples[self.text_key][row])
                )
                for index, image in enumerate(images)
                for row in rows_by_image[image]
            }
            gains |= self._compute_gains(images.tolist(), captions, rank)
        return self.fill(samples, gains)

    @staticmethod
    def read_scores(stats: dict) -> list[float]:
        return list(stats[LikelihoodGainFilter.stat])

    def _compute_gains(self, images: list[str], captions: dict[int, GivenAnswer], rank: int | None) -> dict[int, float]:
        """Return the gains by row; empty if there are too few other images.

        Args:
            images: paths of different images.
            captions: caption by row; `about` is the index of its image in `images`.
            rank: process of the operator.
        """
        image_count = self.other_images + 1
        if len(images) < image_count:
            return {}
        # evenly spread, since neighbors may be similar
        steps = [step * len(images) // image_count for step in range(image_count)]
        generator = self._load_model(rank)
        control = generator.list_control_tokens(self.template)
        rows = [
            row
            for row, (_, question, text) in captions.items()
            if not find_control_token(f"{question}\n{text}", control)
        ]
        answers = [
            captions[row]._replace(about=(captions[row].about + step) % len(images)) for row in rows for step in steps
        ]
        log_likelihoods = generator.compute_answer_log_likelihoods(images, answers, self.template)
        return dict(
            zip(
                rows,
                (
                    compute_likelihood_gain(part, self.prior_weight)
                    for part in split_into_parts(log_likelihoods, image_count)
                ),
                strict=True,
            )
        )


class AnswerCheck(TrainedModelOperator, ValueFilter):
    """A filter that decides by the probabilities of answers under a trained model.

    Its stat is empty for a row that has no question, has a control token, or does not have exactly one image. With
    `new_only`, it is also empty for rows of the dataset. Rows without the stat are kept.
    """

    new_only: bool = argument(False, "whether only new instructions are measured")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"batch_size": DEFAULT_BATCH_SIZE} | kwargs)

    def ask(self, questions: Sequence[tuple[object, str, str]], rank: int | None) -> list[float | None]:
        return compute_log_likelihoods(self._load_model(rank), self.template, questions)

    def find_unmeasured_rows(self, samples: dict) -> dict[int, tuple[str, str, str]]:
        """Return (image, question, answer) of the rows without the stat that have one image and a question, by row."""
        questions = samples.get("question") or [""] * len(samples[self.text_key])
        slots = samples.get("slot") if self.new_only else None
        return {
            row: (samples[self.image_key][row][0], question, remove_special_tokens(samples[self.text_key][row]))
            for row, (question, stats) in enumerate(zip(questions, samples[Fields.stats], strict=True))
            if question
            and self.stat not in stats
            and len(samples[self.image_key][row] or ()) == 1
            and (slots is None or slots[row])
        }


@OPERATORS.register_module(BLIND)
@UNFORKABLE.register_module(BLIND)
class BlindAnswerFilter(AnswerCheck):
    """A filter that drops rows whose answer is likely for the model although it sees a gray image only.

    The stat `blind_likelihood` is the probability of the complete answer given the question and a gray image.
    """

    stat = "blind_likelihood"
    bounds = (None, "max_likelihood")

    max_likelihood: float = argument(0.9, "highest probability to keep")

    def compute_stats_batched(self, samples: dict, rank: int | None = None) -> dict:
        unmeasured, gray = self.find_unmeasured_rows(samples), BytesIO()
        Image.new("RGB", (SIDE, SIDE), GRAY).save(gray, "PNG")
        log_likelihoods = self.ask([(gray, question, answer) for _, question, answer in unmeasured.values()], rank)
        probabilities = {
            row: exp(value) for row, value in zip(unmeasured, log_likelihoods, strict=True) if value is not None
        }
        return self.fill(samples, probabilities)


@OPERATORS.register_module(ROUND_TRIP)
@UNFORKABLE.register_module(ROUND_TRIP)
class RoundTripFilter(AnswerCheck):
    """A filter that drops rows whose answer does not agree with the model's answers to other questions.

    With `rewrites`, the stat `round_trip_agreement` is the lowest probability, over all other questions, of the answer
    that follows from the row's answer. It is empty for a row to which no rule applies, which is kept. Without
    `rewrites`, the other question is whether the answer is right, and the stat is the probability of yes given that
    the model answers yes or no, each in lower case or with a capital.
    """

    stat = "round_trip_agreement"
    bounds = ("min_agreement", None)

    min_agreement: float = argument(0.5, "lowest probability to keep")
    # 'question = answer => question = answer' with names in braces; None: the model is asked whether the answer is
    # right
    rewrites: list[str] | None = argument(None, "rules that make other questions")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._rules = [Rewrite(rule) for rule in self.rewrites or ()]

    def compute_stats_batched(self, samples: dict, rank: int | None = None) -> dict:
        unmeasured = self.find_unmeasured_rows(samples)
        return self.fill(
            samples, self._verify(unmeasured, rank) if self.rewrites is None else self._ask(unmeasured, rank)
        )

    def _verify(self, unmeasured: dict[int, tuple[str, str, str]], rank: int | None) -> dict[int, float]:
        """Return the probability of yes, by row, if the model is asked whether the answer is right."""
        questions = [
            (image, VERIFICATION_QUESTION.format(question=question, answer=answer), spelling)
            for image, question, answer in unmeasured.values()
            for spelling in YES_NO_SPELLINGS
        ]
        parts = split_into_parts(self.ask(questions, rank), len(YES_NO_SPELLINGS))
        agreement = {}
        for row, values in zip(unmeasured, parts, strict=True):
            if None not in values:
                yes = np.logaddexp(*values[:2])
                agreement[row] = float(np.exp(yes - np.logaddexp(yes, np.logaddexp(*values[2:]))))
        return agreement

    def _ask(self, unmeasured: dict[int, tuple[str, str, str]], rank: int | None) -> dict[int, float]:
        """Return the lowest probability, by row, of the answers that follow from the row's answer."""
        checks = [
            (row, image, other)
            for row, (image, question, answer) in unmeasured.items()
            for other in (rule.apply(question, answer) for rule in self._rules)
            if other
        ]
        log_likelihoods = self.ask([(image, other.question, other.answer) for _, image, other in checks], rank)
        agreement: dict[int, float] = {}
        for (row, _, other), value in zip(checks, log_likelihoods, strict=True):
            if value is not None:
                agreement[row] = min(agreement.get(row, 1.0), exp(value) if other.expected else 1 - exp(value))
        return agreement
