"""What is noted about a row whose caption was written anew."""

from dataclasses import dataclass

from data_juicer.utils.constant import Fields
from datasets import Features, Value

from ..caption_log_likelihood_filter import STAT as LOG_LIKELIHOOD
from ..similarity_limit import ORIGINAL

RECORD = "recaption"


@dataclass(frozen=True)
class Recaption:
    """What became of a row below the limit. Without a usable caption, `problem` says why, and the row is as it was."""

    original: str
    original_similarity: float
    caption: str | None = None
    similarity: float | None = None
    log_likelihood: float | None = None  # nats; None if the captioner tells none
    problem: str | None = None


RECORD_FEATURES = {
    RECORD: {
        "original": Value("string"),
        "original_similarity": Value("float64"),
        "caption": Value("string"),
        "similarity": Value("float64"),
        "log_likelihood": Value("float64"),
        "problem": Value("string"),
    }
}


def with_record(known: Features) -> Features:
    """The features of a dataset whose rows have records; a batch may hold none that their types could be seen from."""
    features = dict(known)
    lists = {name: [Value("float64")] for name in (LOG_LIKELIHOOD, ORIGINAL)}
    for column, more in ((Fields.stats, lists), (Fields.meta, RECORD_FEATURES)):
        columns = features.get(column, {})
        if isinstance(columns, dict):  # not JSON, which Data-Juicer's own columns are, and which takes any key
            features[column] = columns | more
    return Features(features)
