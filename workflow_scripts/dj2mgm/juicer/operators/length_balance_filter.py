"""Keeps as many rows with short captions as with long ones.

    process:
      - length_balance_filter: {bucket_words: 5, keep_fraction: 0.5}

Captions of the web are short for the most part; how much longer ones teach is what Nguyen et al. (Improving multimodal
datasets with image captioning, 2023, arXiv:2307.10350) and Li et al. (What if we recaption billions of web images,
2024, arXiv:2406.08478) look at.
"""

import numpy as np
from data_juicer.ops.base_op import OPERATORS
from data_juicer.utils.mm_utils import remove_special_tokens

from .selection import BalanceFilter, Rows

NAME = "length_balance_filter"


@OPERATORS.register_module(NAME)
class LengthBalanceFilter(BalanceFilter):
    """Keeps as many rows of each bucket of caption lengths, as far as it has them.

    The stat `caption_words_from` is the fewest words that captions of a row's bucket have.
    """

    stat = "caption_words_from"

    def __init__(
        self,
        bucket_words: int = 5,
        keep_fraction: float | None = None,
        keep_rows: int | None = None,
        seed: int = 0,
        *args,
        **kwargs,
    ):
        """
        Initialization method.

        :param bucket_words: numbers of words that share a bucket: with 5, captions of 0 to 4 words, 5 to 9, and so on.
        :param keep_fraction: share of the rows to keep.
        :param keep_rows: instead of it: how many rows to keep.
        :param seed: of the draws.
        """
        super().__init__(keep_fraction, keep_rows, seed, *args, **kwargs)
        if bucket_words < 1:
            raise ValueError(f"bucket_words must be 1 or more, found {bucket_words}")
        self.bucket_words = bucket_words

    def groups_of(self, rows: Rows) -> np.ndarray:
        words = (len(remove_special_tokens(row[self.text_key]).split()) for row in rows)
        return np.fromiter(words, dtype=np.int64, count=len(rows)) // self.bucket_words * self.bucket_words
