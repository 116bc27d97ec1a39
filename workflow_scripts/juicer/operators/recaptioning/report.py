"""Counts of what a captioner said, batch by batch, and whether that is good enough."""

from collections import Counter

from loguru import logger

from errors import InputError

TOO_MANY_UNUSABLE = 0.1
ENOUGH_TO_JUDGE = 5  # images: that one or two get no usable caption says little about a captioner


def new_report() -> dict:
    """Counts of rows below the limit: captioned now, captioned before; without a usable caption, by reason."""
    return {"below": 0, "captioned": 0, "cached": 0, "unusable": {}, "min_similarity": None}


def merge_reports(one: dict, other: dict) -> dict:
    """Of all rows of both; with one of the captions that cannot be used as `example`, if there are any."""
    merged = {key: one[key] + other[key] for key in ("below", "captioned", "cached")}
    merged["unusable"] = dict(sorted((Counter(one["unusable"]) + Counter(other["unusable"])).items()))
    merged["min_similarity"] = other["min_similarity"] if one["min_similarity"] is None else one["min_similarity"]
    example = one.get("example") or other.get("example")
    return merged | ({"example": example} if example else {})


def judge_captioner(name: str, report: dict, max_caption_length: int) -> None:
    """Warn of a captioner that often says nothing that can be used; take the example out of its report.

    Raises:
        InputError: it never said anything else, about five images at least.
    """
    example = report.pop("example", "")
    unusable = sum(report["unusable"].values())
    if unusable <= TOO_MANY_UNUSABLE * report["below"]:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in report["unusable"].items())
    found = (
        f"captioner {name}: {unusable} of {report['below']} images got no caption that can be used "
        f"({reasons}), such as {example[:60]!r}"
    )
    if unusable == report["below"] >= ENOUGH_TO_JUDGE:
        raise InputError(
            f"{found}; check that the captioner is trained and fits its processor, or name another one in the "
            f"recipe (captions may have {max_caption_length} characters: max_caption_length)"
        )
    logger.warning(found)
