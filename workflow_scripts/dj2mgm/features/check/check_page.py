"""Page and console text of `snakemake check`."""

import math
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup, escape

from dj2mgm.cli.command_line import escape_control
from dj2mgm.errors import pluralize
from dj2mgm.features.check.dataset_check import (
    IMAGE_PROBLEMS,
    MAX_OPENED,
    DatasetCheck,
    Detectable,
    LeftOut,
    Lengths,
    MetricPower,
    SplitCheck,
)
from dj2mgm.reporting.rendering import build_template_environment, join_words
from dj2mgm.settings.training_stages import FinetuneSection
from dj2mgm.storage.files import write_text
from dj2mgm.storage.image_files import SHRINK_IMAGES

WIDTH = 80  # columns of the console
DEFAULT_MAX_LENGTH = FinetuneSection.model_fields["max_length"].default
PIXELS_PER_TOKEN = 32 * 32  # of Qwen3-VL: 2 × 2 patches of 16 × 16 pixels


def write_check_page(check: DatasetCheck, path: Path) -> None:
    """Write one self-contained HTML file without scripts."""
    templates = build_template_environment(Path(__file__).parent)
    templates.filters |= {
        "shown": escape_control,
        "with_commands": lambda text: Markup(re.sub(r"`(.+?)`", r"<code>\1</code>", str(escape(text)))),
        "sentences": iterate_sentences,
        "power": list_power_sentences,
        "fate": describe_fate,
    }
    write_text(path, templates.get_template("check.html.j2").render(check=check))


def write_console_text(check: DatasetCheck, page: Path) -> str:
    """Return the essential sentences in lines of at most `WIDTH` columns; only the problem if there is one."""
    if check.problem:
        return f"error: {escape_control(check.problem.removesuffix('.'))}. Rows and thumbnails: {page}\n"
    paragraphs = [f"Dataset {check.dataset}: {phrase}." for phrase in check.recognized]
    for split in check.splits:
        paragraphs += iterate_sentences(split, check)
    paragraphs += [f"Files that are not used: {part.reason}{_show_examples(part)}." for part in check.not_read]
    paragraphs.append(f"Held out for evaluation: {pluralize(check.held_out, 'image')}, {check.held_out_choice}.")
    paragraphs += check.steps
    answer, *details = list_power_sentences(check, metrics=1)  # the metric that decides
    paragraphs += [f"Enough for a verdict? {answer}", *details]
    paragraphs.append(f"Thumbnails and details: {page}")
    lines = [
        line
        for text in paragraphs
        for line in textwrap.wrap(
            escape_control(text), WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    ]
    lines += map(escape_control, [f"Train on these data: {check.command}", *check.note.splitlines()[1:]])
    return "\n".join(lines) + "\n"


def iterate_sentences(split: SplitCheck, check: DatasetCheck) -> Iterator[str]:
    """Yield the sentences about the rows of a split: their numbers first, then problems and lengths."""
    left_out = f"; left out: {join_words([*map(_show, split.left_out)])}" if split.left_out else ""
    bad = f"; {describe_fate(split, check)}: {join_words([*map(_show, split.bad)])}" if split.bad else ""
    yield f"{split.title.capitalize()}: {split.trained:,} of {split.rows:,} rows to train on{bad}{left_out}."
    if split.opened < split.written:
        yield f"{MAX_OPENED:,} images were opened, spread over the rows; of the others, only the file was looked up."
        if damaged := sum(part.count for part in split.bad if part.reason == IMAGE_PROBLEMS["undecodable"]):
            yield f"Of all rows, about {round(damaged * split.written / split.opened):,} may have a damaged image."
    if split.split == "pretrain":
        yield (
            "The recipe's limits, such as on the length of captions, may drop more rows; this command counts them: "
            f"{check.analysis}"
        )
    yield from _list_size_sentences(split, check)
    if split.words:
        yield f"Words: {_show_lengths(split.words)}."
    if split.tokens:
        sample = f" in {split.measured:,} rows" if split.measured < split.written else ""
        is_longer = "row is" if split.cut == 1 else "rows are"
        cut = f"; {split.cut:,} {is_longer} longer than max_length ({check.max_length:,}) and cut" if split.cut else ""
        yield f"Tokens of the model {check.model}{sample}: {_show_lengths(split.tokens)}{cut}. An image adds its own."
    elif not check.model and split is check.splits[0]:
        yield "`model=<name>` adds the lengths in tokens."
    elif check.model:
        fetch = check.command.rpartition(" && ")[0]
        remedy = f"; `{fetch}` downloads it" if fetch else ""
        yield f"Tokens: not counted, because the tokenizer of the model {check.model} is not on this machine{remedy}."


def describe_fate(split: SplitCheck, check: DatasetCheck) -> str:
    """Return what happens to the bad rows of a split."""
    if split.title == "instructions" and check.refuses_bad_rows:
        return "the run stops at these, unless you set `jsonl: {on_bad_row: drop}`"
    return "unusable"


def _list_size_sentences(split: SplitCheck, check: DatasetCheck) -> Iterator[str]:
    """Yield a warning about images that need more tokens than a row may have, in models that keep their size."""
    width, height = split.largest
    tokens, limit = width * height // PIXELS_PER_TOKEN, max(check.max_length, DEFAULT_MAX_LENGTH)
    if tokens > limit:
        yield (
            f"The largest opened image has {width} × {height} pixels. Qwen2.5-VL and Qwen3-VL keep this size and need "
            f"about {tokens:,} tokens for it, but a row may have {limit:,}, so they would refuse it. Shrink your "
            f"images before you use these models: {SHRINK_IMAGES}"
        )


def list_power_sentences(check: DatasetCheck, metrics: int | None = None) -> list[str]:
    """Return the smallest differences that comparisons find in up to `metrics` metrics, and the noise."""
    if not check.power:
        return ["The noise of the score that decides is not known before a first run."]
    noise = "that of finished runs"
    if check.power[0].is_typical:
        noise = "assumed to be that of rendered scenes; twice as much would double these differences"
    return [*(_describe_metric(metric, check) for metric in check.power[:metrics]), f"The noise is {noise}."]


def _describe_metric(metric: MetricPower, check: DatasetCheck) -> str:
    """Return whether a comparison finds usual differences with 80 % probability, and the smallest with more images."""
    sentences = []
    for size in metric.sizes:
        if size.images == check.held_out:
            sentences += [
                _answer(size, metric.title),
                f"A comparison with {metric.seeds} seeds finds a difference of this size in four of five cases.",
            ]
        else:
            photos = f" ({math.ceil(size.images / check.held_out_share):,} photos)" if check.held_out_share else ""
            sentences.append(f"With {size.images:,} held-out images{photos}: at least {size.difference}.")
    return " ".join(sentences if len(sentences) > 1 else ["No.", *sentences])


def _answer(size: Detectable, title: str) -> str:
    """Return the answer whether the held-out images suffice, measured by the difference that dj_synth makes."""
    smallest = f"differences of at least {size.difference} in the {title}"
    if size.share is None:
        return f"For {smallest}."
    share = f"{100 * size.share:.0f} % of what dj_synth gains on rendered scenes"
    return f"No: only {smallest} would be found, {share}." if size.share > 1 else f"Yes, for {smallest}, {share}."


def _show(part: LeftOut) -> str:
    return f"{part.count:,} {part.reason}{_show_examples(part)}"


def _show_examples(part: LeftOut) -> str:
    more = ", …" if part.count > len(part.examples) else ""
    return f" ({', '.join(part.examples)}{more})" if part.examples else ""


def _show_lengths(lengths: Lengths) -> str:
    return f"median {lengths.median}, 90 % have at most {lengths.most}, the longest has {lengths.longest}"
