"""Paired differences of one experiment from the reference, the input of contrasts.py and seed_noise.py.

`pair_values` in run_scores.py creates them from the scores of runs.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PairedValues:
    """Differences of one experiment from the reference, paired by seed and image.

    Attributes:
        seeds: (S,) numbers of the seeds.
        sums: (…, S, U) sum of each image's values, for any number of studies at once.
        counts: (U,) number of each image's values.
    """

    seeds: tuple[int, ...]
    sums: np.ndarray
    counts: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Mean of each seed, (…, S)."""
        return self.sums.sum(axis=-1) / self.counts.sum()
