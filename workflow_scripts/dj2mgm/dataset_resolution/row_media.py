"""Media of conversations: image paths wherever common trainers put them, and media that would be left out.

LLaMA-Factory, ms-swift and Data-Juicer have lists next to the turns, OpenAI, TRL, Axolotl and Qwen-VL parts of a turn,
LLaVA-NeXT and InternVL a `video` key. Images are read if all keys and parts that may name them name the same ones.
Other media, and images that cannot be read, make a row unusable, because it would be trained on without them:
`find_unread_media` decides so for every reader.
"""

import re
from collections.abc import Collection, Iterator, Sequence
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
TEXT_KEYS = {
    *("from", "role", "value", "content", "text", "user", "assistant", "system", "id", "type", "question", *TURN_KEYS),
    *("caption", "original_caption", "title", "alt", "alt_text"),
}
PLAIN_TURNS = {"from", "value"}, {"role", "content"}
MAX_PATH_WORDS = 8  # a longer string that ends like the name of a file is a text

_ENDINGS = r"(?:_?(?:path|file|file_?name|name|list|dir|folder|ur[il]|link|src|source|bytes|data|base64|b64|content))"
_IMAGE = r"(?:image|img|picture|photo|pic|figure|screenshot)"
_OTHER = r"(?:video|vid|movie|clip|gif|frame|audio|speech|sound|voice|music|waveform|wav|mp3|mp4|media|point_?cloud)"
IMAGE_KEY = re.compile(rf"(?:input_|raw_)?{_IMAGE}s?(?:_?\d+)?{_ENDINGS}?s?(?:_?\d+)?")
FILE_KEY = re.compile(r"file|file_?path|file_?name|path|jpe?g|png|webp")  # image paths only if they end like images
OTHER_KEY = re.compile(rf"(?:input_|raw_)?{_OTHER}s?(?:_?\d+)?{_ENDINGS}?s?(?:_?\d+)?")
# Next to an image, keys like `video_id` and `image_source` state facts about it. These keys still name media.
CONTENT_KEY = re.compile(
    r"(?:video|audio|speech|sound|media|frame)s?(?:_?(?:path|file|list|url|bytes|data|base64)s?)?"
    rf"|{_IMAGE}s?(?:(?:_?\d+)?|_?\d+{_ENDINGS}|{_ENDINGS}_?\d+)"
)
MEDIA_BYTES = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM|RIFF|II\*\0|MM\0\*|....ftyp|\x1aE\xdf\xa3|ID3|OggS|fLaC", re.DOTALL
)

# Tokens and tags that stand for media. In answers, tags that HTML has too are text.
_KINDS = r"(?:im|img|image|picture|photo|vid|video|aud|audio|speech|sound|voice|music|media|frame|vision|visual)"
_PARTS = r"(?:[ _-]?(?:\d+|here|placeholder|token|soft_token|context|pad|patch|start|end|newline|feature|features))"
MARK = re.compile(
    rf"<__dj__\w+>|(?i:</?{_KINDS}s?{_PARTS}+>|<(?:start|end|begin)_of_{_KINDS}>)|\[(?:IMG|VIDEO|AUDIO)(?:_\w+)?\]"
)
TAG = re.compile(rf"</?{_KINDS}s?>|<img\s[^>]{{0,200}}?\bsrc\b|!\[[^\]\n]{{0,200}}\]\(", re.IGNORECASE)
TAGGED_IMAGE = re.compile(r"(?:Picture \d+: ?)?<img>([^<>\n]+)</img>\n?")  # Qwen-VL
PART_KEYS = ("image_url", "url", "path", "image", "file", "source", "image_path")
DATA_KEYS = ("bytes", "data", "base64")  # images themselves, which are not read
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class RowMedia:
    """Image paths of a row, and a phrase about its other media; the phrase is empty if there are none."""

    images: tuple[str, ...] = ()
    unread: str = ""


def read_row_media(
    row: dict, order: tuple[str, str] = ("image", "images"), stored: Sequence[str] | None = None
) -> RowMedia:
    """Return the media of a conversation.

    Args:
        row: the row, with its turns under one of `TURN_KEYS`.
        order: keys of images; the first one with a value counts, before parts of turns and before other names.
        stored: the images in the row's file, such as an archive, if it holds images. The row may name them once more,
            by other names.
    """
    in_turns, unread = _read_turns([turn for turn in list_turns(row) if isinstance(turn, dict)])
    image_keys = [key for key in order if _has_media(row.get(key))]
    if not (image_keys or in_turns):
        image_keys = [key for key, value in row.items() if _matches(IMAGE_KEY, key) and _has_media(value)]
    if not (image_keys or in_turns):
        image_keys = [key for key, value in row.items() if _matches(FILE_KEY, key) and _names_images(value)]
    paths_by_key = {key: read_paths(row[key]) for key in image_keys} | ({"conversations": in_turns} if in_turns else {})
    if stored is not None:
        lost = "its file holds none of its images" if paths_by_key and not stored else ""
        unread = unread or lost or find_unread_media(row, stored, stored=True)
        if in_turns and len(in_turns) != len(stored):
            unread = unread or "its turns name other images than its file holds"
        return RowMedia(tuple(stored), unread)
    first = next(iter(paths_by_key), "")
    images = paths_by_key.get(first, [])
    if images is None:
        is_data = _is_data(row[first])
        problem = "is an image in base64, not the path of a file" if is_data else "is not the path of an image"
        return RowMedia((), unread or f"its {first!r} {problem}")
    other = next((key for key, paths in paths_by_key.items() if paths != images), "")
    unread = unread or (f"its images may be under {first!r} or {other!r}" if other else "")
    return RowMedia(tuple(images), unread or find_unread_media(row, images, image_keys))


def find_unread_media(row: dict, images: Sequence[str] = (), used: Collection[str] = (), stored: bool = False) -> str:
    """Return a phrase about a key that is not used and whose value names media, or "" if there is none.

    Next to images, another name or the web address of an image of the row is not unread.

    Args:
        row: a row of any reader, or some of its keys.
        images: paths of the images that are read.
        used: keys whose values the reader uses.
        stored: whether the images are stored in the row's file, so that their usual keys name them once more.
    """
    for key, value in row.items():
        if key in used or key in TEXT_KEYS or value is None or key.startswith("__dj__"):
            continue
        if stored and images and _is_name_of_stored(key, value, len(images)):
            continue
        if (media_key := next(_find_media_keys(value, key, images), None)) is not None:
            return f"its {media_key!r} is not read"
    return ""


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
        text, kind = part.get("text"), part.get("type")
        if not kind or kind in TEXT_PARTS:
            image_key = next((key for key in PART_KEYS if part.get(key) and _matches(IMAGE_KEY, key)), None)
            kind = image_key or ("text" if isinstance(text, str) else kind or next(filter(part.get, part), None))
        if not isinstance(kind, str) or not isinstance(text, str | None) or (kind in TEXT_PARTS and text is None):
            return None
        used = {"type", "text", "index"}
        if _matches(IMAGE_KEY, kind):
            paths = read_paths({key: part[key] for key in (*PART_KEYS, *DATA_KEYS) if part.get(key)})
            is_mark = not any(_has_media(value) for key, value in part.items() if key not in used)
            if is_mark or (paths is not None and len(paths) == 1):
                images.append(None if is_mark else paths[0])
            else:
                unread = unread or f"an image in a part of type {kind!r} is not the path of a file"
            texts.append(IMAGE_TOKEN)
            used |= {*PART_KEYS, *DATA_KEYS}
        elif kind not in TEXT_PARTS:
            unread = unread or f"a part of type {kind[:40]!r} is not read"
        unread = unread or find_unread_media(part, used=used)
        if text or kind in TEXT_PARTS:
            texts.append(text or "")
    return "\n".join(texts), images, unread


def _read_turns(turns: list[dict]) -> tuple[list[str], str]:
    """Return the image paths in turns, and a phrase about media in turns that are not read."""
    images: list[str | None] = []
    unread = ""
    for turn in turns:
        text = turn.get("value", turn.get("content"))
        if isinstance(text, str) and "<img>" not in text and turn.keys() in PLAIN_TURNS:
            continue
        content = read_content(text)
        if content:
            text, parts, problem = content
            images += [*parts, *TAGGED_IMAGE.findall(text)]
            unread = unread or problem
        in_keys = {key: read_paths(turn[key]) for key in turn if _matches(IMAGE_KEY, key) and _has_media(turn[key])}
        images += [path for paths in in_keys.values() for path in paths or []]
        unread = unread or find_unread_media(turn, used=[key for key, paths in in_keys.items() if paths is not None])
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


def _names_other_media(path: str) -> bool:
    return path.lower().partition("?")[0].endswith(OTHER_SUFFIXES)


def _names_images(value: Any) -> bool:
    paths = read_paths(value)
    return bool(paths) and all(path.lower().endswith(IMAGE_SUFFIXES) for path in paths)


def _is_name_of_stored(key: str, value: Any, count: int) -> bool:
    """Return whether a key has the usual form for names of as many images."""
    if key[-1:].isdigit() or not (_matches(IMAGE_KEY, key) or _matches(FILE_KEY, key)):
        return False
    paths = read_paths(value)
    return paths is not None and len(paths) == count and not any(map(_names_other_media, paths))


def _find_media_keys(value: Any, key: str, images: Sequence[str]) -> Iterator[str]:
    """Yield the keys, at any depth, whose values are media by the key's name, by their bytes, or as a path."""
    if isinstance(value, str) and images and _is_same_image(value, images):
        return
    is_key = _matches(CONTENT_KEY, key) if images else _matches(IMAGE_KEY, key) or _matches(OTHER_KEY, key)
    if isinstance(value, list | tuple):  # tuples of pyarrow's maps
        for item in value:
            if isinstance(item, str | dict | list | tuple | bytes):
                yield from _find_media_keys(item, key, images)
            elif is_key and item is not None:
                yield key
    elif is_key and _has_media(value):
        yield key
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in TEXT_KEYS:
                yield from _find_media_keys(item, name, images)
    elif isinstance(value, str) and _is_media_name(value):
        yield key
    elif isinstance(value, bytes) and (key in DATA_KEYS or MEDIA_BYTES.match(value)):
        yield key


def _is_same_image(text: str, images: Sequence[str]) -> bool:
    """Return whether a text is the web address of an image, or a path that ends like one of the images, or the reverse.

    An address next to an image that is read tells where the image comes from.
    """
    path = _normalize_path(text)
    if path.startswith(("http://", "https://")) and path.lower().partition("?")[0].endswith(IMAGE_SUFFIXES):
        return True
    others = map(_normalize_path, images)
    return any(path == other or path.endswith(f"/{other}") or other.endswith(f"/{path}") for other in others)


def _normalize_path(text: str) -> str:
    return text[:4096].strip().replace("\\", "/").removeprefix("file://").removeprefix("./")


def _is_media_name(text: str) -> bool:
    path = text[:4096].strip().lower().partition("?")[0]
    is_path = path.endswith(MEDIA_SUFFIXES) and "\n" not in path and len(path.split()) <= MAX_PATH_WORDS
    return is_path or path.startswith(("data:image", "data:video", "data:audio"))
