"""Held-out questions, or captions of held-out images, that score a model during training."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from torch.utils.data import Dataset

from dj2mgm.data.formats import DESCRIBE, build_conversation, control_problem, image_problem, read_evaluation
from dj2mgm.data.images import BadImage, locate_image
from dj2mgm.errors import InputError
from dj2mgm.files import read_yaml
from dj2mgm.messages import note
from dj2mgm.vision_language import Encoder


@dataclass(frozen=True)
class HeldOutQuestions(Dataset):
    """Conversations of one question and one answer each, in an order that does not depend on their number.

    Items are the encoder's.

    Attributes:
        kind: `questions`, or `captions` in stage 1 and if there are no questions.
        rows: conversations.
        lengths: (N,) tokens of each conversation.
        encoder: makes the items.
        digest: digest of the conversations, which tells them from those of an earlier start.
    """

    kind: str
    rows: list[dict]
    lengths: list[int]
    encoder: Encoder
    digest: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.encoder.item(self.rows[index])

    def described(self, correct: str) -> Iterator[dict]:
        """Yield readable rows of the first conversations, with the flags of `HeldOutScore.correct` for questions."""
        for row, hit in zip(self.rows, correct, strict=False):
            asked = {key: row[key] for key in ("type", "question", "answer") if key in row}
            yield {"id": row["of"]} | asked | ({"correct": hit == "1"} if asked else {})


def read_held_out_questions(
    evaluation: Path, asking: Path, tuning: str, encoder: Encoder, max_length: int, count: int
) -> HeldOutQuestions | None:
    """Read at most `count` questions of the evaluation split; None if there are none for the stage.

    Args:
        evaluation: the held-out split.
        asking: settings of the stage `generate`, with the image folder and the prompts.
        tuning: a key of memory.step.TUNINGS.
        encoder: encoder of the conversations.
        max_length: tokens at which training truncates conversations. Conversations of this length are left out.
        count: greatest number of questions.

    Raises:
        InputError: an image is missing.
    """
    settings = read_yaml(asking)
    kind, rows = "questions", []
    if tuning != "stage1":
        rows = _first(_questions(evaluation, settings["question_prompt"]), count)
    if not rows:
        captions = settings["captions"]
        question = captions["finetune"]["question"] or DESCRIBE
        question = captions["pretrain"]["question"] if tuning == "stage1" else question
        kind, rows = "captions", _first(_captions(evaluation, question), count)
    for row in rows:
        try:
            row["image"] = str(locate_image(settings["image_root"], row["image"]))
        except BadImage as error:
            raise InputError(f"{evaluation}, row {row['of']}: {error}; restore the image or delete the row") from None
    lengths = [_length(row, encoder) for row in rows]
    asked = [(row, length) for row, length in zip(rows, lengths, strict=True) if 0 < length < max_length]
    if len(asked) < len(rows):
        note(f"{len(rows) - len(asked)} of {len(rows)} held-out {kind} are not scored in training: too long or damaged")
    if not asked:
        return None
    rows, lengths = map(list, zip(*asked, strict=True))
    said = [(row["id"], row["conversations"]) for row in rows]
    return HeldOutQuestions(kind, rows, lengths, encoder, sha256(repr(said).encode()).hexdigest()[:12])


def _questions(evaluation: Path, prompt: str) -> Iterator[dict]:
    for row in read_evaluation(evaluation):
        for number, item in enumerate(row["questions"]):
            asked = prompt.replace("{question}", item["question"])
            yield build_conversation(f"{row['id']}/{number}", row["image"], asked, item["answer"]) | {
                "of": row["id"],
                **item,
            }


def _captions(evaluation: Path, question: str) -> Iterator[dict]:
    for row in read_evaluation(evaluation):
        yield build_conversation(row["id"], row["image"], question, row["captions"][0]) | {"of": row["id"]}


def _first(rows: Iterator[dict], count: int) -> list[dict]:
    """Return the first rows in a random order that depends on their ids only."""
    return heapq.nsmallest(count, rows, key=lambda row: sha256(row["id"].encode()).digest())


def _length(row: dict, encoder: Encoder) -> int:
    """Return the tokens of a conversation, 0 if it cannot be scored."""
    if image_problem(row) or control_problem(row, encoder.control_tokens):
        return 0
    try:
        length, answers = encoder.tokens(row)
    except (InputError, OSError):
        return 0
    return length if answers else 0
