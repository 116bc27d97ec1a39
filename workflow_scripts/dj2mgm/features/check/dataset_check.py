"""Check of a dataset that the dataset stage has made: rows, lengths, images, and the power of a comparison."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from pathlib import Path

import numpy as np

from dj2mgm.data.formats import IMAGE_TOKEN, choose_spread_rows, extract_caption, list_images
from dj2mgm.data.images import BadImageError, is_heif, join_image_path, load_image, locate_image
from dj2mgm.data.sources.source import describe_unread
from dj2mgm.data.texts import separate_words
from dj2mgm.data.user_dataset import HELD_OUT_FRACTION, MIN_HELD_OUT
from dj2mgm.dataset_resolution.file_formats import FORMATS
from dj2mgm.dataset_resolution.file_groups import Advice
from dj2mgm.errors import InputError, pluralize
from dj2mgm.reporting.comparison import SCORE_TITLES, format_difference
from dj2mgm.reporting.rendering import encode_shrunk_image, format_snakemake_command
from dj2mgm.reporting.verdicts.decision_cost import PowerSettings, compute_expected_contrast, find_noise
from dj2mgm.runs.command_messages import RowCount, assign_rows
from dj2mgm.runs.stages import TRAINING_STAGES
from dj2mgm.settings.base import Section, section, setting
from dj2mgm.settings.dataset_files import (
    MAX_HELD_OUT,
    WITH_IMAGES,
    ReadableDataset,
    ReadableSources,
    ShapesDataset,
    load_dataset_settings,
)
from dj2mgm.settings.targets import ReportSection
from dj2mgm.settings.training_stages import StepSettings, describe_steps
from dj2mgm.storage.files import find_files, format_yaml_line, read_json, read_jsonl
from dj2mgm.storage.image_files import CONVERT_HEIF, CONVERT_RENAMED_HEIF, HEIF_SUFFIXES, parse_member
from dj2mgm.storage.streaming import read_json_list


class CheckSettings(Section):
    """Settings of the check of a dataset."""

    dataset: str = setting(..., "name of the dataset")
    keys: dict[str, str] = setting(..., "dataset and model of the training command, if they are not the defaults")
    fetches_model: bool = setting(..., "whether `snakemake fetch` has to download the model first")
    note: str = setting(..., "lines about a recognized format; empty if a file in config/datasets states it")
    images: dict[str, str] = setting(..., "folder that image paths are relative to, by split")
    model: str = setting(..., "model whose tokens are counted; empty if the configured one is not made for photos")
    tokenizer: str = setting(..., "file of the model's tokenizer; empty if it is not on this machine")
    stages: dict[str, StepSettings] = setting(..., "training stages of the model; none without a model for photos")
    max_samples: int = setting(..., "most rows of a split that are trained on")
    max_length: int = setting(..., "tokens after which stage 2 cuts a conversation")
    refuses_bad_rows: bool = setting(..., "whether a row that cannot be trained on stops the run")
    report: ReportSection = section(ReportSection)
    power: PowerSettings = setting(..., "without the number of held-out images, which the check counts")


SHOWN_EXAMPLES = 3  # names of each reason
SHOWN_ROWS = 10
THUMBNAIL_SIDE = 200  # px
MAX_OPENED = 1000  # images of a split that are decoded; of the others only the file is looked up
MAX_MEASURED = 10_000  # texts of a split whose tokens are counted
MAX_BAD_SHARE = 0.1  # share of rows that cannot be used; with more, the data or their description is probably wrong
SEEDS = 3  # of a comparison, if one seed is configured, which compares two models and not their data
# by dj_synth on the embedded data (docs/evaluation.md), as a scale for the differences that a check names
EXAMPLE_DIFFERENCES = {"answer_probability": 0.101, "vqa_accuracy": 0.052, "caption_log_likelihood": 0.256}
SPLIT_TITLES = {"pretrain": "pairs", "finetune": "instructions"}
IMAGE_PROBLEMS = {  # by reason of a BadImageError
    "missing": "with a missing image",
    "outside": "with an image outside of the image folder",
    "empty": "with an image of zero bytes",
    "undecodable": "with an image that is damaged or of an unknown format",
}
HEIF_PROBLEM = "with an image in the format HEIF or AVIF that cannot be decoded"
EMPTY_CAPTION = "with an empty caption"


@dataclass(frozen=True)
class LeftOut:
    """Rows that are left out for one reason, with the paths of their first images."""

    reason: str
    count: int
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lengths:
    """Median, 90 % quantile and maximum of lengths."""

    median: int
    most: int
    longest: int


@dataclass(frozen=True)
class ShownRow:
    """A row with its image as a data URI."""

    name: str
    image: str
    text: str


@dataclass(frozen=True)
class SplitCheck:
    """Rows of a split to train on.

    Attributes:
        rows: rows in the user's files.
        written: rows that the dataset stage wrote.
        left_out: the other rows of the files; both add up to `rows`.
        bad: rows among `written` that a later stage drops or refuses.
        opened: images that were decoded.
        words: words of a caption or of all turns; None without rows.
        tokens: the same in tokens; None without a tokenizer.
        measured: rows whose tokens were counted.
        cut: rows among them that alone exceed the largest length.
        largest: width and height of the largest opened image in pixels.
    """

    split: str
    rows: int
    written: int
    left_out: list[LeftOut]
    bad: list[LeftOut]
    opened: int
    words: Lengths | None
    tokens: Lengths | None
    measured: int
    cut: int
    largest: tuple[int, int]

    @property
    def title(self) -> str:
        return SPLIT_TITLES[self.split]

    @property
    def trained(self) -> int:
        """Rows that a training can use; with those left out and the bad ones, they add up to `rows`."""
        return self.written - sum(part.count for part in self.bad)

    @property
    def bad_images(self) -> list[LeftOut]:
        return [bad for bad in self.bad if bad.reason != EMPTY_CAPTION]


@dataclass(frozen=True)
class Detectable:
    """Smallest difference that a comparison with a number of held-out images finds with 80 % probability.

    Attributes:
        images: number of held-out images.
        difference: the difference with its unit.
        share: the difference relative to that of dj_synth on the embedded data; None if that is not known.
    """

    images: int
    difference: str
    share: float | None


@dataclass(frozen=True)
class MetricPower:
    """Smallest differences in one metric that comparisons can show."""

    title: str
    seeds: int
    sizes: list[Detectable]
    is_typical: bool  # whether the noise is assumed, and not measured in finished runs


@dataclass(frozen=True)
class DatasetCheck:
    """All that the page and the console show.

    Attributes:
        command: command that trains on these data.
        analysis: command that counts the rows that the recipe's limits drop.
        note: lines with the file that describes the dataset; empty if it exists.
        recognized: a phrase for each file or source.
        not_read: files that are neither rows nor images, nor captions of images.
        steps: sentences about stages that add epochs, because there are few rows.
        held_out: number of held-out images.
        held_out_choice: how they were chosen.
        held_out_share: share of the user's images that are held out; None if their file or source is named.
        problem: a sentence with the remedy if the data cannot be used as they are; else empty.
    """

    dataset: str
    command: str
    analysis: str
    note: str
    recognized: list[str]
    splits: list[SplitCheck]
    not_read: list[LeftOut]
    steps: list[str]
    held_out: int
    held_out_choice: str
    held_out_share: float | None
    shown: list[ShownRow]
    model: str
    max_length: int
    refuses_bad_rows: bool
    power: list[MetricPower] = field(default_factory=list)
    problem: str = ""


def check_dataset(settings: CheckSettings, folder: Path) -> DatasetCheck:
    """Check the dataset in a folder that the dataset stage has written."""
    dataset = load_dataset_settings(folder / "config.yaml")
    summary = read_json(folder / "summary.json")
    evaluation = list(read_jsonl(folder / "evaluation.jsonl"))
    counter = _TokenCounter(settings)
    pairs = _RowCheck(settings, dataset, "pretrain", summary["pretrain"], counter)
    for row in read_jsonl(folder / "pretrain.jsonl"):
        pairs.add(row["id"], row["images"], extract_caption(row["text"]))
    instructions = _RowCheck(settings, dataset, "finetune", summary["finetune"], counter)
    for row in read_json_list(folder / "finetune.json"):
        turns = " ".join(turn["value"].replace(IMAGE_TOKEN, "").strip() for turn in row["conversations"])
        instructions.add(row["id"], list_images(row), turns)
    splits = [
        check.finish(list(_list_left_out(check.split, summary, dataset)))
        for check in (pairs, instructions)
        if check.total
    ]
    return DatasetCheck(
        settings.dataset,
        _format_training_command(settings),
        format_snakemake_command("analyze", {key: settings.keys[key] for key in settings.keys if key == "dataset"}),
        settings.note,
        list(_describe_files(dataset)),
        splits,
        list(_list_unread(summary, dataset)),
        list(_describe_steps(settings, splits)),
        len(evaluation),
        *_describe_choice(dataset),
        pairs.shown,
        settings.model,
        settings.max_length,
        settings.refuses_bad_rows,
        list(_measure_power(settings, evaluation)),
        _find_unreadable(settings, summary, splits[0]) or _find_problem(settings, dataset, pairs, splits[0]),
    )


def _describe_steps(settings: CheckSettings, splits: list[SplitCheck]) -> Iterator[str]:
    """Yield sentences about stages that add epochs, as `snakemake plan` states them."""
    rows = dict.fromkeys(TRAINING_STAGES, 0)
    rows |= {split.split: min(split.trained, settings.max_samples) for split in splits}
    counts = {stage: RowCount(number, number, False) for stage, number in rows.items()}
    for stage, count in assign_rows(counts, settings.stages).items():
        if stage in settings.stages and (text := describe_steps(stage, settings.stages[stage], count.rows)):
            yield f"{text}."


def _format_training_command(settings: CheckSettings) -> str:
    """Return the command that trains on the data, after the download of a model that is not on this machine."""
    train = format_snakemake_command("baseline", settings.keys)
    if not settings.fetches_model:
        return train
    model = {key: value for key, value in settings.keys.items() if key == "model"}
    return f"{format_snakemake_command('fetch', model)} && {train}"


class _TokenCounter:
    """Tokenizer of the configured model, if it is on this machine."""

    def __init__(self, settings: CheckSettings):
        self.tokenizer = None
        if settings.tokenizer:
            from tokenizers import Tokenizer  # here, because only this function needs it

            try:
                self.tokenizer = Tokenizer.from_file(settings.tokenizer)
            except Exception as error:  # the library raises no narrower type
                raise InputError(f"{settings.tokenizer}: not a tokenizer ({error}). Download the model again") from None
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()

    def count(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each text; an empty list without a tokenizer."""
        if self.tokenizer is None:
            return []
        return [len(encoding) for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]


class _RowCheck:
    """Check of the rows of a split, one after the other."""

    def __init__(
        self, settings: CheckSettings, dataset: ReadableDataset, split: str, total: int, counter: _TokenCounter
    ):
        self.split, self.total, self.counter = split, total, counter
        self.root, self.max_length = settings.images[split], settings.max_length
        self.name_image = partial(_name_image, dataset, self.root)
        self.opened_rows, self.measured_rows, self.shown_rows = (
            choose_spread_rows(total, limit) for limit in (MAX_OPENED, MAX_MEASURED, SHOWN_ROWS)
        )
        self.number = 0
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self.words: list[int] = []
        self.texts: list[str] = []
        self.shown: list[ShownRow] = []
        self.largest = (0, 0)
        self.find_problem = lru_cache(maxsize=1024)(self._find_problem)  # rows about one image tend to be neighbors

    def add(self, identifier: str, images: list[str], text: str) -> None:
        """Check the next row."""
        is_opened = self.number in self.opened_rows
        bad = next((image for image in images if self.find_problem(image, is_opened)), None)
        problem, name = "", identifier
        if bad is not None:
            problem, name = self.find_problem(bad, is_opened), self.name_image(bad)
        elif not text:
            problem, name = EMPTY_CAPTION, self.name_image(images[0]) if images else identifier
        if problem:
            self.counts[problem] += 1
            if len(names := self.examples.setdefault(problem, [])) < SHOWN_EXAMPLES:
                names.append(name)
        self.words.append(len(separate_words(text).split()))
        if self.number in self.measured_rows:
            self.texts.append(text)
        if self.number in self.shown_rows and images and (not problem or problem == EMPTY_CAPTION):
            self.shown.append(ShownRow(os.path.basename(images[0]), self._load_thumbnail(images[0]), text))
        self.number += 1

    def finish(self, left_out: list[LeftOut]) -> SplitCheck:
        """Return the result after the last row."""
        tokens = self.counter.count(self.texts)
        return SplitCheck(
            self.split,
            self.total + sum(part.count for part in left_out),
            self.total,
            left_out,
            [LeftOut(reason, count, tuple(self.examples[reason])) for reason, count in self.counts.most_common()],
            len(self.opened_rows),
            _summarize(self.words),
            _summarize(tokens),
            len(tokens),
            sum(count > self.max_length for count in tokens),
            self.largest,
        )

    def _find_problem(self, relative: str, is_opened: bool) -> str:
        try:
            path = locate_image(self.root, relative)
            if is_opened:
                self.largest = max(self.largest, load_image(path).size, key=prod)
        except BadImageError as error:
            if error.reason == "undecodable" and is_heif(path):
                return HEIF_PROBLEM
            return IMAGE_PROBLEMS[error.reason]
        return ""

    def _load_thumbnail(self, relative: str) -> str:
        try:
            image = load_image(locate_image(self.root, relative), THUMBNAIL_SIDE)
        except BadImageError:  # damaged, in a row that was not opened before
            return ""
        return encode_shrunk_image(image, THUMBNAIL_SIDE)


def _name_image(dataset: ReadableDataset, root: str, image: str) -> str:
    """Return the path of a row's image as `_shorten_path` does."""
    path = join_image_path(root, image)
    if not (member := parse_member(path)):
        return _shorten_path(dataset, path)
    path = os.path.join(member.archive, member.name)
    shown = _shorten_path(dataset, path)
    return member.name if shown == path else shown


def _shorten_path(dataset: ReadableDataset, path: str) -> str:
    """Return a path relative to the dataset's image folder; if it has several, with the one that the settings name."""
    sources = dataset.sources if isinstance(dataset, ReadableSources) else {}
    folders = {files.images for files in (*sources.values(), *dataset.splits.values())}
    for folder in folders:
        for start in (os.path.join(folder, ""), os.path.join(os.path.realpath(folder), "")):
            if path.startswith(start):
                relative = path.removeprefix(start)
                return relative if len(folders) == 1 else os.path.join(folder, relative)
    return path


def _summarize(values: list[int]) -> Lengths | None:
    if not values:
        return None
    median, most = np.quantile(values, (0.5, 0.9), method="inverted_cdf")
    return Lengths(int(median), int(most), max(values))


def _list_left_out(split: str, summary: dict, dataset: ReadableDataset) -> Iterator[LeftOut]:
    """Yield the rows that the dataset stage has left out of a split, those with faults first."""
    for name, source in summary.get("sources", {}).items():
        is_dropped = source["split"] == split and dataset.sources[name].uncaptioned == "drop"
        if is_dropped and source.get("uncaptioned"):
            examples = tuple(_shorten_path(dataset, path) for path in source["uncaptioned_examples"])
            yield LeftOut("without a caption", source["uncaptioned"], examples)
    held_out, copies = (summary.get(key, {}).get(split, 0) for key in ("left_out", "left_out_copies"))
    if held_out > copies:
        yield LeftOut("about held-out images", held_out - copies)
    if copies:
        yield LeftOut("about copies of held-out images", copies)


def _list_unread(summary: dict, dataset: ReadableDataset) -> Iterator[LeftOut]:
    for source in summary.get("sources", {}).values():
        if counts := source.get("not_read"):
            examples = tuple(_shorten_path(dataset, path) for path in source["not_read_examples"])
            yield LeftOut(describe_unread(counts.items(), source["format"]), sum(counts.values()), examples)


def _describe_files(dataset: ReadableDataset) -> Iterator[str]:
    """Yield a phrase for each file or source: its format, files, and columns or keys."""
    if isinstance(dataset, ShapesDataset):
        yield "the embedded dataset of rendered scenes"
        return
    titles = {"pretrain": "data_juicer", "finetune": "llava"}
    for split, files in dataset.splits.items():
        title = FORMATS[titles[split]].title if split in titles else "held-out images in the workflow's own format"
        yield f"{title}: {files.file}, images in {files.images}"
    for source in dataset.sources.values() if isinstance(dataset, ReadableSources) else ():
        files = find_files(source.path, source.suffixes)
        columns = ", ".join(f"{kind}: {name}" for kind, name in source.columns.model_dump().items() if name)
        number = pluralize(len(files), "file")
        path = source.path if len(files) > 1 else files[0]
        yield (
            f"{FORMATS[source.format].title}: {path} ({number}{f'; columns {columns}' if columns else ''})"
            + ("" if source.split == "pretrain" else f", for {source.split}")
        )


def _describe_choice(dataset: ReadableDataset) -> tuple[str, float | None]:
    """Return how the held-out images were chosen, as a phrase, and their share if it is fixed."""
    if isinstance(dataset, ShapesDataset):
        return "drawn for evaluation only", None
    if evaluation := dataset.splits.get("evaluation"):
        return f"all images of {evaluation.file}", None
    if isinstance(dataset, ReadableSources):
        source = next((source for source in dataset.sources.values() if source.split == "evaluation"), None)
        if source:
            return f"at most {MAX_HELD_OUT} images of {source.path}, in a fixed random order", None
    choice = f"{100 * HELD_OUT_FRACTION:.0f} % of the images ({MIN_HELD_OUT} to {MAX_HELD_OUT})"
    return f"{choice}, in a fixed random order of their paths", HELD_OUT_FRACTION


def _measure_power(settings: CheckSettings, evaluation: list[dict]) -> Iterator[MetricPower]:
    """Yield what a comparison can show in the metric that decides, and for questions also in accuracy."""
    has_questions = any(row.get("questions") for row in evaluation)
    headline = settings.report.locate_headline(has_questions)
    keys = dict.fromkeys([headline.key, "vqa_accuracy"] if has_questions else [headline.key])
    seeds = settings.power.seeds if settings.power.seeds > 1 else SEEDS
    images = len(evaluation)
    for key in keys:
        located = settings.report.model_copy(update={"headline": key}).locate_headline(has_questions)
        power = settings.power.model_copy(update={"headline": key, "images": images})
        noise = find_noise(power, located.group, located.metric)
        if noise is None:
            continue
        sizes, example = [], EXAMPLE_DIFFERENCES.get(key)
        for size in sorted({images, MAX_HELD_OUT if images < MAX_HELD_OUT else 4 * images} - {0, 1}):
            difference = compute_expected_contrast(noise.at_quantile(), size, seeds).compute_detectable()
            shown = format_difference(located.metric, difference).lstrip("+")
            sizes.append(Detectable(size, shown, difference / example if example else None))
        yield MetricPower(SCORE_TITLES[key], seeds, sizes, noise.sources[0].endswith("(typical)"))


def _find_unreadable(settings: CheckSettings, summary: dict, pairs: SplitCheck) -> str:
    """Return a sentence about photos in formats that are not read; "" if there are few."""
    counts = Counter()
    for source in summary.get("sources", {}).values():
        kinds = source.get("not_read") or {}
        counts.update({kind: count for kind, count in kinds.items() if kind.lower() in HEIF_SUFFIXES})
    if counts.total() <= MAX_BAD_SHARE * (pairs.rows + counts.total()):
        return ""
    [(kind, _)] = counts.most_common(1)
    pattern = "".join(f"[{letter}{letter.upper()}]" for letter in kind[1:])
    return (
        f"{settings.dataset}: {pluralize(counts.total(), 'photo')} cannot be read ({', '.join(counts)}); "
        f"{CONVERT_HEIF}, for example with ImageMagick: `mogrify -format jpg *.{pattern}`"
    )


def _find_problem(settings: CheckSettings, dataset: ReadableDataset, check: "_RowCheck", pairs: SplitCheck) -> str:
    """Return a sentence about pairs that mostly cannot be used, with the remedy; "" if they can."""
    bad_images, empty = sum(part.count for part in pairs.bad_images), check.counts[EMPTY_CAPTION]
    if bad_images > MAX_BAD_SHARE * pairs.written:
        counts = ", ".join(f"{part.count:,} {part.reason}" for part in pairs.bad_images)
        is_heif_problem = pairs.bad_images[0].reason == HEIF_PROBLEM  # the most frequent one
        remedy = f"; {CONVERT_RENAMED_HEIF}" if is_heif_problem else f". {_advise(settings, dataset, 'images')}"
        return (
            f"{settings.dataset}: {bad_images:,} of {pairs.rows:,} rows cannot be used ({counts}); the first image is "
            f"{pairs.bad_images[0].examples[0]}{remedy}"
        )
    if empty > MAX_BAD_SHARE * pairs.written:
        return (
            f"{settings.dataset}: {empty} of {pairs.rows} captions are empty; the first is that of "
            f"{check.examples[EMPTY_CAPTION][0]}. {_advise(settings, dataset, 'columns')}"
        )
    return ""


def _advise(settings: CheckSettings, dataset: ReadableDataset, key: str) -> str:
    """Return the remedy: the file that describes the dataset, with another value of `key`."""
    replacement = {"images": "<folder of the images>", "columns": {"text": "<column of the captions>"}}[key]
    restore = {"images": "Restore the images", "columns": "Write the captions"}[key]
    if isinstance(dataset, ReadableSources):
        sources = {
            name: source.model_dump(exclude_unset=True, exclude={"suffixes", "license"})
            for name, source in dataset.sources.items()
        }
        fits = {"images": lambda kind: kind not in WITH_IMAGES, "columns": lambda kind: kind != "folder"}[key]
        changed = next((name for name, source in sources.items() if fits(source["format"])), None)
        if changed is None:
            return f"{restore}."
        if isinstance(replacement, dict):
            replacement = sources[changed].get("columns", {}) | replacement
        sources[changed] |= {key: replacement}
        description: dict = {"sources": sources}
    elif key == "images" and not isinstance(dataset, ShapesDataset):
        description = dataset.file_content()
        description["pretrain"] |= {"images": replacement}
    else:
        return f"{restore}."
    if not settings.note:
        return f"{restore}, or correct `{key}` in config/datasets/{settings.dataset}.yaml."
    file = Advice(settings.dataset).file
    return (
        f"{restore}; or save this as {file}, with the right value of `{key}`, and use dataset={Path(file).stem}: "
        f"`{format_yaml_line(description)}`"
    )
