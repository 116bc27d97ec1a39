"""The new caption of a row, and the report on the new captions of all rows."""

from dataclasses import dataclass

from data_juicer.utils.constant import Fields
from datasets import Features, Value
from loguru import logger

from dj2mgm.errors import InputError

from .batched_image_text_similarity_filter import ORIGINAL
from .caption_log_likelihood_filter import STAT as LOG_LIKELIHOOD

RECORD = "recaption"  # key in a row's meta
TOO_MANY_UNUSABLE = 0.1
ENOUGH_TO_JUDGE = 5  # images; one or two without a usable caption do not prove that a captioner is broken


@dataclass(frozen=True)
class Recaption:
    """The result for a row below the limit. Without a usable caption, `problem` has the reason and the row is kept."""

    original: str
    original_similarity: float
    caption: str | None = None
    similarity: float | None = None
    log_likelihood: float | None = None  # nats; None if the captioner reports none
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
    """Return the features of a dataset with records; they cannot be inferred from a batch without records."""
    features = dict(known)
    lists = {name: [Value("float64")] for name in (LOG_LIKELIHOOD, ORIGINAL)}
    for column, more in ((Fields.stats, lists), (Fields.meta, RECORD_FEATURES)):
        columns = features.get(column, {})
        if isinstance(columns, dict):  # not JSON, the type of Data-Juicer's own columns, which takes any key
            features[column] = columns | more
    return Features(features)


def complete_report(counts: dict, min_similarity: float) -> dict:
    """Return the report on rows below the limit, with every count even if it is 0.

    It counts rows captioned now, rows captioned in earlier runs, rows without a usable caption by reason, and the cost
    of a captioner on a server.
    """
    report = {key: counts.get(key, 0) for key in ("below", "captioned", "cached")}
    unusable = dict(sorted(counts.get("unusable", {}).items()))
    server = {key: counts[key] for key in ("server",) if key in counts}
    return report | {"unusable": unusable, "min_similarity": min_similarity} | server


def judge_captioner(name: str, report: dict, example: str, max_caption_length: int) -> None:
    """Warn of a captioner whose captions often cannot be used.

    Args:
        name: name of the captioner.
        report: result of `complete_report`.
        example: one of the captions that cannot be used.
        max_caption_length: largest number of characters, for the message.

    Raises:
        InputError: If no caption of at least five images can be used.
    """
    unusable = sum(report["unusable"].values())
    if unusable <= TOO_MANY_UNUSABLE * report["below"]:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in report["unusable"].items())
    problem = f"captioner {name}: {unusable} of {report['below']} images got no usable caption ({reasons})"
    if example:
        problem += f", such as {example[:60]!r}"
    if unusable == report["below"] >= ENOUGH_TO_JUDGE:
        check = (
            "Read the server's answers above, and check that its model takes images"
            if "server" in report
            else "Check that the captioner is trained and fits its processor, or name another one in the recipe"
        )
        raise InputError(f"{problem}. {check} (max_caption_length allows {max_caption_length} characters)")
    logger.warning(problem)
