"""Filters that check answers without a model, in recipes with `rows: instructions`.

    process:
      - caption_agreement_filter:
      - yes_no_balance_filter:

- Caption: a new answer must agree with the caption of the image, which the model that wrote it has not seen.
- Balance: of the questions that are answered by yes or no, equally many have each answer, so that a model cannot guess.
"""

from collections import Counter

import numpy as np
from data_juicer.ops.base_op import OPERATORS
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import remove_special_tokens

from dj2mgm.data.texts import normalize_words
from dj2mgm.features.instructions.question_pool import NO, NUMBERS, YES
from dj2mgm.juicer.operators.declarations import NO_GROUP, BalanceFilter, Rows, ValueFilter, argument
from dj2mgm.recipes.argument_kinds import Rewrite

BALANCE, BALANCE_STAT = "yes_no_balance_filter", "yes_no"
CAPTION, CAPTION_STAT = "caption_agreement_filter", "caption_agreement"


@OPERATORS.register_module(CAPTION)
class CaptionAgreementFilter(ValueFilter):
    """A filter that drops new instructions whose answer contradicts the caption of their image.

    The stat `caption_agreement` is 1 or 0. It is empty for rows of the dataset and for rows to which no rule applies,
    which are kept.
    """

    _batched_op = True
    stat = CAPTION_STAT
    bounds = ("min_agreement", None)

    min_agreement: float = argument(1.0, "lowest agreement to keep. With 0, the filter only measures")
    # 'question = answer => caption = phrase' or '… caption != phrase', with names in braces; None: every answer except
    # yes, no and numbers must be in the caption
    rules: list[str] | None = argument(None, "phrases that captions contain or do not contain")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._rules = [Rewrite(rule) for rule in self.rules or ()]

    def compute_stats_batched(self, samples: dict) -> dict:
        columns = (samples.get(name) or [""] * len(samples[self.text_key]) for name in ("question", "caption"))
        rows = zip(*columns, samples[self.text_key], samples[Fields.stats], strict=True)
        for question, caption, text, stats in rows:
            agreement = self._measure_agreement(question, remove_special_tokens(text), f" {normalize_words(caption)} ")
            stats[CAPTION_STAT] = np.array([agreement] if caption and agreement is not None else [], dtype=np.float64)
        return samples

    def _measure_agreement(self, question: str, answer: str, caption: str) -> float | None:
        """Return whether all rules that apply hold for a normalized caption with a blank at both ends."""
        if self.rules is None:
            answer = normalize_words(answer)
            return None if answer in {YES, NO} | NUMBERS else float(f" {answer} " in caption)
        expectations = [rule.apply(question, answer) for rule in self._rules]
        agreements = [
            (f" {normalize_words(expectation.answer)} " in caption) == expectation.expected
            for expectation in expectations
            if expectation
        ]
        return float(all(agreements)) if agreements else None


@OPERATORS.register_module(BALANCE)
class YesNoBalanceFilter(BalanceFilter):
    """A filter that keeps as many rows with the answer yes as with the answer no, and all rows with other answers.

    The stat `yes_no` is 1 for yes, 0 for no and −1 for other answers. Rows of the dataset and new rows are
    balanced together. If no row has one of both answers, all rows are kept.
    """

    stat = BALANCE_STAT
    keep_fraction, keep_rows = 1.0, None
    positive: str = argument("yes", "the answer yes in the language of the answers")
    negative: str = argument("no", "the answer no")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._codes = {normalize_words(self.positive): 1, normalize_words(self.negative): 0}
        if len(self._codes) < 2:
            raise ValueError(
                f"positive and negative must be different answers, found {self.positive!r} and {self.negative!r}"
            )
        self._rows_per_answer = 0  # rows to keep with each answer

    def assign_groups(self, rows: Rows) -> np.ndarray:
        answers = (normalize_words(remove_special_tokens(row[self.text_key])) for row in rows)
        groups = np.fromiter((self._codes.get(answer, NO_GROUP) for answer in answers), dtype=np.int64, count=len(rows))
        counts = Counter(groups[groups != NO_GROUP].tolist())
        self._rows_per_answer = min(counts.values()) if len(counts) > 1 else counts.total()
        return groups

    def count_rows_to_keep(self, rows: int) -> int:
        return min(rows, 2 * self._rows_per_answer)
