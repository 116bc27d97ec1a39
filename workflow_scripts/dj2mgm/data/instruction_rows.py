r"""Instructions as rows of a recipe: one row for each question about an image, with the answer as its text.

    {"id": "7", "text": "<__dj__image>\nred <|__dj__eoc|>", "images": ["images/7.png"], "question": "What color is it?"}

Only conversations of one question about one image become rows. Others are trained on as they are.
"""

from collections.abc import Iterable, Iterator

from dj2mgm.data.formats import IMAGE_TOKEN, build_dj_text, image_problem, list_images

INPUT = "instructions.jsonl"  # file of these rows in the folder of the synthesize stage
COLUMNS = {
    "question": ""
}  # columns of the recipe's operators in addition to those of pairs, with the value of a missing key


def is_single_question(row: dict) -> bool:
    """Return whether a LLaVA row has one question and answer about one image."""
    turns = row["conversations"]
    if len(turns) != 2 or len(list_images(row)) != 1 or image_problem(row):
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
