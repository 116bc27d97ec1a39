"""The rows of every file of the workflow: Data-Juicer jsonl, LLaVA, the held-out split, plain texts."""

from collections.abc import Collection, Iterator
from pathlib import Path

from dj2mgm.control_tokens import find_control
from dj2mgm.data.rows import NumberedIds, UniqueIds, check_object, parse_identifier, read_json_list, read_objects
from dj2mgm.errors import InputError

# Data-Juicer's image–text format: one JSON object a line.
#
#     {"id": "000784545", "text": "<__dj__image>\na white chandelier <|__dj__eoc|>", "images": ["images/000784545.jpg"]}
#
# Image paths are relative to the dataset's image folder. A row may have a `question`, which stage 1 of a model with a
# chat template asks.

DJ_IMAGE_TOKEN = "<__dj__image>"
END_OF_CHUNK = "<|__dj__eoc|>"


def build_dj_text(caption: str) -> str:
    """Data-Juicer's `text` for one image with this caption."""
    return f"{DJ_IMAGE_TOKEN}\n{caption} {END_OF_CHUNK}"


def extract_caption(text: str) -> str:
    """The caption inside a Data-Juicer `text`: all but the image token and the end of the last chunk."""
    return text.replace(DJ_IMAGE_TOKEN, "").strip().removesuffix(END_OF_CHUNK).strip()


def read_dj_jsonl(path: str | Path) -> Iterator[dict]:
    """Yield validated rows: a unique string `id`, one image, and a `text` with exactly one image token.

    Raises:
        InputError: names the file, the line and the remedy.
    """
    for _, row in _dj_rows(path, several_images=False):
        yield row


def read_pairs(path: str | Path) -> Iterator[dict]:
    """The same, of a file that somebody brings: a row with several images, each in a chunk of its own, becomes as many
    rows (`<id>~2`, …).

    Raises:
        InputError: names the file, the line and the remedy.
    """
    made = UniqueIds(path)
    for number, (where, row) in enumerate(_dj_rows(path, several_images=True), start=1):
        if len(row["images"]) == 1:
            made.add(row["id"], number)
            yield row
            continue
        chunks = [chunk.strip() for chunk in row["text"].split(END_OF_CHUNK) if chunk.strip()]
        if len(chunks) != len(row["images"]) or any(chunk.count(DJ_IMAGE_TOKEN) != 1 for chunk in chunks):
            raise InputError(
                f"{where}: {len(row['images'])} images must stand in as many chunks; write "
                f"{DJ_IMAGE_TOKEN}\\n<caption> {END_OF_CHUNK} for each"
            )
        for part, (image, chunk) in enumerate(zip(row["images"], chunks, strict=True), start=1):
            identifier = f"{row['id']}~{part}" if part > 1 else row["id"]
            made.add(identifier, number)
            yield row | {"id": identifier, "images": [image], "text": build_dj_text(extract_caption(chunk))}


def _dj_rows(path: str | Path, several_images: bool) -> Iterator[tuple[str, dict]]:
    """Rows with as many image tokens as images, one or perhaps several; and where each stands."""
    ids = UniqueIds(path)
    for number, row in read_objects(path):
        where = f"{path}, line {number}"
        for key, kind in (("id", str), ("text", str), ("images", list)):
            if key not in row:
                raise InputError(f"{where}: key {key!r} is missing; a row needs id, text and images")
            if not isinstance(row[key], kind):
                found = type(row[key]).__name__
                raise InputError(
                    f"{where}: {key!r} must be a {kind.__name__}, found {found}; write one, or delete the row"
                )
        ids.add(row["id"], number)
        images = row["images"]
        count_fits = len(images) == 1 or (several_images and images)
        if not count_fits or not all(isinstance(image, str) for image in images):
            wanted = "paths, at least one" if several_images else "exactly one path"
            raise InputError(f"{where}: 'images' must hold {wanted}, found {images!r}")
        if (tokens := row["text"].count(DJ_IMAGE_TOKEN)) != len(images):
            wanted = "exactly once" if len(images) == 1 else f"once for each of its {len(images)} images"
            raise InputError(
                f"{where}: 'text' must hold the image token {DJ_IMAGE_TOKEN} {wanted}, found {tokens}; "
                f"write {DJ_IMAGE_TOKEN}\\n<caption> {END_OF_CHUNK}"
            )
        if not isinstance(row.get("question", ""), str):
            raise InputError(f"{where}: 'question' must be text, found {row['question']!r}; or leave it out")
        yield where, row


# LLaVA's conversation format, as a JSON list or as one object a line.
#
# {"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat is this?"},
#                                                 {"from": "gpt", "value": "A cat."}]}
#
# `image` may be a list: each <image> in what the human says then stands for the next of its paths.

IMAGE_TOKEN = "<image>"


DESCRIBE = "Describe the image."  # stage 2 asks for a caption that comes with no question of its own


def build_conversation(identifier: str, image: str, question: str, answer: str) -> dict:
    """One question and one answer about one image. An empty question is a stage-1 caption row."""
    human = f"{IMAGE_TOKEN}\n{question}" if question else IMAGE_TOKEN
    turns = [{"from": "human", "value": human}, {"from": "gpt", "value": answer}]
    return {"id": identifier, "image": image, "conversations": turns}


def list_images(row: dict) -> list[str]:
    """Of a LLaVA row; none for a text."""
    images = row.get("image", [])
    return [images] if isinstance(images, str) else images


def read_llava(path: str | Path, number_ids: bool = False) -> Iterator[dict]:
    """Yield validated rows of a `.json` list or a `.jsonl` file. Rows without `image` are text-only.

    What the texts hold, image tokens included, is not looked at here (`image_problem` and `control_problem` do that).

    Args:
        number_ids: for published files, which have several rows about one image under its id, and whole numbers for
            ids: the second row of an id `7` gets `7~2`, or the next number that no row before has.

    Raises:
        InputError: names the file, the row (from 1) and the remedy.
    """
    ids, numbered = UniqueIds(path), NumberedIds("~")
    for number, row in _numbered_rows(Path(path)):
        where = f"{path}, row {number}"
        if number_ids and row.get("id") is not None:
            row = row | {"id": parse_identifier(row["id"], where)}
        if not isinstance(row.get("id"), str):
            raise InputError(f"{where}: 'id' must be a string, found {row.get('id')!r}; give each row one")
        if number_ids:
            row = row | {"id": numbered.add(row["id"])}
        else:
            ids.add(row["id"], number)
        images = row.get("image", "")
        if not isinstance(images, str | list) or images == [] or not all(isinstance(image, str) for image in images):
            raise InputError(
                f"{where}: 'image' must be a path or a list of paths, found {images!r}; leave it out for text-only rows"
            )
        _check_turns(where, row.get("conversations"))
        yield row


def _numbered_rows(path: Path) -> Iterator[tuple[int, dict]]:
    if path.suffix.lower() == ".jsonl":
        yield from read_objects(path)
        return
    for number, row in enumerate(read_json_list(path), start=1):
        yield number, check_object(row, f"{path}, row {number}")


def _check_turns(where: str, turns: object) -> None:
    if not isinstance(turns, list) or len(turns) < 2 or len(turns) % 2:
        raise InputError(f"{where}: 'conversations' must alternate human and gpt turns, ending with gpt")
    for position, turn in enumerate(turns):
        speaker = "gpt" if position % 2 else "human"
        if not isinstance(turn, dict) or turn.get("from") != speaker or not isinstance(turn.get("value"), str):
            raise InputError(f"{where}: turn {position + 1} must be {{'from': '{speaker}', 'value': text}}")


def check_no_control(text: str, where: str) -> None:
    """Refuse a question that would be taken for an image or the end of a turn."""
    if control := find_control(text):
        raise InputError(f"{where}: its text holds the control token {control}; fix or delete the row")


def image_problem(row: dict) -> str | None:
    """Why the model would not be shown each of a LLaVA row's images exactly once, in questions; None if it would."""
    wanted = len(list_images(row))
    tokens = sum(turn["value"].count(IMAGE_TOKEN) for turn in row["conversations"][::2])
    if tokens == wanted:
        return None
    return f"expected {wanted} image token {IMAGE_TOKEN} in what the human says, found {tokens}"


def control_problem(row: dict, tokens: Collection[str] = ()) -> str | None:
    """Which control token a LLaVA row holds beside its image token; None if there is none.

    Args:
        tokens: those of the chat format in use.
    """
    questions, answers = (turn["value"] for turn in row["conversations"][::2]), row["conversations"][1::2]
    texts = [*(text.replace(IMAGE_TOKEN, "") for text in questions), *(turn["value"] for turn in answers)]
    control = next(filter(None, (find_control(text, tokens) for text in texts)), None)
    return control and f"its text holds the control token {control}"


# The held-out split: one image a line, with reference captions, and questions and objects where they are known.
#
# {"id": "e00001", "image": "images/evaluation/e00001.png", "captions": ["a red circle at the top left"],
#  "objects": [{"color": "red", "shape": "circle", "position": "top left"}],
#  "questions": [{"type": "color", "question": "What color is the circle?", "answer": "red"}]}

OBJECT_KEYS = {"color", "shape", "position"}
QUESTION_KEYS = {"type", "question", "answer"}


def read_evaluation(path: str | Path) -> Iterator[dict]:
    """Yield validated rows; `objects` and `questions` become empty lists where a row has none.

    Raises:
        InputError: names the file, the line and the remedy; also for a question that holds a control token, since it is
            put to the model.
    """
    ids = UniqueIds(path)
    for number, row in read_objects(path):
        where = f"{path}, line {number}"
        if not isinstance(row.get("id"), str) or not isinstance(row.get("image"), str):
            raise InputError(f"{where}: 'id' and 'image' must be strings")
        ids.add(row["id"], number)
        captions = row.get("captions")
        if not isinstance(captions, list) or not captions or not all(isinstance(c, str) and c for c in captions):
            raise InputError(f"{where}: 'captions' must be a list of at least one reference caption")
        for key, wanted in (("objects", OBJECT_KEYS), ("questions", QUESTION_KEYS)):
            items = row.setdefault(key, [])
            if not isinstance(items, list) or not all(isinstance(i, dict) and set(i) == wanted for i in items):
                raise InputError(f"{where}: {key!r} must be a list of objects with the keys {sorted(wanted)}")
            if wrong := [value for item in items for value in item.values() if not isinstance(value, str)]:
                raise InputError(f"{where}: the values in {key!r} must be texts, found {wrong[0]!r}")
        for item in row["questions"]:
            check_no_control(item["question"], where)
        yield row


# Text corpora: jsonl with one {"text": …} a line.


def read_texts(path: Path) -> Iterator[str]:
    """
    Raises:
        InputError: the file, or a row that is no object with a text, by number.
    """
    for number, row in read_objects(path):
        text = row.get("text")
        if not isinstance(text, str) or not text:
            raise InputError(f"{path}, line {number}: expected a non-empty `text`")
        yield text
