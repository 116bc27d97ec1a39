"""Whether a card says what the record says: every number in it, and nothing that names no record."""

import math
import re
from decimal import Decimal
from pathlib import Path

import yaml
from huggingface_hub import ModelCard

from dj2mgm.errors import InputError
from dj2mgm.files import readable
from dj2mgm.publishing.records import FOLDER, MARK, UNITS, Records, show

# no part may hold what begins the next figure, so that each character is read once
FIGURE = re.compile(rf'\[([^][\n]*)\]\({FOLDER}/([^ )[\n]+) "([^"\n]*)"\)')
CODE = re.compile(r"`[^`\n]+`")
FENCE = "```"
LARGEST = 4 << 20  # bytes of a card
DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]+)?")
NUMBER = re.compile(r"\b\d[\d.,]*")  # not within a name, such as bf16
REMEDY = "correct it, or delete the folder and publish again"


def check_card(folder: Path, records: dict[str, str]) -> int:
    """
    Args:
        folder: with README.md and records/.
        records: by name in records/, the run's own files.

    Returns:
        How many figures there are.

    Raises:
        InputError: a figure differs from its record, a number names none, or a record is not the run's (any more).
    """
    for name, path in records.items():
        copy = folder / FOLDER / name
        if not copy.is_file() or copy.read_bytes() != Path(path).read_bytes():
            raise InputError(f"{copy} is not what {path} says now; publish again")
    held = {path.relative_to(folder / FOLDER).as_posix() for path in (folder / FOLDER).rglob("*") if path.is_file()}
    if others := sorted(held - records.keys() - {MARK}):
        raise InputError(f"{folder / FOLDER / others[0]} is no record of this run; delete it")
    card, known = folder / "README.md", Records(folder)
    head, text = _parts(card)
    checked = 0
    text = _without_code(text)
    for match in FIGURE.finditer(text):
        shown, file, place = match.groups()
        if not _says(shown, known.value(file, place)):
            line = head.count("\n") + text[: match.start()].count("\n") + 1
            raise InputError(
                f"{card}, line {line}: states {shown}, and {FOLDER}/{file} {place} is {known.value(file, place)}; "
                f"{REMEDY}"
            )
        checked += 1
    bare = FIGURE.sub("", text)
    if match := NUMBER.search(bare):
        line = head.count("\n") + bare[: match.start()].count("\n") + 1
        raise InputError(f"{card}, line {line}: the number {match[0]} names no record; {REMEDY}")
    return checked + _check_scores(card, known)


def _parts(card: Path) -> tuple[str, str]:
    """The head with its metadata, and the text."""
    try:
        if (size := card.stat().st_size) > LARGEST:
            raise InputError(f"{card} has {size} bytes, and a card has at most {LARGEST}; {REMEDY}")
        with readable(card, remedy=REMEDY):
            content = card.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{card} is not there; delete the folder and publish again") from None
    head, mark, text = content.removeprefix("---\n").partition("\n---\n")
    if not content.startswith("---\n") or not mark:
        raise InputError(f"{card} does not begin with its metadata; {REMEDY}")
    return f"---\n{head}{mark}", text


def _check_scores(card: Path, known: Records) -> int:
    """The scores in the metadata, from which the hub makes its own table."""
    with readable(card, yaml.YAMLError, LookupError, TypeError, AttributeError, remedy=REMEDY):
        results = ModelCard.load(card).data.eval_results or []
    for result in results:
        source = result.metric_args
        if not isinstance(source, dict) or not {"record", "place"} <= source.keys():
            raise InputError(f"{card}: metadata: {result.metric_type} names no record and place in args; {REMEDY}")
        value = known.value(str(source["record"]).removeprefix(f"{FOLDER}/"), str(source["place"]))
        if result.metric_value != value:
            raise InputError(
                f"{card}: its metadata say that {result.metric_type} is {result.metric_value}, and "
                f"{source['record']} {source['place']} is {value}; {REMEDY}"
            )
    return len(results)


def _says(shown: str, value: object) -> bool:
    """Whether a text is the value, as far as its digits go."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return shown == {None: "–", True: "yes", False: "no"}.get(value, str(value))
    number, _, unit = shown.partition(" ")
    if unit not in ("", *UNITS):
        return False
    if shown == show(value, unit):  # also 1e-05
        return True
    if not DECIMAL.fullmatch(number) or not math.isfinite(value):
        return False
    stated, exact = Decimal(number), Decimal(repr(value)) * {"": 1, **UNITS}[unit]
    last = Decimal(1).scaleb(stated.as_tuple().exponent)
    return stated == exact if isinstance(value, int) else abs(stated - exact) <= last / 2


def _without_code(text: str) -> str:
    """Return the text with fenced and inline code taken out, in as many lines; a fence that does not end is text."""
    lines = text.split("\n")
    begin = None
    for number, line in enumerate(lines):
        if begin is None:
            begin = number if line.startswith(FENCE) else None
        elif line == FENCE:
            lines[begin : number + 1] = [""] * (number + 1 - begin)
            begin = None
    return CODE.sub("", "\n".join(lines))
