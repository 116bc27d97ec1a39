"""A filter that keeps rows whose captions have rare n-grams, and fills up with others.

    process:
      - ngram_balance_filter: {words: 2, keep_fraction: 0.5}

This is the balancing of MetaCLIP (Xu et al., Demystifying CLIP data, 2023, arXiv:2309.16671). At most about t captions
are drawn for each entry, and a caption is kept if it is drawn for one of its entries. MetaCLIP takes entries from
WordNet and Wikipedia; here they are the n-grams of the captions.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
from data_juicer.ops.base_op import OPERATORS
from data_juicer.utils.mm_utils import remove_special_tokens

from dj2mgm.streaming import DiskMap

from .selection import Rows, Selection, SelectionFilter, identities

NAME = "ngram_balance_filter"
STAT = "ngram_limit"
WORD = re.compile(r"\w+")
AT_ONCE = 1000  # rows


def find_ngrams(text: str, words: int) -> list[str]:
    """Return the distinct n-grams of a caption, in order. A shorter caption is one n-gram."""
    found = WORD.findall(remove_special_tokens(text).lower())
    grams = (" ".join(found[start : start + words]) for start in range(max(1, len(found) - words + 1)))
    return list(dict.fromkeys(grams))


@OPERATORS.register_module(NAME)
class NgramBalanceFilter(SelectionFilter):
    """A filter that keeps captions drawn for at least one of their n-grams, about equally many for each n-gram.

    A caption is drawn with probability t/c for an n-gram of `c` captions. The limit t follows from the number of rows
    to keep. The stat `ngram_limit` is the lowest limit that keeps the row.
    """

    def __init__(
        self,
        words: int = 2,
        keep_fraction: float | None = None,
        keep_rows: int | None = None,
        seed: int = 0,
        *args,
        **kwargs,
    ):
        """Initialize the operator.

        Args:
            words: number of words in an n-gram.
            keep_fraction: share of the rows to keep.
            keep_rows: number of rows to keep, in place of `keep_fraction`.
            seed: seed of the draws.
        """
        super().__init__(keep_fraction, keep_rows, seed, *args, **kwargs)
        if words < 1:
            raise ValueError(f"words must be 1 or more, found {words}")
        self.words = words

    def select(self, rows: Rows) -> Selection:
        # u < t/c must hold for one n-gram, where u is the row's draw for it: t must exceed the least u·c
        captions = DiskMap()  # n-gram -> captions that have it
        for part in self._parts(rows):
            captions.add(Counter(gram for grams in part for gram in grams).items())
        identity, limits = identities(rows), []
        for part in self._parts(rows):
            known = {gram: captions.get(gram) for grams in part for gram in grams}
            for grams, row in zip(part, identity, strict=False):
                limits.append(min(self.draw(row, gram) * known[gram] for gram in grams))
        values = np.array(limits)
        kept = np.zeros(len(values), dtype=bool)
        kept[np.argsort(values, kind="stable")[: self.rows_to_keep(len(values))]] = True
        self.report = {"limit": round(float(values[kept].max(initial=0.0)), 3)}
        return Selection(kept, {STAT: values})

    def _parts(self, rows: Rows) -> Iterator[list[list[str]]]:
        """Yield the n-grams of `AT_ONCE` rows at a time."""
        texts = iter(rows)
        while part := [find_ngrams(row[self.text_key], self.words) for row in islice(texts, AT_ONCE)]:
            yield part
