"""Media of conversations: image paths wherever common trainers put them, and media that would be left out.

LLaMA-Factory, ms-swift and Data-Juicer have lists next to the turns, OpenAI, TRL, Axolotl and Qwen-VL parts of a turn,
LLaVA-NeXT and InternVL a `video` key. Images are read if there is one reading. Other media, and images that cannot be
read, make a row unusable: without them it would be trained on as text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dj2mgm.storage.image_files import HEIF_SUFFIXES, IMAGE_SUFFIXES

IMAGE_TOKEN = "<image>"
UNREAD_MEDIA = "unread_media"  # key of a row whose media cannot be read, with a phrase about them
OTHER_SUFFIXES = (
    *(".mp4", ".mkv", ".avi", ".mov", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv", ".3gp"),
    *(".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".wma"),
    *(".npy", ".npz", ".svg", ".ply", ".glb", ".dcm", *HEIF_SUFFIXES),
)
MEDIA_SUFFIXES = (*IMAGE_SUFFIXES, *OTHER_SUFFIXES)
TURN_KEYS = ("conversations", "messages", "texts")
TEXT_KEYS = {"from", "role", "value", "content", "text", "user", "assistant", "system", "id", "type", *TURN_KEYS}
PLAIN_TURN = {"from", "value"}
MAX_PATH_WORDS = 8  # a longer string that ends like the name of a file is a text

_ENDINGS = r"(?:_?(?:path|file|file_?name|name|list|dir|folder|ur[il]|link|src|source|bytes|data|base64|b64|content))"
_IMAGE = r"(?:image|img|picture|photo|pic|figure|screenshot)"
_OTHER = r"(?:video|vid|movie|clip|gif|frame|audio|speech|sound|voice|music|waveform|wav|mp3|mp4|media|point_?cloud)"
IMAGE_KEY = re.compile(rf"(?:input_|raw_)?{_IMAGE}s?{_ENDINGS}?s?")
FILE_KEY = re.compile(r"file|file_?path|file_?name|path|jpe?g|png|webp")  # image paths only if they end like images
OTHER_KEY = re.compile(rf"(?:input_|raw_)?{_OTHER}s?{_ENDINGS}?s?")
# keys that are no facts about an image, such as the name of the video that it is a frame of
CONTENT_KEY = re.compile(r"(?:video|audio|speech|sound|media|frame)s?(?:_?(?:path|file|list|url|bytes|data|base64)s?)?")

# Tokens and tags that stand for media. In answers, tags that HTML has too are text.
_KINDS = r"(?:im|img|image|picture|photo|vid|video|aud|audio|speech|sound|voice|music|media|frame|vision|visual)"
_PARTS = r"(?:[ _-]?(?:\d+|here|placeholder|token|soft_token|context|pad|patch|start|end|newline|feature|features))"
MARK = re.compile(
    rf"<__dj__\w+>|(?i:</?{_KINDS}s?{_PARTS}+>|<(?:start|end|begin)_of_{_KINDS}>)|\[(?:IMG|VIDEO|AUDIO)(?:_\w+)?\]"
)
TAG = re.compile(rf"</?{_KINDS}s?>", re.IGNORECASE)
TAGGED_IMAGE = re.compile(r"(?:Picture \d+: ?)?<img>([^<>\n]+)</img>\n?")  # Qwen-VL
PART_KEYS = ("image_url", "url", "path", "image", "file", "source", "image_path")
DATA_KEYS = ("bytes", "data", "base64")  # images themselves, which are not read


@dataclass(frozen=True)
class RowMedia:
    """Image paths of a row, and a phrase about its other media; the phrase is empty if there are none."""

    images: tuple[str, ...] = ()
    unread: str = ""

    def with_images_of_file(self, images: list[str]) -> "RowMedia":
        """Return the media of a row whose images are in its file, as in an archive."""
        lost = "its file holds none of its images" if self.images and not images else ""
        return RowMedia(tuple(images), self.unread or lost)


def read_row_media(row: dict, order: tuple[str, str] = ("image", "images")) -> RowMedia:
    """Return the media of a conversation.

    Args:
        row: the row, with its turns under one of `TURN_KEYS`.
        order: keys of images; the first one with a value counts, before parts of turns and before other names.
    """
    turns = [turn for turn in list_turns(row) if isinstance(turn, dict)]
    in_turns, unread = _read_turns(turns)
    image_keys = [key for key in order if _has_media(row.get(key))]
    if not (image_keys or in_turns):
        image_keys = [key for key, value in row.items() if _matches(IMAGE_KEY, key) and _has_media(value)]
    if not (image_keys or in_turns):
        image_keys = [key for key, value in row.items() if _matches(FILE_KEY, key) and _names_images(value)]
    images: list[str] | None = in_turns
    if image_keys:
        images = read_paths(row[image_keys[0]])
        others = [key for key in image_keys[1:] if key not in order and read_paths(row[key]) != images]
        if others:
            unread = unread or f"its images may be under {image_keys[0]!r} or {others[0]!r}"
    if images is None:
        is_data = _is_data(row[image_keys[0]])
        problem = "is an image in base64, not the path of a file" if is_data else "is not the path of an image"
        unread, images = unread or f"its {image_keys[0]!r} {problem}", []
    unread = unread or find_other_media(row, bool(images))
    if not images and not unread:
        unread = next((f"its {key!r} is not read" for key in _find_media_keys(row)), "")
    return RowMedia(tuple(images), unread)


def find_other_media(row: dict, has_images: bool) -> str:
    """Return a phrase about a key of other media than images, or ""; rows with images may have facts about them."""
    pattern = CONTENT_KEY if has_images else OTHER_KEY
    keys = (key for key, value in row.items() if _matches(pattern, key) and _has_media(value))
    return next((f"its {key!r} is not read" for key in keys), "")


def has_empty_image(row: dict) -> bool:
    """Return whether a row names no image although it has the key, as a row whose image is null."""
    return any(key in row and not row[key] for key in ("image", "images"))


def list_turns(row: dict) -> list:
    """Return the turns of a row of conversations, or []."""
    turns = next((row[key] for key in TURN_KEYS if row.get(key)), [])
    return turns if isinstance(turns, list) else []


def read_paths(value: Any) -> list[str] | None:
    """Return image paths: of a path, of an object that names one, or of a list of them; None for anything else.

    A null in a list stands for an image that is missing, whose path is empty.
    """
    if isinstance(value, str):
        return None if _is_data(value) else [value.removeprefix("file://")]
    if isinstance(value, list):
        parts = [[""] if part is None or part == "" else read_paths(part) for part in value]
        return None if None in parts else [path for part in parts for path in part]
    if isinstance(value, dict):
        sources = [value[key] for key in PART_KEYS if value.get(key)]
        return read_paths(sources[0]) if len(sources) == 1 and not any(map(value.get, DATA_KEYS)) else None
    return None


def read_content(content: Any) -> tuple[str, list[str | None], str] | None:
    """Return the text of a turn's content, the image paths in its parts, and a phrase about parts that are not read.

    Each image becomes a token in the text. A path is None if the part only marks the place of an image. The result is
    None if the content is neither text nor a list of parts.
    """
    if isinstance(content, str):
        return content, [], ""
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    images: list[str | None] = []
    unread = ""
    for part in content:
        if isinstance(part, str):
            part = {"text": part}
        if not isinstance(part, dict):
            return None
        kind = part.get("type") or next((key for key in part if part[key] and key in ("text", *PART_KEYS)), None)
        if not isinstance(kind, str):
            return None
        if kind in ("text", "input_text", "output_text"):
            if not isinstance(part.get("text"), str):
                return None
            texts.append(part["text"])
        elif _matches(IMAGE_KEY, kind):
            paths = read_paths({key: part[key] for key in (*PART_KEYS, *DATA_KEYS) if part.get(key)})
            is_mark = not any(_has_media(value) for key, value in part.items() if key not in ("type", "text", "index"))
            if is_mark or (paths is not None and len(paths) == 1):
                images.append(None if is_mark else paths[0])
            else:
                unread = unread or f"an image in a part of type {kind!r} is not the path of a file"
            texts.append(IMAGE_TOKEN)
        else:
            unread = unread or f"a part of type {kind[:40]!r} is not read"
    return "\n".join(texts), images, unread


def _read_turns(turns: list[dict]) -> tuple[list[str], str]:
    """Return the image paths in turns, and a phrase about media in turns that are not read."""
    images: list[str | None] = []
    unread = ""
    for turn in turns:
        text = turn.get("value")
        if isinstance(text, str) and "<img>" not in text and turn.keys() <= PLAIN_TURN:
            continue
        content = read_content(turn.get("value", turn.get("content")))
        if content:
            text, parts, problem = content
            images += [*parts, *TAGGED_IMAGE.findall(text)]
            unread = unread or problem
        for key, value in turn.items():
            if not _has_media(value) or key in TEXT_KEYS:
                continue
            paths = read_paths(value) if _matches(IMAGE_KEY, key) else None
            images += paths or []
            if paths is None and is_media_key(key):
                unread = unread or f"{key!r} of a turn is not read"
    paths = [image for image in images if image is not None]
    if paths and len(paths) < len(images):
        unread = unread or "only some of its images have a path"
    return paths, unread


def replace_tagged_images(text: str) -> str:
    """Replace Qwen-VL's `<img>path</img>` by image tokens."""
    return TAGGED_IMAGE.sub(f"{IMAGE_TOKEN}\n", text)


def find_media_mark(text: str, is_answer: bool = False) -> str | None:
    """Return a mark that stands for media, except the image token; an answer may contain tags that HTML has, too."""
    match = MARK.search(text) or (None if is_answer else TAG.search(text.replace(IMAGE_TOKEN, "")))
    return match.group() if match else None


def is_media_key(key: str) -> bool:
    """Return whether a key or column usually has images or other media."""
    return _matches(IMAGE_KEY, key) or _matches(OTHER_KEY, key)


@lru_cache(maxsize=4096)
def _matches(pattern: re.Pattern, key: str) -> bool:
    """Return whether a key has a pattern's form in any spelling, such as imagePath or Image-Path for image_path."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", key).lower().replace("-", "_").replace(" ", "_")
    return pattern.fullmatch(name) is not None


def _has_media(value: Any) -> bool:
    """Return whether a value holds a string or an object, or a list with anything in it."""
    if isinstance(value, dict):
        return any(map(_has_media, value.values()))
    return value.strip() != "" if isinstance(value, str) else isinstance(value, list | bytes) and len(value) > 0


def _is_data(value: Any) -> bool:
    return isinstance(value, str) and value[:5].lower() == "data:"


def _names_images(value: Any) -> bool:
    paths = read_paths(value)
    return bool(paths) and all(path.lower().endswith(IMAGE_SUFFIXES) for path in paths)


def _find_media_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the keys, at any depth, whose values are media by the key's name or by the ending of a path."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in TEXT_KEYS:
                yield from (name for _ in [0] if is_media_key(name) and _has_media(item))
                yield from _find_media_keys(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _find_media_keys(item, key)
    elif isinstance(value, str) and _is_media_name(value):
        yield key


def _is_media_name(text: str) -> bool:
    path = text[:4096].strip().lower().partition("?")[0]
    is_path = path.endswith(MEDIA_SUFFIXES) and "\n" not in path and len(path.split()) <= MAX_PATH_WORDS
    return is_path or path.startswith(("data:image", "data:video", "data:audio"))
