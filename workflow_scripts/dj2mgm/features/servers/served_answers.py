"""Comparison of a served model's answers to held-out questions with the workflow's own answers."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.data.images import encode_data_url, load_image
from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import Rows, estimate_metrics, locate_row_images
from dj2mgm.evaluation.vqa import measure_rows
from dj2mgm.features.servers.chat_requests import ChatRequests
from dj2mgm.score_groups import DIFFERENCE, FINETUNED, OWN, PRETRAINED
from dj2mgm.settings.evaluation import GenerateSettings
from dj2mgm.storage.files import read_jsonl

SCORE = "vqa_accuracy"


@dataclass(frozen=True)
class AskedQuestion:
    """A held-out question, or the request for a caption, with the workflow's answer.

    Attributes:
        own: answer of the workflow's own generate stage.
        row: the row of answers.jsonl, or of captions.jsonl, which has no reference answer.
    """

    image: Path
    prompt: str
    own: str
    row: dict

    @property
    def is_question(self) -> bool:
        """True if there is a reference answer to compare with."""
        return "answer" in self.row


def read_served_questions(evaluation: Path, generated: Path, settings: GenerateSettings) -> list[AskedQuestion]:
    """Return the held-out questions; if there are none, the requests for captions.

    Args:
        evaluation: evaluation.jsonl of the dataset.
        generated: output folder of the generate stage, with the answers of the fine-tuned model.
        settings: settings of the generate stage.
    """
    rows = list(read_jsonl(evaluation))
    paths = locate_row_images(settings.image_root, rows)
    images = {row["id"]: path for row, path in zip(rows, paths, strict=True)}
    questions = [
        AskedQuestion(
            images[row["id"]],
            settings.question_prompt.replace("{question}", row["question"]),
            row["prediction"],
            row,
        )
        for row in _read_own_rows(generated / "answers.jsonl")
    ]
    if questions:
        return questions
    caption = settings.captions.get(FINETUNED, settings.captions.get(PRETRAINED))
    return [
        AskedQuestion(images[row["id"]], caption.question, row["caption"], row)
        for row in _read_own_rows(generated / "captions.jsonl")
    ]


def _read_own_rows(path: Path) -> Iterator[dict]:
    return (row for row in read_jsonl(path) if row["model"] == FINETUNED and row["images"] == OWN)


def ask_server(
    requests: ChatRequests, questions: list[AskedQuestion], max_new_tokens: int, connections: int
) -> Iterator[str]:
    """Yield the server's answers in the order of the questions; each is decoded greedily.

    Raises:
        InputError: a question gets no answer.
    """

    def ask(question: AskedQuestion) -> str:
        content: list[dict] = [{"type": "image_url", "image_url": {"url": _encode(question.image)}}]
        if question.prompt:
            content.append({"type": "text", "text": question.prompt})
        answer = requests.ask(content, max_tokens=max_new_tokens, temperature=0.0)
        if answer is None:
            raise InputError(f"{requests.server.name}: a question about {question.image} got no answer; see the log")
        return answer.text

    with ThreadPoolExecutor(connections) as threads:
        yield from threads.map(ask, questions)


def _encode(image: Path) -> str:
    """Return an image as the workflow loads it, without loss, in a data URL."""
    return encode_data_url(load_image(image), "PNG", compress_level=1)


def compare_answers(questions: list[AskedQuestion], served_answers: Iterable[str]) -> dict:
    """Return the share of identical answers and, for questions, both scores and their paired difference.

    Answers are compared on one line, because the client joins lines.
    """
    rows = [question.row | {"prediction": answer} for question, answer in zip(questions, served_answers, strict=True)]
    pairs = zip(questions, rows, strict=True)
    identical = sum(_join(question.own) == _join(row["prediction"]) for question, row in pairs)
    result = {"answers": len(rows), "identical": identical / len(rows)}
    if not questions[0].is_question:
        return result
    own_scores, served_scores = (
        _measure_score(side_rows) for side_rows in ([question.row for question in questions], rows)
    )
    scores = {
        OWN: own_scores,
        "served": served_scores,
        DIFFERENCE: {SCORE: served_scores[SCORE] - own_scores[SCORE]},
    }
    return result | {name: estimate_metrics(metrics, name == DIFFERENCE) for name, metrics in scores.items()}


def _measure_score(rows: Rows) -> dict:
    return {SCORE: measure_rows(rows)[SCORE]}


def _join(text: str) -> str:
    return " ".join(text.split())
