"""Filters that check answers with a model that this workflow has trained, in recipes with `rows: instructions`.

    process:
      - blind_answer_filter: {max_likelihood: 0.9}
      - round_trip_filter: {min_agreement: 0.5}

- Blind: an answer that the model gives to a gray image too teaches nothing about images (Chen et al., Are we on the
  right way for evaluating large vision-language models?, 2024, arXiv:2403.20330).
- Round trip: another question, whose answer follows from the row's answer, must get that answer (Changpinyo et al., All
  you may need for VQA are image captions, 2022, arXiv:2205.01883).
"""

from collections.abc import Sequence
from io import BytesIO
from math import exp

import numpy as np
from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OPERATORS, UNFORKABLE
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import remove_special_tokens
from PIL import Image

from dj2mgm.juicer.operators.declarations import ValueFilter, argument
from dj2mgm.juicer.operators.trained_model_operators import TrainedModelOperator, compute_log_likelihoods
from dj2mgm.models.questions import split_into_parts
from dj2mgm.recipes.argument_kinds import Rewrite

BLIND, ROUND_TRIP = "blind_answer_filter", "round_trip_filter"
GRAY, SIDE = (128, 128, 128), 224
YES_NO_SPELLINGS = ("yes", "Yes", "no", "No")  # answers to `VERIFICATION_QUESTION`; models prefer different spellings
VERIFICATION_QUESTION = 'Is "{answer}" the right answer to the question "{question}"? Answer with yes or no.'


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
