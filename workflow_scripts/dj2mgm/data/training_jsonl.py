"""Writing what is trained on: LLaVA rows with absolute image paths, every image opened and verified once."""

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, TypeVar

from dj2mgm.data import formats
from dj2mgm.data.formats import control_problem, image_problem, images_of
from dj2mgm.data.held_out import HeldOut
from dj2mgm.data.images import BadImage, load_image, locate_image
from dj2mgm.data.rows import NumberedIds
from dj2mgm.errors import InputError
from dj2mgm.files import write_jsonl
from dj2mgm.streaming import DiskMap, map_in_order

T = TypeVar("T")
BATCH = 500  # rows that a process checks at a time
SHOWN = 5  # bad rows named in the error message


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
        control_tokens: of the chat formats in use, beside those that no text may contain.
        several_images: whether the model takes more than one in a conversation.
        one_question: whether it takes nothing but one question about one image.
    """

    on_bad_row: str
    max_samples: int
    budget: int | None
    seed: int
    control_tokens: tuple[str, ...] = ()
    several_images: bool = False
    one_question: bool = False


def write_training_jsonl(
    rows: Iterable[dict], root: str | Path, held_out: HeldOut, output: Path, rules: SampleRules, processes: int
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
        rows_in, bad = _write_good(_checked_rows(rows, root, held_out, rules, processes), good)
        if bad.count and rules.on_bad_row == "refuse":
            named = "; ".join(f"row {identifier}: {found.detail}" for identifier, found in bad.first)
            more = " …" if bad.count > SHOWN else ""
            raise InputError(
                f"{bad.count} of {rows_in} rows of {output.stem} cannot be trained on: {named}{more}. "
                f"Fix them, or set jsonl.on_bad_row: drop to leave such rows out"
            )
        chosen, dropped, repeats = _choose(rows_in - bad.count, rules)
        written = write_jsonl(output, _samples(good, chosen, repeats, rules.seed))
    return {
        "rows_in": rows_in,
        "rows_out": written,
        "dropped": dict(sorted((bad.reasons + dropped).items())),
        "repeated": repeats,
    }


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


def _write_good(checked: Iterable[tuple[str, dict | BadRow]], file: IO[str]) -> tuple[int, BadRows]:
    """Write the good ones, one a line; return how many there were in all, and the bad ones."""
    rows_in, bad = 0, BadRows()
    for identifier, found in checked:
        rows_in += 1
        if isinstance(found, BadRow):
            bad.add(identifier, found)
        else:
            file.write(json.dumps(found, ensure_ascii=False) + "\n")
    return rows_in, bad


def _choose(good: int, rules: SampleRules) -> tuple[list[int], Counter, int]:
    """Sizes of the random samples that good rows go through, one of the other; rows these leave out; repeats."""
    sizes, dropped = [good], Counter()
    wanted = good if rules.budget is None else rules.budget
    for reason, most in (("over_max_samples", rules.max_samples), ("over_budget", wanted)):
        if sizes[-1] > most:
            dropped[reason] = sizes[-1] - most
            sizes.append(most)
    return sizes, dropped, max(0, wanted - sizes[-1]) if rules.budget and good else 0


def _samples(good: IO[str], sizes: list[int], repeats: int, seed: int) -> Iterator[dict]:
    """The rows that are left by the samples, then `repeats` of them with ids of their own (`<id>#2`): whole passes,
    then rows at random, so that all are used about equally."""
    ids, count = NumberedIds("#"), sizes[-1]
    passes = [sizes] * (1 + repeats // max(count, 1))
    if rest := repeats % max(count, 1):
        passes.append([*sizes, rest])
    for part in passes:
        for row in _sampled(good, part, seed):
            yield row | {"id": ids.add(row["id"])}


def _sampled(good: IO[str], sizes: list[int], seed: int) -> Iterator[dict]:
    """Rows that are left by samples of these `sizes`, one of the other, which are independent of each other."""
    good.seek(0)
    lines: Iterator[str] = iter(good)
    for turn, (total, count) in enumerate(pairwise(sizes)):
        lines = _sample(lines, total, count, random.Random(f"{seed}/{turn}" if turn else seed))
    yield from map(json.loads, lines)


def _sample(items: Iterable[T], total: int, count: int, rng: random.Random) -> Iterator[T]:
    """`count` of `total` items at random, in their order, without holding any (Knuth, TAOCP 3.4.2, algorithm S)."""
    for seen, item in enumerate(items):
        if rng.random() * (total - seen) < count:
            count -= 1
            yield item


def _checked_rows(
    rows: Iterable[dict], root: str | Path, held_out: HeldOut, rules: SampleRules, processes: int
) -> Iterator[tuple[str, dict | BadRow]]:
    """Each row's id, and the row with its images' absolute paths or why it cannot be trained on.

    Every image is opened once, however many rows it has.
    """
    images = DiskMap()  # what each is found to be; nothing as long as a process is at it

    def jobs() -> Iterator[tuple[list[dict], list[str]]]:
        iterator = iter(rows)
        while batch := list(islice(iterator, BATCH)):
            named = dict.fromkeys(image for row in batch for image in images_of(row))
            new = [image for image in named if image not in images]
            images.fill((image, "") for image in new)
            yield batch, new

    for batch, found in map_in_order(partial(_check_batch, root, held_out, rules), jobs(), processes):
        images.replace((image, json.dumps(result)) for image, result in found.items())
        for row, problem in batch:
            if problem is None and "image" in row:
                found_images = [json.loads(images.get(image)) for image in images_of(row)]
                problem = next((of_image for _, of_image in found_images if of_image), None)
                paths = [path for path, _ in found_images]
                row = row | {"image": paths[0] if isinstance(row["image"], str) else paths}
            yield row["id"], BadRow(*problem) if problem else row


Problem = tuple[str, str] | None  # reason and detail of a `BadRow`


def _check_batch(
    root: str | Path, held_out: HeldOut, rules: SampleRules, job: tuple[list[dict], list[str]]
) -> tuple[list[tuple[dict, Problem]], dict[str, tuple[str, Problem]]]:
    """The rows, each with what is wrong with its text; the images, each with its absolute path or what is wrong."""
    rows, images = job
    texts = [(row, _check_text(row, rules)) for row in rows]
    return texts, {image: _check_image(root, held_out, image) for image in images}


def _check_text(row: dict, rules: SampleRules) -> Problem:
    problems = {"image_token": image_problem(row), "control_token": control_problem(row, rules.control_tokens)}
    if len(images_of(row)) > 1 and not rules.several_images:
        problems["several_images"] = f"it has {len(images_of(row))} images, and this model takes one"
    if rules.one_question and not images_of(row):
        problems["no_image"] = "it has no image, and this model takes one"
    if rules.one_question and len(row["conversations"]) > 2:
        problems["several_questions"] = "it has several questions, and this model takes one"
    return next(((reason, detail) for reason, detail in problems.items() if detail), None)


def _check_image(root: str | Path, held_out: HeldOut, relative: str) -> tuple[str, Problem]:
    try:
        path = locate_image(root, relative)
        load_image(path)
    except BadImage as error:
        return "", (error.reason, f"{relative}: {error}")
    if match := held_out.match(path):
        of = "a copy of " if match == "copy" else ""
        return "", ("held_out", f"{relative}: held_out: {path} is {of}an image that is kept for evaluation")
    return str(path), None


def caption_rows(rows: Iterable[dict], question: str) -> Iterator[dict]:
    """Data-Juicer rows as LLaVA rows, of which a model learns to say the caption.

    Args:
        question: what a row without a question of its own asks; may be empty.
    """
    for row in rows:
        asked = row.get("question") or question
        yield formats.conversation(row["id"], row["images"][0], asked, formats.caption_of(row["text"]))
