"""Search for benchmarks' questions in the training data, as a part of the search for leaks.

Texts are compared without letter case, punctuation and white space. A question leaks if

- it has at least `MIN_WORDS` words,
- its benchmark asks it about one image only, and
- a turn of a conversation asks the question and gives one of its right answers.

So "What color is it?" – "red" does not count as a leak, because it fits many images. Training data often appends
instructions to a question, each on its own line, so the whole turn and each of its lines are compared. In a language
without spaces a question is one word and never leaks.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator

from dj2mgm.data.formats import IMAGE_TOKEN
from dj2mgm.data.texts import MIN_WORDS, normalize_lines, normalize_words
from dj2mgm.evaluation.leak_search import Image, Reference
from dj2mgm.features.challenge.benchmarks import load_benchmark, read_questions
from dj2mgm.storage.streaming import DiskMap


class QuestionSearch:
    """Questions of benchmarks with their right answers, stored as hashes on disk for any number of them.

    Attributes:
        images: the distinct images of the questions, which the search for images compares.
        counts: number of questions with a text, by benchmark.
    """

    def __init__(self, benchmarks: dict[str, dict[str, str]]):
        """Read the files of the benchmarks."""
        # by benchmark and question: hash of the question's only image, or "" if it has several
        self._images = DiskMap()
        self._ids = DiskMap()  # by benchmark, question and right answer: ids of the questions
        self.counts: dict[str, int] = {}
        self.images: dict[Reference, Image] = {}
        for name, files in benchmarks.items():
            get_text = load_benchmark(name).get_text
            ids_by_image: dict[Image, list[str]] = {}
            for row in read_questions(name, files):
                ids_by_image.setdefault(row["image"], []).append(row["id"])
                if get_text:
                    self.add(name, row, *get_text(row))
            for image, ids in ids_by_image.items():
                ids = tuple(dict.fromkeys(ids))
                self.images[Reference(name, ids, len(ids))] = image

    def add(self, benchmark: str, row: dict, question: str, answers: list[str]) -> None:
        """Store the text of a question, without instructions, and its right answers."""
        question = normalize_words(question)
        self.counts[benchmark] = self.counts.get(benchmark, 0) + 1
        if len(question.split()) < MIN_WORDS:
            return
        image = _hash(row["image"] if isinstance(row["image"], bytes) else str(row["image"]))
        if self._images.setdefault(_hash(benchmark, question), image) != image:
            self._images.replace([(_hash(benchmark, question), "")])
        for answer in filter(None, set(map(normalize_words, answers))):
            key = _hash(benchmark, question, answer)
            self._ids.replace([(key, json.dumps([*json.loads(self._ids.get(key) or "[]"), row["id"]]))])

    def find_questions(self, conversation: list[dict]) -> dict[str, list[str]]:
        """Return the ids of the questions that a conversation asks and answers right, by benchmark."""
        ids_by_benchmark: dict[str, dict[str, None]] = {}
        for human, gpt in zip(conversation[::2], conversation[1::2], strict=False):
            text = human["value"].replace(IMAGE_TOKEN, "")
            answer = normalize_words(gpt["value"])
            for question in normalize_lines(text):
                if len(question.split()) >= MIN_WORDS:
                    for benchmark in self.counts:
                        if self._images.get(_hash(benchmark, question)):
                            ids = json.loads(self._ids.get(_hash(benchmark, question, answer)) or "[]")
                            ids_by_benchmark.setdefault(benchmark, {}).update(dict.fromkeys(ids))
        return {benchmark: list(ids) for benchmark, ids in ids_by_benchmark.items() if ids}

    def find_leaks(self, rows: Iterable[dict]) -> Iterator[dict]:
        """Yield {split, row, of, ids} for each instruction that asks and answers a benchmark's question, in order."""
        for row in rows:
            for benchmark, ids in self.find_questions(row["conversations"]).items():
                yield {"split": "finetune", "row": row["id"], "of": benchmark, "ids": ids}

    def count_leaks(self, leaks: Iterable[dict]) -> dict[str, dict[str, int]]:
        """Return the numbers of compared questions, leaked questions and their instructions, by benchmark."""
        questions: dict[str, set[str]] = {benchmark: set() for benchmark in self.counts}
        rows = dict.fromkeys(self.counts, 0)
        for leak in leaks:
            if leak["of"] in questions:
                questions[leak["of"]].update(leak["ids"])
                rows[leak["of"]] += 1
        return {
            benchmark: {"texts": count, "leaked_texts": len(questions[benchmark]), "text_rows": rows[benchmark]}
            for benchmark, count in self.counts.items()
        }


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:32]
