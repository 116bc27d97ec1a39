"""Comparison of a card with the record of its run: each number of the card is in the record, and no other number."""

import math
import re
from decimal import Decimal
from pathlib import Path

import yaml
from huggingface_hub import ModelCard

from dj2mgm.errors import InputError
from dj2mgm.publishing.run_record import MARKER, RECORDS, UNIT_FACTORS, RunRecord, format_value
from dj2mgm.storage.files import readable
from dj2mgm.storage.plain_files import check_tree

# no group matches the start of another figure, so each character is read once
FIGURE = re.compile(rf'\[([^][\n]*)\]\({RECORDS}/([^ )[\n]+) "([^"\n]*)"\)')
CODE = re.compile(r"`[^`\n]+`")
FENCE = "```"
MAX_CARD_BYTES, MAX_HEAD_LENGTH = 4 << 20, 256 << 10  # bytes of a card; characters of its metadata
DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]+)?")
NUMBER = re.compile(r"\b\d[\d.,]*")  # but not inside a name such as bf16
REMEDY = "correct it, or delete the folder and publish again"


def check_card(folder: Path, records: dict[str, str]) -> int:
    """Compare every figure of a card with the record of its run; return the number of figures.

    `folder` has README.md and records/; `records` are paths of the run's own files by their names in records/. Figures
    without a record, changed records, links, pipes and devices are refused.
    """
    check_tree(folder)
    for name, path in records.items():
        copy = folder / RECORDS / name
        if not copy.is_file() or not Path(path).is_file() or copy.read_bytes() != Path(path).read_bytes():
            raise InputError(f"{copy} differs from {path}; publish again")
    copied_files = {
        path.relative_to(folder / RECORDS).as_posix() for path in (folder / RECORDS).rglob("*") if path.is_file()
    }
    if others := sorted(copied_files - records.keys() - {MARKER}):
        raise InputError(f"{folder / RECORDS / others[0]} is not a record of this run; delete it")
    card, record = folder / "README.md", RunRecord(folder)
    head, text = _split_card(card)
    checked = 0
    text = _remove_code(text)
    for match in FIGURE.finditer(text):
        figure, file, pointer = match.groups()
        if not _matches_value(figure, record.get_value(file, pointer)):
            line = head.count("\n") + text[: match.start()].count("\n") + 1
            raise InputError(
                f"{card}, line {line}: states {figure}, but {RECORDS}/{file} {pointer} is "
                f"{record.get_value(file, pointer)}; {REMEDY}"
            )
        checked += 1
    remaining_text = FIGURE.sub("", text)
    if match := NUMBER.search(remaining_text):
        line = head.count("\n") + remaining_text[: match.start()].count("\n") + 1
        raise InputError(f"{card}, line {line}: the number {match[0]} has no record; {REMEDY}")
    return checked + _check_scores(card, record)


def _split_card(card: Path) -> tuple[str, str]:
    """Return the metadata block and the text."""
    if not card.is_file():
        raise InputError(f"{card} is missing; delete the folder and publish again")
    if (size := card.stat().st_size) > MAX_CARD_BYTES:
        raise InputError(
            f"{card} has {size} bytes; a card may have at most {MAX_CARD_BYTES}. Delete the folder and publish again"
        )
    with readable(card, remedy=REMEDY):
        content = card.read_text(encoding="utf-8")
    head, mark, text = content.removeprefix("---\n").partition("\n---\n")
    if not content.startswith("---\n") or not mark:
        raise InputError(f"{card} does not begin with its metadata; {REMEDY}")
    if len(head) > MAX_HEAD_LENGTH:
        raise InputError(f"{card}: its metadata have more than {MAX_HEAD_LENGTH} characters; {REMEDY}")
    return f"---\n{head}{mark}", text


def _check_scores(card: Path, record: RunRecord) -> int:
    """Check the scores in the metadata, which the hub shows in a table."""
    with readable(card, yaml.YAMLError, LookupError, TypeError, AttributeError, remedy=REMEDY):
        results = ModelCard.load(card).data.eval_results or []
    for result in results:
        source = result.metric_args
        if not isinstance(source, dict) or not {"record", "place"} <= source.keys():
            raise InputError(f"{card}: metadata: the args of {result.metric_type} have no record and place; {REMEDY}")
        value = record.get_value(str(source["record"]).removeprefix(f"{RECORDS}/"), str(source["place"]))
        if result.metric_value != value:
            raise InputError(
                f"{card}: its metadata state {result.metric_value} for {result.metric_type}, but {source['record']} "
                f"{source['place']} is {value}; {REMEDY}"
            )
    return len(results)


def _matches_value(figure: str, value: object) -> bool:
    """Return whether a text states the value, to the precision of its digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return figure == {None: "–", True: "yes", False: "no"}.get(value, str(value))
    number, _, unit = figure.partition(" ")
    if unit not in ("", *UNIT_FACTORS):
        return False
    if figure == format_value(value, unit):  # also 1e-05
        return True
    if not DECIMAL.fullmatch(number) or not math.isfinite(value):
        return False
    decimal, exact = Decimal(number), Decimal(repr(value)) * {"": 1, **UNIT_FACTORS}[unit]
    last_digit = Decimal(1).scaleb(decimal.as_tuple().exponent)
    return decimal == exact if isinstance(value, int) else abs(decimal - exact) <= last_digit / 2


def _remove_code(text: str) -> str:
    """Blank out fenced and inline code, keeping the number of lines; an unclosed fence is text."""
    lines = text.split("\n")
    begin = None
    for number, line in enumerate(lines):
        if begin is None:
            begin = number if line.startswith(FENCE) else None
        elif line == FENCE:
            lines[begin : number + 1] = [""] * (number + 1 - begin)
            begin = None
    return CODE.sub("", "\n".join(lines))
