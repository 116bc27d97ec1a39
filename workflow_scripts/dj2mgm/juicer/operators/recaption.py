"""A new caption of one row, and the report on those of all rows."""

from dataclasses import dataclass

from data_juicer.utils.constant import Fields
from datasets import Features, Value
from loguru import logger

from dj2mgm.errors import InputError

from .batched_image_text_similarity_filter import ORIGINAL
from .caption_log_likelihood_filter import STAT as LOG_LIKELIHOOD

RECORD = "recaption"  # key in a row's meta
TOO_MANY_UNUSABLE = 0.1
ENOUGH_TO_JUDGE = 5  # images: that one or two get no usable caption says little about a captioner


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
    """The features of a dataset whose rows have records; a batch without records does not show their types."""
    features = dict(known)
    lists = {name: [Value("float64")] for name in (LOG_LIKELIHOOD, ORIGINAL)}
    for column, more in ((Fields.stats, lists), (Fields.meta, RECORD_FEATURES)):
        columns = features.get(column, {})
        if isinstance(columns, dict):  # not JSON, which Data-Juicer's own columns are, and which takes any key
            features[column] = columns | more
    return Features(features)


def whole_report(counts: dict, min_similarity: float) -> dict:
    """The report with every count, of rows below the limit: captioned now, captioned before, without a usable caption
    by reason; and of a captioner that asks a server, what that has cost."""
    report = {key: counts.get(key, 0) for key in ("below", "captioned", "cached")}
    unusable = dict(sorted(counts.get("unusable", {}).items()))
    server = {key: counts[key] for key in ("server",) if key in counts}
    return report | {"unusable": unusable, "min_similarity": min_similarity} | server


def judge_captioner(name: str, report: dict, example: str, max_caption_length: int) -> None:
    """Warn of a captioner whose captions often cannot be used.

    Args:
        report: as `whole_report` returns it.
        example: one of the captions that cannot be used.

    Raises:
        InputError: none of its captions can be used, of five images at least.
    """
    unusable = sum(report["unusable"].values())
    if unusable <= TOO_MANY_UNUSABLE * report["below"]:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in report["unusable"].items())
    problem = f"captioner {name}: {unusable} of {report['below']} images got no caption that can be used ({reasons})"
    if example:
        problem += f", such as {example[:60]!r}"
    if unusable == report["below"] >= ENOUGH_TO_JUDGE:
        check = (
            "look above for what the server answers, and check that its model takes images"
            if "server" in report
            else "check that the captioner is trained and fits its processor, or name another one in the recipe"
        )
        raise InputError(f"{problem}; {check} (captions may have {max_caption_length} characters: max_caption_length)")
    logger.warning(problem)
