"""Writing what is trained on: LLaVA rows with absolute image paths, every image opened and verified once."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from files import write_jsonl
from formats import dj_jsonl, llava
from formats.images import BadImage, load_image, locate_image
from formats.prompts import CONTROL

SHOWN = 5  # bad rows named in the error message


class BadRow(Exception):
    """A row that cannot be trained on: `reason` is counted, the message says more."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class SampleRules:
    """What becomes of bad rows, and how many samples are written.

    Args:
        on_bad_row: `refuse` raises and writes nothing, `drop` leaves such rows out and counts them by reason.
        max_samples: rows over this number are left out at random.
        budget: exactly so many samples are written: too few rows are repeated; None: as many as there are.
        seed: of whatever is chosen at random.
    """

    on_bad_row: str
    max_samples: int
    budget: int | None
    seed: int


def write_training_jsonl(rows: list[dict], root: str | Path, output: Path, rules: SampleRules, threads: int) -> dict:
    """Verify every row and image, then write LLaVA rows with absolute paths; return counts that add up.

    `rows` are LLaVA rows with image paths relative to `root`. Samples keep the input's order; repeated ones follow.

    Raises:
        InputError: names rows, paths and reasons.
    """
    checked = _check_rows(rows, root, threads)
    bad = [(row, result) for row, result in zip(rows, checked, strict=True) if isinstance(result, BadRow)]
    if bad and rules.on_bad_row == "refuse":
        named = "; ".join(f"row {row['id']}: {result}" for row, result in bad[:SHOWN])
        raise InputError(
            f"{len(bad)} of {len(rows)} rows cannot be trained on: {named}{' …' if len(bad) > SHOWN else ''}. "
            f"Mend them, or set jsonl.on_bad_row: drop to leave such rows out"
        )
    good = [result for result in checked if isinstance(result, dict)]
    dropped = Counter(result.reason for _, result in bad)
    wanted = len(good) if rules.budget is None else rules.budget
    for reason, most in (("over_max_samples", rules.max_samples), ("over_budget", wanted)):
        if len(good) > most:
            dropped[reason] = len(good) - most
            good = _sample(good, most, rules.seed)
    more = list(_repeat(good, wanted - len(good), rules.seed)) if rules.budget and good else []
    written = write_jsonl(output, good + more)
    return {
        "rows_in": len(rows),
        "rows_out": written,
        "dropped": dict(sorted(dropped.items())),
        "repeated": len(more),
    }


def _sample(rows: list[dict], count: int, seed: int) -> list[dict]:
    """So many of the rows, at random, in their order."""
    return [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), count))]


def _repeat(rows: list[dict], count: int, seed: int) -> Iterator[dict]:
    """`count` repeats with ids of their own: whole passes, then rows at random, so that all are used about equally."""
    turn = 2
    while count > 0:
        for row in rows if count >= len(rows) else _sample(rows, count, seed):
            yield row | {"id": f"{row['id']}#{turn}"}
        count -= len(rows)
        turn += 1


def _check_rows(rows: list[dict], root: str | Path, threads: int) -> list[dict | BadRow]:
    """Each row with its image's absolute path, or why it cannot be trained on. Every image is opened once."""
    unique = sorted({row["image"] for row in rows if "image" in row})
    with ThreadPoolExecutor(threads) as pool:
        images = dict(zip(unique, pool.map(lambda image: _check_image(root, image), unique), strict=True))
    return [_check_row(row, images) for row in rows]


def _check_row(row: dict, images: dict[str, Path | BadRow]) -> dict | BadRow:
    text = "\n".join(turn["value"] for turn in row["conversations"]).replace(llava.IMAGE_TOKEN, "", 1)
    if control := CONTROL.search(text):
        return BadRow("control_token", f"its text holds the control token {control.group()}")
    if "image" not in row:
        return row
    image = images[row["image"]]
    return image if isinstance(image, BadRow) else row | {"image": str(image)}


def _check_image(root: str | Path, relative: str) -> Path | BadRow:
    try:
        path = locate_image(root, relative)
        load_image(path)
    except BadImage as error:
        return BadRow(error.reason, f"{relative}: {error}")
    return path


def caption_rows(rows: Iterable[dict], question: str) -> Iterator[dict]:
    """Data-Juicer rows as LLaVA rows, of which stage 1 learns to say the caption.

    Args:
        question: what a row without a question of its own asks; may be empty.
    """
    for row in rows:
        asked = row.get("question", question)
        yield llava.conversation(row["id"], row["images"][0], asked, dj_jsonl.caption_of(row["text"]))
