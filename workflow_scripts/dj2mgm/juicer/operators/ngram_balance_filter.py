"""Keeps rows whose captions say what few others say, and as many of the others as there is room for.

    process:
      - ngram_balance_filter: {words: 2, keep_fraction: 0.5}

The balancing of MetaCLIP (Xu et al., Demystifying CLIP data, 2023, arXiv:2309.16671): of every entry, at
most about t captions are drawn, and a caption is kept if it is drawn for one of its entries. There entries come from
WordNet and Wikipedia; here they are the captions' own n-grams.
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


def ngrams_of(text: str, words: int) -> list[str]:
    """The different n-grams of a caption, in order. One with fewer words is an n-gram as a whole."""
    found = WORD.findall(remove_special_tokens(text).lower())
    grams = (" ".join(found[start : start + words]) for start in range(max(1, len(found) - words + 1)))
    return list(dict.fromkeys(grams))


@OPERATORS.register_module(NAME)
class NgramBalanceFilter(SelectionFilter):
    """Keeps captions that are drawn for at least one of their n-grams, of each about as many, as far as there are.

    A caption is drawn for an n-gram that `c` captions have with probability t/c. The limit t follows from how many rows
    are to be kept. The stat `ngram_limit` is the lowest limit that keeps the row.
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
        """
        Initialization method.

        :param words: of an n-gram.
        :param keep_fraction: share of the rows to keep.
        :param keep_rows: instead of it: how many rows to keep.
        :param seed: of the draws.
        """
        super().__init__(keep_fraction, keep_rows, seed, *args, **kwargs)
        if words < 1:
            raise ValueError(f"words must be 1 or more, found {words}")
        self.words = words

    def select(self, rows: Rows) -> Selection:
        # u < t/c for one of the n-grams, where u is the row's draw for it: so t must exceed the least u·c
        captions = DiskMap()  # n-gram -> captions that have it
        for part in self._parts(rows):
            captions.add(Counter(gram for grams in part for gram in grams).items())
        identity, limits = identities(rows), []
        for part in self._parts(rows):
            known = {gram: captions.get(gram) for grams in part for gram in grams}
            for grams, row in zip(part, identity, strict=False):
                limits.append(min(self.draw(row, gram) * known[gram] for gram in grams))
        values = np.array(limits)
        wanted = self.wanted(len(values))
        kept = np.zeros(len(values), dtype=bool)
        kept[np.argsort(values, kind="stable")[:wanted]] = True
        self.report = {"limit": round(float(values[kept].max(initial=0.0)), 3)}
        return Selection(kept, {STAT: values})

    def _parts(self, rows: Rows) -> Iterator[list[list[str]]]:
        """The n-grams of `AT_ONCE` rows at a time."""
        texts = iter(rows)
        while part := [ngrams_of(row[self.text_key], self.words) for row in islice(texts, AT_ONCE)]:
            yield part
