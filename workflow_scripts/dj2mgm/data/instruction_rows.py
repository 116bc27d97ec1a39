r"""Instructions as rows of a recipe: one row for each question about an image, with the answer as its text.

    {"id": "7", "text": "<__dj__image>\nred <|__dj__eoc|>", "images": ["images/7.png"], "question": "What color is it?"}

A row for a new question (`make_slots`) has an empty text. It also has the `slot`, its number among the new questions
about the image, the `caption` of the pair, and the questions `asked` about the image already, as `normalize_lines`
returns them.

Only conversations of one question about one image become rows. Other conversations are trained on unchanged.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from dj2mgm.cli.messages import note
from dj2mgm.data.formats import IMAGE_TOKEN, build_dj_text, extract_caption, find_image_problem, list_images
from dj2mgm.data.images import BadImageError, HeldOutImages, UnreadableImages, locate_image
from dj2mgm.data.texts import normalize_lines
from dj2mgm.dataset_resolution.row_media import UNREAD_MEDIA
from dj2mgm.errors import pluralize
from dj2mgm.storage.image_files import compute_image_digest
from dj2mgm.storage.streaming import DiskMap

# columns of the recipe's operators in addition to the columns of pairs, with the value of a missing key
COLUMNS = {"question": "", "slot": 0, "caption": "", "asked": []}


def is_single_question(row: dict) -> bool:
    """Return whether a LLaVA row has one question and answer about one image."""
    turns = row["conversations"]
    if len(turns) != 2 or len(list_images(row)) != 1 or find_image_problem(row) or UNREAD_MEDIA in row:
        return False
    return bool(read_question(row)) and bool(turns[1]["value"].strip())


def read_question(row: dict) -> str:
    """Return the first question of a LLaVA row without its image token."""
    return row["conversations"][0]["value"].replace(IMAGE_TOKEN, "").strip()


def convert_instructions(rows: Iterable[dict]) -> Iterator[dict]:
    """Convert the LLaVA rows with a single question to rows of a recipe, and leave out the others."""
    for row in filter(is_single_question, rows):
        source = {"source": row["source"]} if "source" in row else {}
        text = build_dj_text(row["conversations"][1]["value"].strip())
        yield {"id": row["id"], "text": text, "images": list_images(row), "question": read_question(row)} | source


def make_slots(
    pairs: Iterable[dict], conversations: Iterable[dict], held_out: HeldOutImages, root: Path, per_image: int
) -> Iterator[dict]:
    """Yield rows to be filled with new questions about the images of pairs, except held-out images.

    Files with the same bytes are one image. An image of several pairs gets rows for the first pair only. An image that
    does not exist gets none, and a note counts such pairs.

    Args:
        pairs: Data-Juicer rows.
        conversations: LLaVA rows, whose questions are not asked again about the same image.
        held_out: images without new questions.
        root: folder that image paths are relative to.
        per_image: number of questions about each image.
    """
    digests, known_questions, filled, unreadable = DiskMap(), DiskMap(), DiskMap(), UnreadableImages()
    for row in conversations:
        if len(list_images(row)) != 1:
            continue
        try:
            digest = _compute_digest(root, list_images(row)[0], digests)
        except BadImageError:
            continue  # other stages report it
        texts = (turn["value"].replace(IMAGE_TOKEN, "") for turn in row["conversations"][::2])
        earlier_questions = json.loads(known_questions.get(digest) or "[]")
        questions = dict.fromkeys(
            [*earlier_questions, *(line for text in texts for line in normalize_lines(text) if line)]
        )
        known_questions.replace([(digest, json.dumps(list(questions)))])
    for number, row in enumerate(pairs):
        image = row["images"][0]
        try:
            digest, path = _compute_digest(root, image, digests), locate_image(root, image)
        except BadImageError as error:
            unreadable.add(error.reason, image)
            continue
        if held_out.match(path) or filled.setdefault(digest, number) != number:
            continue
        source = {"source": row["source"]} if "source" in row else {}
        new = {
            "text": build_dj_text(""),
            "images": row["images"],
            "caption": extract_caption(row["text"]),
            "asked": json.loads(known_questions.get(digest) or "[]"),
        }
        for slot in range(1, per_image + 1):
            yield {"id": f"{row['id']}+{slot}", "slot": slot} | new | source
    if unreadable.reasons:
        note(
            f"no questions for {pluralize(unreadable.reasons.total(), 'pair')}, because of their images ({unreadable})"
        )


def _compute_digest(root: Path, image: str, digests: DiskMap) -> str:
    """Return the SHA-256 of an image; `digests` has those of known paths. Raises as `locate_image` does."""
    digest = digests.get(image)
    return digest or digests.setdefault(image, compute_image_digest(locate_image(root, image)))
