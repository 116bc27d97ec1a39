"""Writing what is trained on: LLaVA rows with absolute image paths, every image opened and verified once."""

import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import IO

from dj2mgm.data import formats
from dj2mgm.data.formats import control_problem, image_problem, list_images
from dj2mgm.data.held_out_images import HeldOutImages
from dj2mgm.data.images import BadImage, load_image, locate_image
from dj2mgm.data.rows import NumberedIds
from dj2mgm.errors import InputError
from dj2mgm.files import write_jsonl
from dj2mgm.streaming import DiskMap, map_in_order

BATCH = 500  # rows that a process checks at a time
SHOWN = 5  # bad rows named in the error message


Rows = Counter  # numbers of rows, by source; None where rows have none


@dataclass(frozen=True)
class BadRow:
    """Why a row cannot be trained on: `reason` is counted, `detail` says more."""

    reason: str
    detail: str


@dataclass(frozen=True)
class SampleRules:
    """What becomes of bad rows, and how many samples are written.

    Args:
        on_bad_row: `refuse` raises and writes nothing, `drop` leaves such rows out and counts them by reason.
        max_samples: rows over this number are left out at random.
        budget: exactly so many samples are written: too few rows are repeated; None: as many as there are.
        seed: of whatever is chosen at random.
        amounts: by source: how many of its rows are taken, or, as a decimal number, how often each.
        leaked: absolute paths of images that copy what is evaluated on; rows about them are left out.
        control_tokens: of the chat formats in use, beside those that no text may contain.
        several_images: whether the model takes more than one in a conversation.
        one_question: whether it takes nothing but one question about one image.
        leaked_rows: ids of rows that ask what is evaluated on; they are left out.
    """

    on_bad_row: str
    max_samples: int
    budget: int | None
    seed: int
    amounts: Mapping[str, float] = field(default_factory=dict)
    leaked: frozenset[str] = frozenset()
    control_tokens: tuple[str, ...] = ()
    several_images: bool = False
    one_question: bool = False
    leaked_rows: frozenset[str] = frozenset()


def write_training_jsonl(
    rows: Iterable[dict], root: str | Path, held_out: HeldOutImages, output: Path, rules: SampleRules, processes: int
) -> dict:
    """Verify every row and image, then write LLaVA rows with absolute paths; return counts that add up.

    Rows go through `processes` processes and a temporary file beside `output`; memory does not grow with their number.

    Args:
        rows: LLaVA rows with image paths relative to `root`. Samples keep their order; repeated ones follow.
        held_out: images of which no row may be trained on.

    Raises:
        InputError: names rows, paths and reasons.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile("w+", encoding="utf-8", dir=output.parent) as good:
        usable, bad, leaked = _write_good(_checked_rows(rows, root, held_out, rules, processes), good, rules)
        rows_in = usable.total() + bad.count + leaked.total()
        if bad.count and rules.on_bad_row == "refuse":
            named = "; ".join(f"row {identifier}: {found.detail}" for identifier, found in bad.first)
            more = " …" if bad.count > SHOWN else ""
            raise InputError(
                f"{bad.count} of {rows_in} rows of {output.stem} cannot be trained on: {named}{more}. "
                f"Fix them, or set jsonl.on_bad_row: drop to leave such rows out"
            )
        if rows_in and not usable:
            reasons = ", ".join(f"{count} {reason}" for reason, count in (bad.reasons + leaked).most_common())
            first = "".join(f"; the first is row {identifier}: {found.detail}" for identifier, found in bad.first[:1])
            raise InputError(f"no row of {output.stem} is left to train on ({reasons} of {rows_in} rows{first})")
        used, wanted = apportion(usable, rules, output.stem)
        words: Rows = Counter()
        written = write_jsonl(output, _counted(_samples(good, usable, used, wanted, rules), words, rules))
    left_out = sum(usable[source] - min(used[source], wanted[source]) for source in usable)
    counts = {
        "rows_in": rows_in,
        "rows_out": written,
        "dropped": dict(sorted((bad.reasons + _reasons(left_out, usable, rules) + leaked).items())),
        "repeated": written + left_out - usable.total(),
    }
    named = {source: rows for source, rows in usable.items() if source is not None}
    by_source = {
        source: {"usable": rows, "rows_out": wanted[source], "words": words[source]}
        for source, rows in sorted(named.items())
    }
    return counts | ({"sources": by_source} if by_source else {})


@dataclass
class BadRows:
    """How many there are, why, and the first few by id."""

    reasons: Counter = field(default_factory=Counter)
    first: list[tuple[str, BadRow]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.reasons.total()

    def add(self, identifier: str, found: BadRow) -> None:
        self.reasons[found.reason] += 1
        if len(self.first) < SHOWN:
            self.first.append((identifier, found))


def _write_good(
    checked: Iterable[tuple[str, dict | BadRow | str]], file: IO[str], rules: SampleRules
) -> tuple[Rows, BadRows, Counter[str]]:
    """Write the good ones, one a line; return how many these are by source, None where rows have none; the bad ones;
    and how many are left out since they leak, by how."""
    good, bad, leaked = Counter(), BadRows(), Counter()
    for identifier, found in checked:
        if isinstance(found, str):
            leaked[found] += 1
        elif isinstance(found, BadRow):
            bad.add(identifier, found)
        else:
            good[find_source(found, rules)] += 1
            file.write(json.dumps(found, ensure_ascii=False) + "\n")
    return good, bad, leaked


def apportion(usable: Rows, rules: SampleRules, stage: str) -> tuple[Rows, Rows]:
    """How many different rows of each source are used, and how many samples they become.

    The amounts decide, scaled to the most that there may be, and then to the budget.

    Raises:
        InputError: a source has fewer rows than are asked for, or none is to be trained on.
    """
    asked = Counter()
    for source, rows in usable.items():
        amount = rules.amounts.get(source, 1.0)
        asked[source] = amount if isinstance(amount, int) else round(amount * rows)
        if isinstance(amount, int) and amount > rows:
            raise InputError(
                f"sources.{source}: {amount} rows are asked for, and {rows} of {stage} can be trained on; "
                f"ask for fewer, or state how often each is taken, {amount / rows:.2f}"
            )
    if usable and not asked.total():
        there = ", ".join(f"{source}: {rules.amounts[source]} of {rows} rows" for source, rows in usable.items())
        raise InputError(f"sources: the amounts leave no row of {stage} to train on ({there}); raise one")
    capped = scale(asked, min(asked.total(), rules.max_samples))
    used = Counter({source: min(usable[source], rows) for source, rows in capped.items()})
    return used, capped if rules.budget is None else scale(capped, rules.budget)


def scale(rows: Rows, total: int) -> Rows:
    """In the same proportions as nearly as whole numbers allow, by largest remainders (Hamilton's method)."""
    exact = {source: Fraction(count * total, rows.total()) for source, count in rows.items()}
    scaled = Counter({source: math.floor(share) for source, share in exact.items()})
    by_remainder = sorted(exact, key=lambda source: (scaled[source] - exact[source], str(source)))
    scaled.update(by_remainder[: total - scaled.total()] if exact else ())
    return scaled


def find_source(row: dict, rules: SampleRules) -> str | None:
    """None in a dataset that has no sources, where a row's own key `source` says nothing."""
    return row.get("source") if rules.amounts else None


def _reasons(left_out: int, usable: Rows, rules: SampleRules) -> Counter:
    """Why good rows are left out."""
    amounts = [amount for source, amount in rules.amounts.items() if source in usable]
    if any(amount != 1.0 or isinstance(amount, int) for amount in amounts):  # 1 is one row
        return +Counter({"sampled": left_out})
    over_max = max(0, usable.total() - rules.max_samples)
    return +Counter({"over_max_samples": over_max, "over_budget": left_out - over_max})


def _samples(good: IO[str], usable: Rows, used: Rows, wanted: Rows, rules: SampleRules) -> Iterator[dict]:
    """As many samples of each source as are wanted, rows in their order: first each that is used once, then again with
    ids of their own (`<id>#2`), the last time some of them at random. So all of a source are used about equally."""
    ids = NumberedIds("#")
    for turn in range(max((math.ceil(wanted[source] / rows) for source, rows in used.items() if rows), default=0)):
        last = Counter({source: max(0, min(rows, wanted[source] - turn * rows)) for source, rows in used.items()})
        for row in _sampled(good, [usable, used, last], rules):
            yield row | {"id": ids.add(row["id"])}


def _counted(rows: Iterable[dict], words: Rows, rules: SampleRules) -> Iterator[dict]:
    """Count the words of each source's samples while they are written."""
    for row in rows:
        words[find_source(row, rules)] += sum(len(turn["value"].split()) for turn in row["conversations"])
        yield row


def _sampled(good: IO[str], sizes: list[Rows], rules: SampleRules) -> Iterator[dict]:
    """Rows that are left by samples of these `sizes`, one of the other, which are independent of each other."""
    good.seek(0)
    rows: Iterator[dict] = map(json.loads, good)
    distinct = [size for size, before in zip(sizes[1:], sizes, strict=False) if size != before]
    for turn, (total, count) in enumerate(pairwise([sizes[0], *distinct])):
        rows = _sample(rows, total, count, f"{rules.seed}/{turn}" if turn else rules.seed, rules)
    yield from rows


def _sample(rows: Iterable[dict], total: Rows, count: Rows, seed: int | str, rules: SampleRules) -> Iterator[dict]:
    """`count` of `total` rows of each source at random, in their order, without holding any (Knuth, TAOCP 3.4.2,
    algorithm S)."""
    left, wanted = Counter(total), Counter(count)
    numbers = {source: random.Random(seed if source is None else f"{seed}/{source}") for source in total}
    for row in rows:
        source = find_source(row, rules)
        if numbers[source].random() * left[source] < wanted[source]:
            wanted[source] -= 1
            yield row
        left[source] -= 1


def _checked_rows(
    rows: Iterable[dict], root: str | Path, held_out: HeldOutImages, rules: SampleRules, processes: int
) -> Iterator[tuple[str, dict | BadRow | str]]:
    """Each row's id, and the row with its images' absolute paths, or why it cannot be trained on; if it leaks, how:
    `leaked` by an image, else `leaked_text`.

    Every image is opened once, however many rows it has.
    """
    images = DiskMap()  # what each is found to be; nothing as long as a process is at it

    def jobs() -> Iterator[tuple[list[dict], list[str]]]:
        iterator = iter(rows)
        while batch := list(islice(iterator, BATCH)):
            named = dict.fromkeys(image for row in batch for image in list_images(row))
            new = [image for image in named if image not in images]
            images.fill((image, "") for image in new)
            yield batch, new

    for batch, found in map_in_order(partial(_check_batch, root, held_out, rules), jobs(), processes):
        images.replace((image, json.dumps(result)) for image, result in found.items())
        for row, problem in batch:
            leaks = "leaked_text" if problem is None and row["id"] in rules.leaked_rows else ""
            if problem is None and "image" in row:
                found_images = [json.loads(images.get(image)) for image in list_images(row)]
                problem = next((of_image for _, of_image in found_images if of_image), None)
                paths = [path for path, _ in found_images]
                leaks = leaks if rules.leaked.isdisjoint(paths) else "leaked"
                row = row | {"image": paths[0] if isinstance(row["image"], str) else paths}
            yield row["id"], leaks or (BadRow(*problem) if problem else row)


Problem = tuple[str, str] | None  # reason and detail of a `BadRow`


def _check_batch(
    root: str | Path, held_out: HeldOutImages, rules: SampleRules, job: tuple[list[dict], list[str]]
) -> tuple[list[tuple[dict, Problem]], dict[str, tuple[str, Problem]]]:
    """The rows, each with what is wrong with its text; the images, each with its absolute path or what is wrong."""
    rows, images = job
    texts = [(row, _check_text(row, rules)) for row in rows]
    return texts, {image: _check_image(root, held_out, image) for image in images}


def _check_text(row: dict, rules: SampleRules) -> Problem:
    problems = {"image_token": image_problem(row), "control_token": control_problem(row, rules.control_tokens)}
    if len(list_images(row)) > 1 and not rules.several_images:
        problems["several_images"] = f"it has {len(list_images(row))} images, and this model takes one"
    if rules.one_question and not list_images(row):
        problems["no_image"] = "it has no image, and this model takes one"
    if rules.one_question and len(row["conversations"]) > 2:
        problems["several_questions"] = "it has several questions, and this model takes one"
    return next(((reason, detail) for reason, detail in problems.items() if detail), None)


def _check_image(root: str | Path, held_out: HeldOutImages, relative: str) -> tuple[str, Problem]:
    try:
        path = locate_image(root, relative)
        load_image(path)
    except BadImage as error:
        return "", (error.reason, f"{relative}: {error}")
    if match := held_out.match(path):
        of = "a copy of " if match == "copy" else ""
        return "", ("held_out", f"{relative}: held_out: {path} is {of}an image that is kept for evaluation")
    return str(path), None


def convert_pairs(rows: Iterable[dict], question: str) -> Iterator[dict]:
    """Data-Juicer rows as LLaVA rows, of which a model learns to say the caption.

    Args:
        question: what a row without a question of its own asks; may be empty.
    """
    for row in rows:
        asked = row.get("question") or question
        source = {"source": row["source"]} if "source" in row else {}
        yield (
            formats.build_conversation(row["id"], row["images"][0], asked, formats.extract_caption(row["text"]))
            | source
        )
