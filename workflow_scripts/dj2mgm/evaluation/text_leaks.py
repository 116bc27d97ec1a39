"""Search for questions of benchmarks that training conversations contain with the right answer.

Texts are compared without letter case, punctuation and white space. A question leaks if

- it has at least `LEAST_WORDS` words,
- its benchmark asks it about one image only, and
- a turn of a conversation asks it and gives one of its right answers.

So "What color is it?" – "red" does not count as a leak, because it fits many images. Training data often appends
instructions to a question, each on its own line, so the whole turn and each of its lines are compared. In a language
without spaces a question is one word and never leaks.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator

from dj2mgm.evaluation.benchmarks import read_text
from dj2mgm.streaming import DiskMap

LEAST_WORDS = 8
IMAGE = "<image>"
NOT_A_WORD = re.compile(r"[\W_]+")


def normalize(text: str) -> str:
    """Return the words in lower case, separated by one space."""
    return NOT_A_WORD.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()


class ReferenceTexts:
    """Questions of benchmarks with their right answers, stored as hashes on disk for any number of them."""

    def __init__(self):
        # by benchmark and question: hash of the question's only image, or "" if it has several
        self._images = DiskMap()
        self._right = DiskMap()  # by benchmark, question and answer: ids of the questions
        self.counts: dict[str, int] = {}  # number of questions, by benchmark

    def collect(self, questions: Iterable[dict]) -> Iterator[dict]:
        """Yield the questions of a benchmark unchanged, and store their texts if the benchmark provides them."""
        for row in questions:
            if text := read_text(row["benchmark"], row):
                self._add(row, *text)
            yield row

    def _add(self, row: dict, question: str, answers: list[str]) -> None:
        of, question = row["benchmark"], normalize(question)
        self.counts[of] = self.counts.get(of, 0) + 1
        if len(question.split()) < LEAST_WORDS:
            return
        image = _hash(row["image"] if isinstance(row["image"], bytes) else str(row["image"]))
        if self._images.setdefault(_hash(of, question), image) != image:
            self._images.replace([(_hash(of, question), "")])
        for answer in filter(None, set(map(normalize, answers))):
            key = _hash(of, question, answer)
            self._right.replace([(key, json.dumps([*json.loads(self._right.get(key) or "[]"), row["id"]]))])

    def asked_by(self, conversation: list[dict]) -> dict[str, list[str]]:
        """Return the ids of the questions that a conversation asks and answers right, by benchmark."""
        found: dict[str, dict[str, None]] = {}
        for human, gpt in zip(conversation[::2], conversation[1::2], strict=False):
            text = human["value"].replace(IMAGE, "")
            answer = normalize(gpt["value"])
            for question in dict.fromkeys(map(normalize, (text, *text.splitlines()))):
                if len(question.split()) >= LEAST_WORDS:
                    for of in self.counts:
                        if self._images.get(_hash(of, question)):
                            ids = json.loads(self._right.get(_hash(of, question, answer)) or "[]")
                            found.setdefault(of, {}).update(dict.fromkeys(ids))
        return {of: list(ids) for of, ids in found.items() if ids}


def find_leaked_texts(rows: Iterable[dict], references: ReferenceTexts) -> Iterator[dict]:
    """Yield {split, row, of, ids} for each instruction that asks and answers a benchmark's question, in order."""
    for row in rows:
        for of, ids in references.asked_by(row["conversations"]).items():
            yield {"split": "finetune", "row": row["id"], "of": of, "ids": ids}


def count_leaked_texts(references: ReferenceTexts, leaks: Iterable[dict]) -> dict[str, dict[str, int]]:
    """Return the numbers of compared questions, leaked questions and their instructions, by benchmark."""
    questions: dict[str, set[str]] = {of: set() for of in references.counts}
    rows = dict.fromkeys(references.counts, 0)
    for leak in leaks:
        questions[leak["of"]].update(leak["ids"])
        rows[leak["of"]] += 1
    return {
        of: {"texts": references.counts[of], "leaked_texts": len(questions[of]), "text_rows": rows[of]}
        for of in references.counts
    }


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:32]
