"""Questions of benchmarks that training conversations ask, too, and answer as the benchmark does.

Texts are equal if they are so without regard to letter case, punctuation and white space. A question leaks if

- it has at least `LEAST_WORDS` words,
- its benchmark asks it about one image only, and
- a turn of a conversation asks it and gives one of its right answers.

So "What color is it?" – "red" is no leak: such a question is asked of any image, and many are answered so. Training
data often puts instructions after a question, each on a line: the whole turn is compared, and each of its lines. Where
a language has no spaces, a question is one word, and never leaks.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator

from dj2mgm.evaluation.benchmarks import text_of
from dj2mgm.streaming import DiskMap

LEAST_WORDS = 8
IMAGE = "<image>"
NOT_A_WORD = re.compile(r"[\W_]+")


def normalize(text: str) -> str:
    """Words in small letters, with a space between them."""
    return NOT_A_WORD.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()


class ReferenceTexts:
    """Questions with their right answers, by hashes; on disk, however many there are."""

    def __init__(self):
        self._images = (
            DiskMap()
        )  # by benchmark and question: the only image that it is asked about, or "" if several are
        self._right = DiskMap()  # by benchmark, question and answer: ids of the questions
        self.counts: dict[str, int] = {}  # of questions, by benchmark

    def collect(self, questions: Iterable[dict]) -> Iterator[dict]:
        """The questions of a benchmark, as they come; their texts, where it tells them, are kept here."""
        for row in questions:
            if text := text_of(row["benchmark"], row):
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
        """By benchmark, the ids of the questions that a conversation asks and answers rightly."""
        found: dict[str, dict[str, None]] = {}
        for human, gpt in zip(conversation[::2], conversation[1::2], strict=False):
            asked = human["value"].replace(IMAGE, "")
            answer = normalize(gpt["value"])
            for question in dict.fromkeys(map(normalize, (asked, *asked.splitlines()))):
                if len(question.split()) >= LEAST_WORDS:
                    for of in self.counts:
                        if self._images.get(_hash(of, question)):
                            ids = json.loads(self._right.get(_hash(of, question, answer)) or "[]")
                            found.setdefault(of, {}).update(dict.fromkeys(ids))
        return {of: list(ids) for of, ids in found.items() if ids}


def find_leaked_texts(rows: Iterable[dict], references: ReferenceTexts) -> Iterator[dict]:
    """Of instructions, in their order, those that ask and answer a benchmark's question: {split, row, of, ids}."""
    for row in rows:
        for of, ids in references.asked_by(row["conversations"]).items():
            yield {"split": "finetune", "row": row["id"], "of": of, "ids": ids}


def count_leaked_texts(references: ReferenceTexts, leaks: Iterable[dict]) -> dict[str, dict[str, int]]:
    """By benchmark: how many questions were looked for, how many of them leak, and into how many instructions."""
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
