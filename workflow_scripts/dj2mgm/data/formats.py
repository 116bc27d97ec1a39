"""Readers of users' files and builders of rows: Data-Juicer's pairs, LLaVA's conversations, held-out rows, plain texts.

The workflow's own files have been checked when `make_dataset.py` wrote them. `storage.files.read_jsonl` and
`streaming.read_json_list` read their rows unchecked.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from dj2mgm.dataset_resolution.row_media import (
    IMAGE_TOKEN,
    UNREAD_MEDIA,
    find_media_mark,
    find_unread_media,
    has_empty_image,
    read_row_media,
    replace_tagged_images,
)
from dj2mgm.errors import InputError, quote_value
from dj2mgm.settings.string_formats import find_control_character, find_control_token
from dj2mgm.storage.streaming import (
    NumberedIds,
    UniqueIds,
    find_first_character,
    parse_identifier,
    read_list_or_lines,
    read_objects,
)

# Data-Juicer's image–text format: one JSON object per line.
#
#     {"id": "000784545", "text": "<__dj__image>\na white chandelier <|__dj__eoc|>", "images": ["images/000784545.jpg"]}
#
# Image paths are relative to the dataset's image folder. A row may have a `question`, which stage 1 uses for models
# with a chat template.

DJ_IMAGE_TOKEN = "<__dj__image>"
END_OF_CHUNK = "<|__dj__eoc|>"


def build_dj_text(caption: str) -> str:
    """Return Data-Juicer's `text` for one image with this caption."""
    return f"{DJ_IMAGE_TOKEN}\n{caption} {END_OF_CHUNK}"


def extract_caption(text: str) -> str:
    """Return the caption inside a Data-Juicer `text`, without image token and end of chunk."""
    return text.replace(DJ_IMAGE_TOKEN, "").strip().removesuffix(END_OF_CHUNK).strip()


def replace_caption(text: str, caption: str) -> str:
    """Return a Data-Juicer `text` with another caption between the same tokens and white space.

    A text without a caption, or with the image token inside it, gets the form of `build_dj_text`.
    """
    current = extract_caption(text)
    if caption == current:
        return text
    head, token, tail = text.partition(DJ_IMAGE_TOKEN)
    if not current or (head.strip() and extract_caption(tail)):
        return build_dj_text(caption)
    if head.strip():
        return head.replace(current, caption, 1) + token + tail
    return head + token + tail.replace(current, caption, 1)


def read_pairs(path: str | Path) -> Iterator[dict]:
    """Yield the validated rows of a user's file, one per image.

    A row with several images, each in a chunk of its own, becomes several rows (`<id>~2`, …).
    """
    used = UniqueIds(path)
    for number, location, row in _read_dj_rows(path):
        if len(row["images"]) == 1:
            used.add(row["id"], number)
            yield row
            continue
        chunks = [chunk.strip() for chunk in row["text"].split(END_OF_CHUNK) if chunk.strip()]
        if len(chunks) != len(row["images"]) or any(chunk.count(DJ_IMAGE_TOKEN) != 1 for chunk in chunks):
            raise InputError(
                f"{location}: {len(row['images'])} images need as many chunks; write "
                f"{DJ_IMAGE_TOKEN}\\n<caption> {END_OF_CHUNK} for each"
            )
        for part, (image, chunk) in enumerate(zip(row["images"], chunks, strict=True), start=1):
            identifier = f"{row['id']}~{part}" if part > 1 else row["id"]
            used.add(identifier, number)
            yield row | {"id": identifier, "images": [image], "text": build_dj_text(extract_caption(chunk))}


def _read_dj_rows(path: str | Path) -> Iterator[tuple[int, str, dict]]:
    """Yield each row with its number and location; the numbers of image tokens and images must agree."""
    is_list = Path(path).suffix.lower() == ".json" and find_first_character(path) == "["
    for number, row in read_list_or_lines(path) if is_list else read_objects(path):
        location = f"{path}, {'row' if is_list else 'line'} {number}"
        for key, kind in (("id", str), ("text", str), ("images", list)):
            if key not in row:
                raise InputError(f"{location}: key {key!r} is missing; a row needs id, text and images")
            if not isinstance(row[key], kind):
                type_name = type(row[key]).__name__
                raise InputError(
                    f"{location}: {key!r} must be a {kind.__name__}, found {type_name}; write one, or delete the row"
                )
        images = row["images"]
        if not images or not all(isinstance(image, str) for image in images):
            raise InputError(f"{location}: 'images' must contain at least one path, found {quote_value(images)}")
        if (tokens := row["text"].count(DJ_IMAGE_TOKEN)) != len(images):
            expected = "exactly once" if len(images) == 1 else f"once for each of its {len(images)} images"
            raise InputError(
                f"{location}: 'text' must contain the image token {DJ_IMAGE_TOKEN} {expected}, found {tokens}; "
                f"write {DJ_IMAGE_TOKEN}\\n<caption> {END_OF_CHUNK}"
            )
        if mark := find_media_mark(row["text"].replace(DJ_IMAGE_TOKEN, ""), is_answer=True):
            raise InputError(f"{location}: 'text' contains {mark}, but only images are read; delete the row")
        if unread := find_unread_media(row, images, {"images", "text"}):
            raise InputError(f"{location}: {unread}; delete the key, or the row")
        if not isinstance(row.get("question", ""), str):
            raise InputError(
                f"{location}: 'question' must be a string, found {quote_value(row['question'])}; correct it or "
                "leave it out"
            )
        yield number, location, row


# LLaVA's conversation format, as a JSON list or as one object per line.
#
# {"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat is this?"},
#                                                 {"from": "gpt", "value": "A cat."}]}
#
# `image` may be a list; each <image> in the human turns then stands for the next path. Images under other names are
# read, too (row_media.py). A row with media that are not read gets the key UNREAD_MEDIA, and is not trained on.

CHAT_ROLES = {"human": "user", "gpt": "assistant"}  # LLaVA's roles → roles of chat templates


def build_conversation(identifier: str, image: str, question: str, answer: str, unread: str = "") -> dict:
    """Return a conversation of one question and answer about one image; without a question, a stage-1 caption row.

    `unread` is a phrase about media of the row that are not read.
    """
    human = f"{IMAGE_TOKEN}\n{question}" if question else IMAGE_TOKEN
    turns = [{"from": "human", "value": human}, {"from": "gpt", "value": answer}]
    row = {"id": identifier, "image": image, "conversations": turns}
    return row | ({UNREAD_MEDIA: unread} if unread else {})


def build_text_conversation(question: str, answer: str) -> dict:
    """Return a conversation of one question and answer without an image."""
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def choose_spread_rows(total: int, limit: int) -> set[int]:
    """Return the numbers of at most `limit` rows, spread over all of them."""
    return {number * total // limit for number in range(limit)} if total > limit else set(range(total))


def list_images(row: dict) -> list[str]:
    """Return the image paths of a LLaVA row; [] for a text-only row."""
    images = row.get("image")
    return [images] if isinstance(images, str) else images or []


def read_llava(path: str | Path, number_ids: bool = False) -> Iterator[dict]:
    """Yield the validated rows of a user's `.json` list or `.jsonl` file. Rows without `image` are text-only.

    `find_image_problem` and `find_control_problem` check the texts, including their image tokens. `number_ids` numbers
    repeated ids, as in published files with several rows about one image, and accepts integers: the second row
    of id `7` gets `7~2`, or the next number that no earlier row has.
    """
    ids, numbered = UniqueIds(path), NumberedIds("~")
    for number, row in read_list_or_lines(path):
        location = f"{path}, row {number}"
        if number_ids and row.get("id") is not None:
            row = row | {"id": parse_identifier(row["id"], location)}
        if not isinstance(row.get("id"), str):
            raise InputError(
                f"{location}: 'id' must be a string, found {quote_value(row.get('id'))}; give each row one"
            )
        if number_ids:
            row = row | {"id": numbered.add(row["id"])}
        else:
            ids.add(row["id"], number)
        images = row.get("image")
        if not isinstance(images, str | list | None) or not all(isinstance(image, str) for image in images or ()):
            raise InputError(
                f"{location}: 'image' must be a path or a list of paths, found {quote_value(images)}; leave it out "
                "for text-only rows"
            )
        _check_turns(location, row.get("conversations"))
        yield _add_media(row)


def _add_media(row: dict) -> dict:
    """Return a row with the images that it has under other names than `image`, and with a phrase about other media."""
    media = read_row_media(row)
    if media.images and not row.get("image"):
        turns = [turn | {"value": replace_tagged_images(turn["value"])} for turn in row["conversations"]]
        row = row | {"image": media.images[0] if len(media.images) == 1 else list(media.images), "conversations": turns}
    elif row.get("image") in (None, []) and has_empty_image(row):
        row = row | {"image": None}
    return row | ({UNREAD_MEDIA: media.unread} if media.unread else {})


def _check_turns(location: str, turns: object) -> None:
    if not isinstance(turns, list) or len(turns) < 2 or len(turns) % 2:
        raise InputError(f"{location}: 'conversations' must alternate human and gpt turns, ending with gpt")
    for position, turn in enumerate(turns):
        speaker = "gpt" if position % 2 else "human"
        if not isinstance(turn, dict) or turn.get("from") != speaker or not isinstance(turn.get("value"), str):
            raise InputError(f"{location}: turn {position + 1} must be {{'from': '{speaker}', 'value': text}}")


def check_no_control(text: str, location: str) -> None:
    """Raise InputError for a question that contains a control character or token, such as the end of a turn."""
    if control := find_control_token(text):
        raise InputError(f"{location}: its text contains the control token {control}; fix or delete the row")
    check_no_control_character(text, location)


def check_no_control_character(text: str, location: str) -> None:
    """Raise InputError for a text that contains a control character."""
    if character := find_control_character(text):
        raise InputError(f"{location}: its text contains the control character {character}; fix or delete the row")


def find_character_problem(row: dict) -> str | None:
    """Return the problem if a turn of a LLaVA row contains a control character, else None."""
    character = find_control_character("".join(turn["value"] for turn in row["conversations"]))
    return character and f"its text contains the control character {character}"


def find_image_problem(row: dict) -> str | None:
    """Return the problem if the human turns do not contain one image token per image, else None."""
    expected = len(list_images(row))
    tokens = sum(turn["value"].count(IMAGE_TOKEN) for turn in row["conversations"][::2])
    if tokens == expected:
        return None
    return f"expected {expected} image token {IMAGE_TOKEN} in the human turns, found {tokens}"


def find_mark_problem(row: dict) -> str | None:
    """Return the problem if a turn of a LLaVA row has a mark of media that are not read, else None."""
    image_mark = DJ_IMAGE_TOKEN if list_images(row) else IMAGE_TOKEN
    turns = ((turn["value"].replace(image_mark, ""), turn["from"] == "gpt") for turn in row["conversations"])
    marks = (find_media_mark(text, is_answer) for text, is_answer in turns)
    mark = next(filter(None, marks), None)
    return mark and f"its text contains {mark}, but only images are read, at {IMAGE_TOKEN}"


def find_control_problem(row: dict, tokens: Collection[str] = ()) -> str | None:
    """Return the problem if a LLaVA row contains a control token (one of `tokens`, or of all formats), else None.

    Its image tokens are allowed.
    """
    questions, answers = (turn["value"] for turn in row["conversations"][::2]), row["conversations"][1::2]
    texts = [*(text.replace(IMAGE_TOKEN, "") for text in questions), *(turn["value"] for turn in answers)]
    control = next(filter(None, (find_control_token(text, tokens) for text in texts)), None)
    return control and f"its text contains the control token {control}"


OBJECT_KEYS = {"color", "shape", "position"}
QUESTION_KEYS = {"type", "question", "answer"}


def read_evaluation(path: str | Path) -> Iterator[dict]:
    """Yield the validated rows of a user's file; missing `objects` and `questions` become empty lists."""
    ids = UniqueIds(path)
    for number, row in read_objects(path):
        location = f"{path}, line {number}"
        if not isinstance(row.get("id"), str) or not isinstance(row.get("image"), str):
            raise InputError(f"{location}: 'id' and 'image' must be strings")
        ids.add(row["id"], number)
        captions = row.get("captions")
        if not isinstance(captions, list) or not captions or not all(isinstance(c, str) and c for c in captions):
            raise InputError(f"{location}: 'captions' must be a list of at least one reference caption")
        for key, keys in (("objects", OBJECT_KEYS), ("questions", QUESTION_KEYS)):
            items = row.setdefault(key, [])
            if not isinstance(items, list) or not all(isinstance(i, dict) and set(i) == keys for i in items):
                raise InputError(f"{location}: {key!r} must be a list of objects with the keys {sorted(keys)}")
            if wrong := [value for item in items for value in item.values() if not isinstance(value, str)]:
                raise InputError(f"{location}: the values in {key!r} must be strings, found {wrong[0]!r}")
        for item in row["questions"]:
            check_no_control(item["question"], location)
        for text in (*captions, *(item["answer"] for item in row["questions"])):
            check_no_control_character(text, location)
        yield row
