"""A filter that drops captions that their own captioner found unlikely.

    process:
      - caption_log_likelihood_filter: {min_log_likelihood: -3.0}

It reads the stat that `low_similarity_recaption_mapper` writes. Captions that no captioner has written are kept.
"""

import numpy as np
from data_juicer.ops.base_op import OPERATORS, Filter
from data_juicer.utils.constant import Fields

from .declarations import Declarations

NAME = "caption_log_likelihood_filter"
STAT = "caption_log_likelihood"


@OPERATORS.register_module(NAME)
class CaptionLogLikelihoodFilter(Declarations, Filter):
    """A filter that keeps rows whose caption has at least a given log-likelihood, and rows without one.

    The stat `caption_log_likelihood` holds one number in nats, for the whole caption. It is empty if no captioner has
    written the caption, or if the captioner reports no log-likelihood.
    """

    _batched_op = True

    def __init__(self, min_log_likelihood: float = -3.0, *args, **kwargs):
        """Initialize the operator.

        Args:
            min_log_likelihood: lowest log-likelihood to keep, in nats.
        """
        super().__init__(*args, **kwargs)
        self.min_log_likelihood = min_log_likelihood

    def compute_stats_batched(self, samples: dict) -> dict:
        for stats in samples[Fields.stats]:
            value = stats.get(STAT)
            stats[STAT] = np.array([] if value is None else value, dtype=np.float64)
        return samples

    def process_single(self, sample: dict) -> bool:
        return all(self.get_keep_boolean(value, self.min_log_likelihood) for value in sample[Fields.stats][STAT])
