"""Writing what is trained on: LLaVA rows with absolute image paths, every image opened and verified once."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from errors import InputError
from files import write_jsonl
from formats import dj_jsonl, llava
from formats.images import BadImage, load_image, locate_image

SHOWN = 5  # bad images named in the error message


def write_training_jsonl(
    rows: list[dict], root: str | Path, output: Path, on_bad_image: str, max_samples: int, seed: int, threads: int
) -> dict:
    """Verify every image, then write LLaVA rows with absolute paths; return counts that add up.

    Args:
        rows: LLaVA rows with image paths relative to `root`.
        on_bad_image: `refuse` raises and writes nothing, `drop` leaves such rows out and counts them by reason.
        max_samples: rows over this number are left out at random (seeded), in the order of the input.

    Raises:
        InputError: names rows, paths and reasons.
    """
    verified = _verify(rows, root, threads)
    bad = [(row, result) for row, result in zip(rows, verified, strict=True) if isinstance(result, BadImage)]
    if bad and on_bad_image == "refuse":
        named = "; ".join(f"row {row['id']}, {row['image']}: {result}" for row, result in bad[:SHOWN])
        raise InputError(
            f"{len(bad)} of {len(rows)} rows have an image that cannot be trained on: {named}"
            f"{' …' if len(bad) > SHOWN else ''}. Mend them, or set jsonl.on_bad_image: drop to leave such rows out"
        )
    good = [
        row if result is None else row | {"image": str(result)}
        for row, result in zip(rows, verified, strict=True)
        if not isinstance(result, BadImage)
    ]
    dropped = Counter(result.reason for _, result in bad)
    if len(good) > max_samples:
        dropped["over_max_samples"] = len(good) - max_samples
        kept = sorted(random.Random(seed).sample(range(len(good)), max_samples))
        good = [good[index] for index in kept]
    written = write_jsonl(output, good)
    return {"rows_in": len(rows), "rows_out": written, "dropped": dict(sorted(dropped.items()))}


def _verify(rows: list[dict], root: str | Path, threads: int) -> Iterable[Path | BadImage | None]:
    """For each row its image's absolute path, why it has none, or None for a text-only row."""
    unique = sorted({row["image"] for row in rows if "image" in row})
    with ThreadPoolExecutor(threads) as pool:
        result = dict(zip(unique, pool.map(_check(root), unique), strict=True))
    return [result[row["image"]] if "image" in row else None for row in rows]


def _check(root: str | Path) -> Callable[[str], Path | BadImage]:
    def check(relative: str) -> Path | BadImage:
        try:
            path = locate_image(root, relative)
            load_image(path)
        except BadImage as error:
            return error
        return path

    return check


def caption_rows(rows: Iterable[dict]) -> Iterator[dict]:
    """Data-Juicer rows as LLaVA rows that ask nothing: stage 1 learns to say the caption."""
    for row in rows:
        yield llava.conversation(row["id"], row["images"][0], "", dj_jsonl.caption_of(row["text"]))
