"""Recognition of the format of a file of rows by its beginning; `FORMATS` has one entry per format."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dj2mgm.dataset_resolution.file_samples import FileSample, read_sample
from dj2mgm.dataset_resolution.row_media import IMAGE_TOKEN, has_empty_image, list_turns, read_row_media
from dj2mgm.errors import InputError
from dj2mgm.settings.dataset_files import USUAL_NAMES
from dj2mgm.storage.image_files import IMAGE_SUFFIXES

SHOWN_NAMES = 5
MAX_NAME_LENGTH = 40  # characters of a column's name in messages
# words in names of columns
HINTS = {
    "image": {"image", "images", "img", "photo", "photos", "picture", "pictures", "file", "filename", "path", "url"},
    "text": {"caption", "captions", "text", "texts", "description", "sentence"},
    "question": {"question", "questions"},
    "answer": {"answer", "answers"},
    "conversations": {"conversation", "conversations", "messages"},
}
ABOUT_ROWS = {"split", "type", "id", "source", "license", "date", "question"}  # in names of columns without captions
CONTENTS = {"image": "images", "text": "captions", "question": "questions", "conversations": "conversations"}
NAMES = USUAL_NAMES | {"answer": ("answer", "answers")}
PATHS_IN_PARQUET = "its images are paths"  # begins the problem of parquet without bytes
NO_ROWS = "it is a JSON object, not a list of rows"
LLAVA_ROLES = {"human", "gpt"}
ADDRESS_WORDS = {"url", "urls", "link", "links"}  # in names of columns of addresses
ADDRESS_PATTERN = re.compile("https?://", re.IGNORECASE)


@dataclass(frozen=True)
class RecognizedFormat:
    """Description of a file, or of a folder of captioned images, from its beginning and its name.

    Attributes:
        format: a key of `FORMATS`.
        columns: the columns that each key of `columns` may name; several if the names leave a choice.
        is_conversation: whether its rows are conversations.
        images: paths of images in the first rows.
        no_pairs: the reason why conversations are no pairs, such as "several questions".
    """

    format: str
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_conversation: bool = False
    images: tuple[str, ...] = ()
    no_pairs: str = ""

    @property
    def split(self) -> str:
        return "finetune" if self.no_pairs else "pretrain"


class UnreadableMediaError(Exception):
    """Error for conversations whose media cannot be read; the message is a sentence without the file's name."""


class UnrecognizedFormatError(Exception):
    """Error for a file without rows of the format; the message is a sentence without the file's name."""


@dataclass(frozen=True)
class SourceFormat:
    """A format of sources.

    Attributes:
        suffixes: endings of its files; data/sources has a reader of the format's name.
        title: its name in messages.
        recognize: function that returns a recognized format, or raises UnrecognizedFormatError; None for folders of
            captioned images, which `find_groups` recognizes by names.
    """

    suffixes: tuple[str, ...]
    title: str
    recognize: Callable[[FileSample], RecognizedFormat] | None = None


def _recognize_pairs(sample: FileSample) -> RecognizedFormat:
    for row in sample.rows:
        is_pair = isinstance(row.get("text"), str) and isinstance(row.get("images"), list)
        if is_pair and (not sample.is_list or "<__dj__image>" in row["text"]):  # a list without tokens is a table
            return RecognizedFormat("data_juicer", images=_list_images(sample.rows))
    raise UnrecognizedFormatError(_describe_keys(sample))


def _recognize_conversations(format_name: str, sample: FileSample) -> RecognizedFormat:
    rows = [row for row in sample.rows if _list_turns(row)]
    if not rows or format_name != ("llava" if all(map(_is_llava, rows)) else "sharegpt"):
        raise UnrecognizedFormatError(_describe_keys(sample))
    media = [read_row_media(row, ("images", "image")) for row in rows]
    if unread := media[0].unread if all(row_media.unread for row_media in media) else "":
        raise UnreadableMediaError(f"{unread} (as in all of its first {len(rows)} rows)")
    images = tuple(path for row_media in media for path in row_media.images)
    readable = [row for row, row_media in zip(rows, media, strict=True) if not row_media.unread]
    no_pairs = next(filter(None, map(_find_pair_problem, readable)), "" if images else "no image")
    return RecognizedFormat(format_name, {}, True, images, no_pairs)


def _recognize_table(sample: FileSample) -> RecognizedFormat:
    """Recognize a table of image paths and captions; columns without a name are not used."""
    if not sample.names:
        raise UnrecognizedFormatError(_describe_keys(sample))
    if any(name.lower().endswith(IMAGE_SUFFIXES) for name in sample.names):
        raise UnrecognizedFormatError(
            f"its first line is a row ({enumerate_names(sample.names)}); add a line with names of columns"
        )
    values = {name: _list_texts(row.get(name) for row in sample.rows) for name in sample.names}
    images = [name for name, texts in values.items() if any(map(_is_image_name, texts))]
    if images and all(map(_is_nameless, images)):
        raise UnrecognizedFormatError("the column of its images has no name; write one in its first line")
    for name in filter(_is_nameless, sample.names):  # such as the index that pandas writes
        del values[name]
    images = [name for name in images if name in values]
    texts = [
        name for name, column_values in values.items() if name not in images and any(map(_has_words, column_values))
    ]
    columns = _find_columns(tuple(values), images.__contains__, texts.__contains__, images, texts)
    paths = tuple(values[columns["image"][0]]) if len(columns["image"]) == 1 else ()
    return RecognizedFormat("table", columns, images=paths)


def _recognize_columns(format_name: str, sample: FileSample) -> RecognizedFormat:
    """Recognize a column of images as bytes, and columns of captions or conversations."""
    column_types = sample.kinds
    images = tuple(name for name, column_type in column_types.items() if column_type == "image")
    texts = tuple(name for name, column_type in column_types.items() if column_type == "text")
    paths = _find_names("image", texts, lambda name: not ADDRESS_WORDS & split_words(name))
    if not images and paths and len(texts) > 1:
        raise UnrecognizedFormatError(f"{PATHS_IN_PARQUET} (column {paths[0]}), which only tables of text may have")
    if not images:
        raise UnrecognizedFormatError(
            f"it has no column of images as bytes; its columns are {enumerate_names(sample.names)}"
        )
    turns = _find_names("conversations", sample.names, lambda name: column_types[name] == "turns")
    if turns:
        image = _find_names("image", sample.names, lambda name: name in images) or images
        return RecognizedFormat(format_name, {"image": image, "conversations": turns}, is_conversation=True)
    columns = _find_columns(
        sample.names, lambda name: name in images, lambda name: column_types[name] == "text", images
    )
    return RecognizedFormat(format_name, columns)


def _recognize_webdataset(sample: FileSample) -> RecognizedFormat:
    """Recognize captions in .txt files, or captions and conversations in .json files, next to the images of a shard."""
    suffixes, metadata = sample.names, sample.rows[0] if sample.rows else {}
    if not any(suffix.endswith(IMAGE_SUFFIXES) for suffix in suffixes):
        ends = f", and its files end with {enumerate_names(suffixes)}" if suffixes else ""
        raise UnrecognizedFormatError(f"it holds no images{ends}")
    if turns := _find_names("conversations", tuple(metadata), lambda name: isinstance(metadata[name], list)):
        no_pairs = _find_pair_problem({"conversations": metadata[turns[0]], "image": "of the shard"})
        return RecognizedFormat("webdataset", {"conversations": turns}, True, no_pairs=no_pairs)
    if ".txt" in suffixes:  # a .txt has precedence over captions in a .json
        return RecognizedFormat("webdataset")
    if not metadata:
        raise UnrecognizedFormatError(
            f"its images have neither .txt nor .json; the endings are {enumerate_names(suffixes)}"
        )
    columns = _find_columns(tuple(metadata), lambda name: False, lambda name: _is_text(metadata[name]), ("",))
    return RecognizedFormat("webdataset", {role: names for role, names in columns.items() if role != "image"})


FORMATS = {
    "data_juicer": SourceFormat((".jsonl", ".json"), "pairs in Data-Juicer's format", _recognize_pairs),
    "llava": SourceFormat(
        (".json", ".jsonl"), "conversations in LLaVA's format", partial(_recognize_conversations, "llava")
    ),
    "sharegpt": SourceFormat(
        (".json", ".jsonl"),
        "conversations in the format of ShareGPT or OpenAI",
        partial(_recognize_conversations, "sharegpt"),
    ),
    "parquet": SourceFormat((".parquet",), "parquet with the bytes of images", partial(_recognize_columns, "parquet")),
    "arrow": SourceFormat(
        (".arrow",), "a dataset that Hugging Face's save_to_disk wrote", partial(_recognize_columns, "arrow")
    ),
    "webdataset": SourceFormat((".tar",), "a WebDataset, tar files of images with captions", _recognize_webdataset),
    "table": SourceFormat((".csv", ".tsv", ".jsonl", ".json"), "a table of image paths and captions", _recognize_table),
    "folder": SourceFormat(IMAGE_SUFFIXES, "images, each with a .txt file of the same name"),
}


def recognize_file(file: Path, folder: Path) -> RecognizedFormat | str:
    """Return the recognized format of a file, or a sentence with the reason why there is none."""
    sample, problem = read_sample(file, folder), ""
    for source_format in FORMATS.values():
        if file.suffix.lower() in source_format.suffixes:
            try:
                return source_format.recognize(sample)
            except UnrecognizedFormatError as error:
                problem = str(error)
            except UnreadableMediaError as error:
                raise InputError(f"dataset: {file}: {error}; only image files are read (docs/data.md)") from None
    return problem


def _list_images(rows: Iterable[dict]) -> tuple[str, ...]:
    values = (row.get("images") or row.get("image") for row in rows)
    path_lists = [value if isinstance(value, list) else [value] for value in values]
    return tuple(path for paths in path_lists for path in paths if isinstance(path, str))


def _list_turns(row: dict) -> list[dict]:
    turns = list_turns(row)
    return turns if all(isinstance(turn, dict) for turn in turns) else []


def _is_llava(row: dict) -> bool:
    turns = row.get("conversations") or [{}]
    if row.get("id") is None or "images" in row or not all(turn.get("from") in LLAVA_ROLES for turn in turns):
        return False
    if not all(isinstance(turn.get("value"), str) for turn in turns):
        return False
    return not read_row_media(row).images or any(IMAGE_TOKEN in turn["value"] for turn in turns)


def _find_pair_problem(row: dict) -> str:
    """Return why a conversation is no pair of one image and one text, or ""; an image may be null."""
    speakers = [turn.get("from") or turn.get("role") or "assistant" in turn for turn in _list_turns(row)]
    answers = sum(speaker in ("gpt", "assistant", "model", True) for speaker in speakers)
    if answers != 1:
        return "several questions"
    images = read_row_media(row, ("images", "image")).images
    if len(images) > 1:
        return "several images"
    return "" if images or has_empty_image(row) else "no image"


def _is_nameless(column: str) -> bool:
    return not column.strip() or re.fullmatch(r"Unnamed: \d+", column) is not None


def _list_texts(values: Iterable[Any]) -> list[str]:
    """Return the strings among values and in lists."""
    lists = (value if isinstance(value, list) else [value] for value in values)
    return [text for texts in lists for text in texts if isinstance(text, str) and text]


def _is_image_name(text: str) -> bool:
    return text.lower().endswith(IMAGE_SUFFIXES) or ADDRESS_PATTERN.match(text) is not None


def _has_words(text: str) -> bool:
    return not ADDRESS_PATTERN.match(text) and re.search(r"[^\W\d_]{2}", text) is not None


def _is_text(value: Any) -> bool:
    value = value[0] if isinstance(value, list) and value else value
    return isinstance(value, str) and not ADDRESS_PATTERN.match(value)


def _find_columns(
    names: Sequence[str],
    is_image: Callable[[str], Any],
    is_text: Callable[[str], Any],
    images: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> dict[str, tuple[str, ...]]:
    """Return the columns of images, captions and, if there are any, questions.

    Args:
        names: names of all columns.
        is_image: whether a column's content may be images.
        is_text: whether a column's content may be captions, questions or answers.
        images: columns one of which may have the images if no name is recognized.
        texts: columns one of which may have the captions if no name is recognized.
    """
    image = _find_names("image", names, is_image) or tuple(images)
    question = _find_names("question", names, is_text)
    text = tuple(name for name in NAMES["text"] if name in names)
    if question:  # the texts are then the answers, not captions
        text += tuple(name for name in NAMES["answer"] if name in names and is_text(name))
        text = text or _find_names("answer", names, is_text)
    text = text or tuple(name for name in _find_names("text", names, is_text) if name not in question)
    if not text:
        text = tuple(name for name in texts if name not in (*image, *question))
        if len(text) == 1 and ABOUT_ROWS & split_words(text[0]):
            text = ()
    for role, columns in (("image", image), ("text", text)):
        if not columns:
            fits, content = (is_image, "image") if role == "image" else (is_text, "text")
            empty = [name for name in names if _is_likely(role, name) and not fits(name)]
            likely = f"; {empty[0]} has no {content} in its first rows" if empty else ""
            raise UnrecognizedFormatError(
                f"no column is recognized as the {CONTENTS[role]}; the columns are {enumerate_names(names)}{likely}"
            )
    return {"image": image, "text": text} | ({"question": question} if question else {})


def _find_names(role: str, names: Sequence[str], fits: Callable[[str], Any]) -> tuple[str, ...]:
    """Return the columns that may have a role: columns with usual names, or else with a word of `HINTS` in names."""
    usual = tuple(name for name in NAMES[role] if name in names)
    if len(usual) > 1:
        usual = tuple(filter(fits, usual)) or usual
    return usual or tuple(name for name in names if _is_likely(role, name) and fits(name))


def _is_likely(role: str, name: str) -> bool:
    """Return whether a column's name has a word that hints at a role."""
    return bool(HINTS[role] & split_words(name))


def split_words(name: str) -> set[str]:
    return set(re.findall("[a-z]+", re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower()))


def _describe_keys(sample: FileSample) -> str:
    if not sample.names:
        return NO_ROWS
    return f"its rows are of no known format; their keys are {enumerate_names(sample.names)}"


def enumerate_names(names: Sequence[str]) -> str:
    return ", ".join(name[:MAX_NAME_LENGTH] for name in names[: 2 * SHOWN_NAMES]) + (
        ", …" if len(names) > 2 * SHOWN_NAMES else ""
    )
