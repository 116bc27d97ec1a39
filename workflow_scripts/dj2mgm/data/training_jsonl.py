"""Writer of the training files: LLaVA rows with absolute image paths, every image opened and verified once.

`apportion` computes the number of samples of each source from the settings and the rows that can be trained on.
"""

import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import IO

from dj2mgm.data import formats
from dj2mgm.data.formats import (
    find_character_problem,
    find_control_problem,
    find_image_problem,
    find_mark_problem,
    list_images,
)
from dj2mgm.data.images import BadImageError, HeldOutImages, load_image, locate_image
from dj2mgm.data.texts import separate_words
from dj2mgm.dataset_resolution.row_media import UNREAD_MEDIA
from dj2mgm.errors import InputError
from dj2mgm.records import SourceSamples, TrainingFileCounts
from dj2mgm.settings.data import JsonlSettings
from dj2mgm.storage.files import write_jsonl
from dj2mgm.storage.streaming import DiskMap, NumberedIds, map_in_order

SHARE_TOLERANCE = Fraction(1, 10**6)  # a smaller rest of the shares is an error of rounding
SourceCounts = Counter  # numbers of rows by source; the key None is a dataset without sources


@dataclass(frozen=True)
class SampleRules:
    """Rules for bad rows and for the number of samples."""

    settings: JsonlSettings
    budget: int | None = None  # exact number of samples; rows are repeated if needed; None: one sample per row
    leaked: frozenset[str] = frozenset()  # absolute paths of images that duplicate evaluation images; rows are dropped
    leaked_rows: frozenset[str] = frozenset()  # ids of rows that ask evaluation questions; they are dropped
    size: int | None = None  # number of different rows to draw at random; None: all up to `max_samples`
    selected: str = "pretrain"  # training file whose rows the other experiment selects
    size_before: int = 0  # rows that the other experiment had before it dropped any, including new ones

    @property
    def most_rows(self) -> int:
        return min(self.settings.max_samples, self.settings.max_samples if self.size is None else self.size)


def check_subset_size(usable: int, rules: SampleRules, stage: str) -> None:
    """Refuse a random subset of more rows than the file has, or of as many rows as `selected` has."""
    if rules.size is not None and (rules.size > usable or rules.size == usable and stage == rules.selected):
        raise InputError(
            f"a random subset of {rules.size} rows is no smaller than the {usable} rows of {stage}: the experiment "
            "does not select rows; remove random from its `controls`, or from ablation.controls"
        )


def apportion(usable: SourceCounts, rules: SampleRules, stage: str) -> tuple[SourceCounts, SourceCounts]:
    """Return the number of different rows and the number of samples of each source.

    The samples are in the exact proportions of amounts and shares, rounded once. A source repeats rows only if it has
    more samples than rows, or if `max_samples` or the size of a subset limits the number of different rows.
    """
    row_limits = Counter({source: _limit_rows(source, rows, rules) for source, rows in usable.items()})
    requested = _compute_requested_samples(
        {source: rows for source, rows in usable.items() if row_limits[source]}, rules, stage
    )
    total = round(sum(requested.values()))
    if usable and not total:
        amount_by_source = rules.settings.sources | rules.settings.shares
        amounts = ", ".join(f"{source}: {amount_by_source[source]} of {rows} rows" for source, rows in usable.items())
        raise InputError(f"sources: the amounts leave no row of {stage} to train on ({amounts}); raise one")
    budget = min(total, rules.most_rows) if rules.budget is None else rules.budget
    samples = _scale(requested, budget)
    used_rows = _fill(requested, row_limits & samples, rules.most_rows)
    # `max_samples` may leave a source with samples, but without rows to repeat
    while starved := {source for source, count in samples.items() if count and not used_rows[source]}:
        requested = {source: amount for source, amount in requested.items() if source not in starved}
        samples = _scale(requested, budget)
        used_rows = _fill(requested, row_limits & samples, rules.most_rows)
    return _shorten(used_rows, rules), _shorten(samples, rules)


def _compute_requested_samples(
    usable: Mapping[str | None, int], rules: SampleRules, stage: str
) -> dict[str | None, Fraction]:
    """Return the number of samples of each source before any limit, in the exact proportions of amounts and shares.

    The total is the number of rows, with those of sources without a share by their amounts. These sources divide the
    rest of the shares; without them, the shares are scaled to add up to 1. `usable` has only sources whose amounts
    leave them rows, because a source without rows must not limit the others.
    """
    shares = {source: _read_exactly(share) for source, share in rules.settings.shares.items() if source in usable}
    amounts: dict[str | None, Fraction] = {}
    for source, rows in usable.items():
        if source in shares:
            continue
        amount = rules.settings.sources.get(source, 1.0)
        amounts[source] = Fraction(amount) if isinstance(amount, int) else _read_exactly(amount) * rows
        if isinstance(amount, int) and amount > rows:
            raise InputError(
                f"sources.{source}: {amount} rows are requested, but only {rows} rows of {stage} can be trained on; "
                f"request fewer, or state a weight per row, {amount / rows:.2f}"
            )
    if not shares:
        return amounts
    total = sum(amounts.values(), Fraction(0))
    rest = 1 - sum(shares.values())
    weights = shares | dict.fromkeys(amounts, Fraction(0))
    if rest > SHARE_TOLERANCE and total:
        weights |= {source: rest * amount / total for source, amount in amounts.items()}
    total_rows = sum(amounts.get(source, usable[source]) for source, weight in weights.items() if weight)
    scale = Fraction(total_rows) / (sum(weights.values()) or 1)
    return {source: weights[source] * scale for source in usable}


def _read_exactly(number: float) -> Fraction:
    """Return the decimal number that the user has written."""
    return Fraction(str(number))


def _limit_rows(source: str | None, rows: int, rules: SampleRules) -> int:
    """Return the number of different rows that a source may use: fewer than it has only if its amount states so."""
    amount = 1.0 if source in rules.settings.shares else rules.settings.sources.get(source, 1.0)
    return min(rows, amount if isinstance(amount, int) else round(_read_exactly(amount) * rows))


def _shorten(rows: SourceCounts, rules: SampleRules) -> SourceCounts:
    """Return how many rows of each source `used_fraction` leaves, at least one if the source has any."""
    fraction = rules.settings.used_fraction
    shares = {source: fraction.get(source, 1.0) if isinstance(fraction, dict) else fraction for source in rows}
    return Counter({source: max(min(1, count), round(shares[source] * count)) for source, count in rows.items()})


def _scale(amounts: Mapping[str | None, Fraction], total: int) -> SourceCounts:
    """Return whole numbers with this total in the same proportions, by largest remainders (Hamilton's method)."""
    whole = sum(amounts.values())
    exact = {source: amount * total / whole for source, amount in amounts.items()} if whole else {}
    scaled = Counter({source: math.floor(share) for source, share in exact.items()})
    by_remainder = sorted(exact, key=lambda source: (scaled[source] - exact[source], str(source)))
    scaled.update(by_remainder[: total - scaled.total()] if exact else ())
    return scaled


def _fill(amounts: Mapping[str | None, Fraction], limits: SourceCounts, total: int) -> SourceCounts:
    """Divide a total in the proportions of amounts; what exceeds the limit of a source goes to the others."""
    filled: SourceCounts = Counter()
    remaining = {source: amount for source, amount in amounts.items() if amount}
    while remaining:
        scaled = _scale(remaining, total - filled.total())
        full = {source: limits[source] for source in remaining if scaled[source] >= limits[source]}
        if not full:
            return filled + scaled
        filled.update(full)
        remaining = {source: amount for source, amount in remaining.items() if source not in full}
    return filled


def count_drop_reasons(left_out: int, usable: SourceCounts, rules: SampleRules) -> Counter:
    """Return the reasons for dropping good rows, counted."""
    amounts = [amount for source, amount in rules.settings.sources.items() if source in usable]
    # the integer 1 is one row, the weight 1.0 all rows
    weighted = any(amount != 1.0 or isinstance(amount, int) for amount in amounts)
    weighted |= any(source in usable for source in rules.settings.shares)
    if rules.settings.used_fraction != 1 or weighted:
        return +Counter({"sampled": left_out})
    over_max = max(0, usable.total() - rules.settings.max_samples)
    over_size = max(0, usable.total() - over_max - rules.most_rows)
    left_out -= over_max + over_size
    return +Counter({"over_max_samples": over_max, "over_size": over_size, "over_budget": left_out})


ROWS_AT_ONCE = 500  # rows per batch of a process
NAMED_ROWS = 5  # bad rows named in the error message
Problem = tuple[str, str] | None  # reason, which is counted, and detail, which is shown
LEAKS = LEAKED_IMAGE, LEAKED_TEXT = "leaked", "leaked_text"  # reasons that are no faults of a row
REPETITION_MARK = "#"  # between the id of a row and the number of a repeated sample


def write_training_jsonl(
    rows: Iterable[dict],
    root: str | Path,
    held_out: HeldOutImages,
    output: Path,
    rules: SampleRules,
    processes: int,
    checked: DiskMap | None = None,
) -> TrainingFileCounts:
    """Verify every row and image and write LLaVA rows with absolute paths; return counts that add up.

    Rows pass through `processes` processes and a temporary file in the folder of `output`; memory does not grow with
    them.

    Args:
        rows: LLaVA rows. Samples keep their order; repeated ones follow.
        root: the folder that image paths are relative to.
        held_out: images that must not be trained on.
        output: the file to write.
        rules: rules for bad rows and for the number of samples.
        processes: number of processes.
        checked: results of images below `root` that were verified for another file; new results are added.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile("w+", encoding="utf-8", dir=output.parent) as good:
        images = DiskMap() if checked is None else checked
        checked_rows = _check_rows(rows, root, held_out, rules, processes, images)
        usable, dropped, problems = _write_good(checked_rows, good, rules)
        rows_in = usable.total() + dropped.total()
        if problems and rules.settings.on_bad_row == "refuse":
            raise _make_bad_rows_error(dropped, problems, rows_in, output.stem)
        if rows_in and not usable:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
            first = "".join(f"; the first is {problem}" for problem in problems[:1])
            raise InputError(f"no row of {output.stem} is left to train on ({reasons} of {rows_in} rows{first})")
        # Skip the check if the other experiment added more rows than it dropped.
        if rules.size_before <= rows_in:
            check_subset_size(usable.total(), rules, output.stem)
        used_rows, sample_counts = apportion(usable, rules, output.stem)
        words: SourceCounts = Counter()
        rows_out = write_jsonl(
            output, _count_words(_repeat_rows(good, usable, used_rows, sample_counts, rules), words, rules)
        )
    left_out = usable.total() - used_rows.total()
    usable_by_source = {source: rows for source, rows in usable.items() if source is not None}
    return TrainingFileCounts(
        rows_in,
        rows_out,
        dropped=dict(sorted((dropped + count_drop_reasons(left_out, usable, rules)).items())),
        repeated=rows_out + left_out - usable.total(),
        sources={
            source: SourceSamples(rows, used_rows[source], sample_counts[source], words[source])
            for source, rows in sorted(usable_by_source.items())
        },
    )


def _make_bad_rows_error(dropped: Counter, problems: list[str], rows_in: int, split: str) -> InputError:
    bad_count = sum(count for reason, count in dropped.items() if reason not in LEAKS)
    more = " …" if bad_count > NAMED_ROWS else ""
    return InputError(
        f"{bad_count} of {rows_in} rows of {split} cannot be trained on: {'; '.join(problems)}{more}. "
        "Fix them, or set jsonl.on_bad_row: drop to drop them"
    )


def _write_good(
    checked: Iterable[tuple[dict, Problem]], file: IO[str], rules: SampleRules
) -> tuple[SourceCounts, Counter[str], list[str]]:
    """Write the good rows, one per line; return them by source, the others by reason, and the first bad rows."""
    good, dropped, problems = Counter(), Counter(), []
    for row, problem in checked:
        if problem is None:
            good[find_source(row, rules)] += 1
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            continue
        reason, detail = problem
        dropped[reason] += 1
        if reason not in LEAKS and len(problems) < NAMED_ROWS:
            problems.append(f"row {row['id']}: {detail}")
    return good, dropped, problems


def find_source(row: dict, rules: SampleRules) -> str | None:
    """Return a row's source; None in a dataset without sources, which ignores the key `source`."""
    return row.get("source") if rules.settings.sources else None


def _repeat_rows(
    good: IO[str], usable: SourceCounts, used_rows: SourceCounts, sample_counts: SourceCounts, rules: SampleRules
) -> Iterator[dict]:
    """Yield the samples of each source in the order of rows.

    Each row comes once, then again with a new id (`<id>#2`), and so on. The last round has only some rows, drawn at
    random, so that all rows of a source come about equally often.
    """
    ids = NumberedIds(REPETITION_MARK)
    for turn in range(
        max((math.ceil(sample_counts[source] / rows) for source, rows in used_rows.items() if rows), default=0)
    ):
        last = Counter(
            {source: max(0, min(rows, sample_counts[source] - turn * rows)) for source, rows in used_rows.items()}
        )
        for row in _draw_rows(good, [usable, used_rows, last], rules):
            yield row | {"id": ids.add(row["id"])}


def drop_repeats(rows: Iterable[dict]) -> Iterator[dict]:
    """Yield the rows of a training file without repeated samples of a row, which have its id with a number."""
    first_samples: dict[str, int] = {}  # hashes, since files may have millions of rows
    for row in rows:
        content = hash(json.dumps(row | {"id": ""}))
        if first_samples.get(row["id"].rpartition(REPETITION_MARK)[0]) != content:
            first_samples[row["id"]] = content
            yield row


def _count_words(rows: Iterable[dict], words: SourceCounts, rules: SampleRules) -> Iterator[dict]:
    """Yield the rows, counting the words of each source's samples."""
    for row in rows:
        texts = (separate_words(turn["value"]) for turn in row["conversations"])
        words[find_source(row, rules)] += sum(len(text.split()) for text in texts)
        yield row


def _draw_rows(good: IO[str], sizes: list[SourceCounts], rules: SampleRules) -> Iterator[dict]:
    """Yield the rows that remain after successive random draws: each of `sizes` is drawn from the size before it."""
    good.seek(0)
    rows: Iterator[dict] = map(json.loads, good)
    distinct = [size for size, before in zip(sizes[1:], sizes, strict=False) if size != before]
    for turn, (total, count) in enumerate(pairwise([sizes[0], *distinct])):
        rows = _draw_sample(rows, total, count, f"{rules.settings.seed}/{turn}" if turn else rules.settings.seed, rules)
    yield from rows


def _draw_sample(
    rows: Iterable[dict], total: SourceCounts, count: SourceCounts, seed: int | str, rules: SampleRules
) -> Iterator[dict]:
    """Draw `count` of `total` rows of each source at random, in order and without keeping them in memory.

    Algorithm S of Knuth, TAOCP 3.4.2.
    """
    remaining_rows, remaining_draws = Counter(total), Counter(count)
    numbers = {source: random.Random(seed if source is None else f"{seed}/{source}") for source in total}
    for row in rows:
        source = find_source(row, rules)
        if numbers[source].random() * remaining_rows[source] < remaining_draws[source]:
            remaining_draws[source] -= 1
            yield row
        remaining_rows[source] -= 1


def _check_rows(
    rows: Iterable[dict],
    root: str | Path,
    held_out: HeldOutImages,
    rules: SampleRules,
    processes: int,
    images: DiskMap,
) -> Iterator[tuple[dict, Problem]]:
    """Yield each row with absolute image paths, and its problem or leak.

    Every image is opened once, even if several rows name it. `images` gets the result of each image as JSON, which is
    empty while a process checks the image.
    """

    def iterate_jobs() -> Iterator[tuple[list[dict], list[str]]]:
        iterator = iter(rows)
        while batch := list(islice(iterator, ROWS_AT_ONCE)):
            image_paths = dict.fromkeys(image for row in batch for image in list_images(row))
            new = [image for image in image_paths if image not in images]
            images.fill((image, "") for image in new)
            yield batch, new

    for batch, results in map_in_order(partial(_check_batch, root, held_out, rules), iterate_jobs(), processes):
        images.replace((image, json.dumps(result)) for image, result in results.items())
        for row, problem in batch:
            image_results = [json.loads(images.get(image)) for image in list_images(row)]
            paths = [path for path, _ in image_results]
            image_problem = next((problem for _, problem in image_results if problem), None)
            if paths:
                row = row | {"image": paths[0] if isinstance(row["image"], str) else paths}
            elif row.get("image", "") is None:
                row = {key: value for key, value in row.items() if key != "image"}
            yield row, problem or _find_leak(row["id"], paths, rules) or image_problem


def _find_leak(identifier: str, paths: list[str], rules: SampleRules) -> Problem:
    if not rules.leaked.isdisjoint(paths):
        return LEAKED_IMAGE, ""
    return (LEAKED_TEXT, "") if identifier in rules.leaked_rows else None


def _check_batch(
    root: str | Path, held_out: HeldOutImages, rules: SampleRules, job: tuple[list[dict], list[str]]
) -> tuple[list[tuple[dict, Problem]], dict[str, tuple[str, Problem]]]:
    """Return the rows with the problems of their texts, and the images with their absolute paths or problems."""
    rows, images = job
    texts = [(row, _check_text(row, rules)) for row in rows]
    return texts, {image: _check_image(root, held_out, image) for image in images}


def _check_text(row: dict, rules: SampleRules) -> Problem:
    problems = [
        ("other_media", row.get(UNREAD_MEDIA)),
        ("image_token", find_image_problem(row)),
        ("control_token", find_control_problem(row, rules.settings.control_tokens)),
        ("control_character", find_character_problem(row)),
        ("other_media", find_mark_problem(row)),
    ]
    if len(list_images(row)) > 1 and not rules.settings.several_images:
        problems.append(("several_images", f"it has {len(list_images(row))} images, but this model accepts one"))
    if rules.settings.one_question and not list_images(row):
        problems.append(("no_image", "it has no image, but this model needs one"))
    if rules.settings.one_question and len(row["conversations"]) > 2:
        problems.append(("several_questions", "it has several questions, but this model accepts one"))
    return next(((reason, detail) for reason, detail in problems if detail), None)


def _check_image(root: str | Path, held_out: HeldOutImages, relative: str) -> tuple[str, Problem]:
    try:
        path = locate_image(root, relative)
        load_image(path)
    except BadImageError as error:
        return "", (error.reason, f"{relative}: {error}")
    if match := held_out.match(path):
        kind = "a copy of an image" if match == "copy" else "an image"
        return "", ("held_out", f"{relative}: held_out: {path} is {kind} that is kept for evaluation")
    return str(path), None


def convert_pairs(rows: Iterable[dict], question: str) -> Iterator[dict]:
    """Convert Data-Juicer rows to LLaVA rows that train a model to produce the caption.

    `question`, which may be empty, is for rows without a question.
    """
    for row in rows:
        prompt = row.get("question") or question
        source = {"source": row["source"]} if "source" in row else {}
        yield (
            formats.build_conversation(row["id"], row["images"][0], prompt, formats.extract_caption(row["text"]))
            | source
        )
