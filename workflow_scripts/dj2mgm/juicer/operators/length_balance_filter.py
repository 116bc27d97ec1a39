"""A filter that keeps equally many rows of each caption length.

    process:
      - length_balance_filter: {bucket_words: 5, keep_fraction: 0.5}

Most captions from the web are short. Nguyen et al. (Improving multimodal datasets with image captioning, 2023,
arXiv:2307.10350) and Li et al. (What if we recaption billions of web images, 2024, arXiv:2406.08478) study the effect
of longer ones.
"""

import numpy as np
from data_juicer.ops.base_op import OPERATORS
from data_juicer.utils.mm_utils import remove_special_tokens

from .selection import BalanceFilter, Rows

NAME = "length_balance_filter"


@OPERATORS.register_module(NAME)
class LengthBalanceFilter(BalanceFilter):
    """A filter that keeps equally many rows of each bucket of caption lengths, as far as the bucket has them.

    The stat `caption_words_from` is the smallest number of words in the row's bucket.
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
        """Initialize the operator.

        Args:
            bucket_words: width of a bucket. With 5, the buckets are captions of 0 to 4 words, 5 to 9, and so on.
            keep_fraction: share of the rows to keep.
            keep_rows: number of rows to keep, in place of `keep_fraction`.
            seed: seed of the draws.
        """
        super().__init__(keep_fraction, keep_rows, seed, *args, **kwargs)
        if bucket_words < 1:
            raise ValueError(f"bucket_words must be 1 or more, found {bucket_words}")
        self.bucket_words = bucket_words

    def assign_groups(self, rows: Rows) -> np.ndarray:
        words = (len(remove_special_tokens(row[self.text_key]).split()) for row in rows)
        return np.fromiter(words, dtype=np.int64, count=len(rows)) // self.bucket_words * self.bucket_words
