"""A filter that keeps rows with captions of frequent words, as an example of an operator with declarations.

Copied to workflow_scripts/dj2mgm/juicer/operators/word_frequency_filter.py, it works in recipes, with its entry
in config/schemas/operators.yaml (docs/extending.md):

    process:
      - word_frequency_filter: {model: path/to/folder, keep_fraction: 0.9}

`model` is a folder with frequencies.json, {word: logarithm of its relative frequency}.
"""

import json
from functools import cached_property
from pathlib import Path

import numpy as np
from data_juicer.ops.base_op import OPERATORS
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import remove_special_tokens

from dj2mgm.errors import InputError

from .declarations import ShareFilter, argument, merge_reports

NAME = "word_frequency_filter"
STAT = "word_frequency"


@OPERATORS.register_module(NAME)
class WordFrequencyFilter(ShareFilter):
    """A filter that keeps rows whose words are frequent enough on average.

    The stat `word_frequency` is the mean logarithm of the frequencies of the caption's known words, or None if the
    model knows none of its words. Rows without a value are kept.
    """

    _batched_op = True  # for Data-Juicer: the methods below take a batch of rows
    limit = "min_frequency"  # the argument that keep_fraction replaces
    report_key = "unknown_words"  # name of the report in summary.json

    model: str = argument(..., "folder with frequencies.json. The stage runs again if it changes")
    min_frequency: float = argument(-20.0, "lowest mean logarithm to keep")
    keep_fraction: float | None = argument(None, "share of the rows to keep, most frequent words first")

    @cached_property
    def _frequencies(self) -> dict[str, float]:
        """The frequencies, loaded at first use."""
        return json.loads((Path(self.model) / "frequencies.json").read_text(encoding="utf-8"))

    def compute_stats_batched(self, samples: dict) -> dict:
        """Measure the rows that have no value yet."""
        for text, stats in zip(samples[self.text_key], samples[Fields.stats], strict=True):
            if STAT not in stats:
                words = remove_special_tokens(text).split()
                frequencies = [self._frequencies[word] for word in words if word in self._frequencies]
                stats[STAT] = float(np.mean(frequencies)) if frequencies else None
                counts = {"captions": 1, "without_known_words": int(not frequencies)}
                self.report = merge_reports(self.report, counts)
        return samples

    def process_single(self, sample: dict) -> bool:
        value = sample[Fields.stats][STAT]
        return value is None or self.get_keep_boolean(value, self.min_frequency)

    @staticmethod
    def read_scores(stats: dict) -> list[float]:
        """Return the row's scores, of which `keep_fraction` is a share."""
        return [] if stats[STAT] is None else [stats[STAT]]

    def finish_report(self, report: dict) -> dict:
        """Return the report.

        Raises:
            InputError: if the model knows no word of any caption.
        """
        if report["without_known_words"] == report["captions"]:
            raise InputError(f"{self.model} knows no word of any caption; name a model of the captions' language")
        return report
