"""Search for evaluation images and benchmarks' questions in the training data.

Texts are compared without letter case, punctuation and white space. A question leaks if

- it has at least `MIN_WORDS` words,
- its benchmark asks it about one image only, and
- a turn of a conversation asks it and gives one of its right answers.

So "What color is it?" – "red" does not count as a leak, because it fits many images. Training data often appends
instructions to a question, each on its own line, so the whole turn and each of its lines are compared. In a language
without spaces a question is one word and never leaks.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from dj2mgm.cli.messages import note
from dj2mgm.data.images import BadImage, load_image, locate_image
from dj2mgm.data.near_duplicates.codes import SIGNATURE, compute_signature
from dj2mgm.data.near_duplicates.protected_images import IMAGES_AT_ONCE, find_reference_pairs
from dj2mgm.data.question_texts import MIN_WORDS, normalize_lines, normalize_words
from dj2mgm.errors import InputError
from dj2mgm.evaluation.benchmarks import read_question_text
from dj2mgm.evaluation.groups import image_paths
from dj2mgm.evaluation.leaked_ids import HELD_OUT
from dj2mgm.storage.files import IMAGE_SUFFIXES, find_files, list_files
from dj2mgm.storage.streaming import DiskMap, map_in_order

Image = str | Path | bytes


@dataclass(frozen=True)
class Reference:
    """Image on which a model is evaluated."""

    of: str  # benchmark, `HELD_OUT` or folder
    ids: tuple[str, ...]  # ids of the rows with this image
    questions: int = 0  # number of questions in these rows


@dataclass(frozen=True)
class References:
    """Evaluation images with their signatures, 80 bytes per image."""

    known: list[Reference]
    signatures: np.ndarray  # (N, SIGNATURE) uint8

    def copied(self, signatures: np.ndarray) -> list[list[tuple[Reference, int]]]:
        """Return, for each image, the references that it copies, with the number of differing bits out of 256.

        `signatures` are (M, SIGNATURE) uint8.
        """
        copied: list[list[tuple[Reference, int]]] = [[] for _ in signatures]
        for place, reference, bits in sorted(find_reference_pairs(signatures, self.signatures)):
            copied[place].append((self.known[reference], bits))
        return copied


def read_references(images: dict[Reference, Image], processes: int) -> References:
    """Compute the signatures of the evaluation images."""
    signatures = map_in_order(_sign, list(images.values()), processes)
    matrix = np.zeros((len(images), SIGNATURE), dtype=np.uint8)
    for place, (reference, signature) in enumerate(zip(images, signatures, strict=True)):
        if signature is None:
            raise InputError(f"{reference.of}: the image of {reference.ids[0]} cannot be read; fix or remove it")
        matrix[place] = signature
    return References(list(images), matrix)


def _sign(image: Image) -> np.ndarray | None:
    try:
        return compute_signature(load_image(image))
    except (BadImage, OSError):
        return None


def held_out_images(rows: list[dict], root: str | Path) -> dict[Reference, Image]:
    """Return the distinct images of the evaluation rows."""
    about: dict[Path, list[dict]] = {}
    for row, path in zip(rows, image_paths(root, rows), strict=True):
        about.setdefault(path, []).append(row)
    return {
        Reference(HELD_OUT, tuple(row["id"] for row in same), sum(len(row.get("questions", ())) for row in same)): path
        for path, same in about.items()
    }


def benchmark_images(name: str, rows: Iterable[dict]) -> dict[Reference, Image]:
    """Return the distinct images of a benchmark's questions."""
    questions: dict[Image, list[str]] = {}
    for row in rows:
        questions.setdefault(row["image"], []).append(row["id"])
    distinct = {image: tuple(dict.fromkeys(ids)) for image, ids in questions.items()}
    return {Reference(name, ids, len(ids)): image for image, ids in distinct.items()}


def folder_images(folder: Path) -> dict[Reference, Image]:
    """Return the files below a folder with an image suffix; a note counts the other files."""
    files = find_files(folder, IMAGE_SUFFIXES) if folder.is_dir() else []
    if not files:
        raise InputError(f"decontaminate.folders: {folder} contains no image; correct the path")
    if other_count := len(list_files(folder)) - len(files):
        note(
            f"{folder}: {other_count} files are not compared, because their suffix is not one of "
            f"{', '.join(IMAGE_SUFFIXES)}"
        )
    return {Reference(str(folder), (str(file.relative_to(folder)),)): file for file in files}


def find_leaks(images: Iterable[str], root: str | Path, references: References, processes: int) -> Iterator[dict]:
    """Yield {image, path, of, ids, bits} for each training image that is a copy of a reference, in order.

    Unreadable images are skipped; later stages drop them.
    """

    def sign(image: str) -> tuple[str, str, np.ndarray | None]:
        try:
            path = locate_image(root, image)
        except BadImage:
            return image, "", None
        return image, str(path), _sign(path)

    seen = DiskMap()
    new = (image for number, image in enumerate(images) if seen.setdefault(image, number) == number)
    signed = (entry for entry in map_in_order(sign, new, processes) if entry[2] is not None)
    while block := list(islice(signed, IMAGES_AT_ONCE)):
        copied = references.copied(np.array([signature for _, _, signature in block]))
        for (image, path, _), matches in zip(block, copied, strict=True):
            for reference, bits in matches:
                yield {"image": image, "path": path, "of": reference.of, "ids": list(reference.ids), "bits": bits}


def count_leaks(
    references: References, leaks: Iterable[dict], rows: Iterable[tuple[str, list[str]]]
) -> dict[str, dict]:
    """Count the leaks of each benchmark, of the held-out images and of each folder.

    Args:
        references: The evaluation images.
        leaks: Results of `find_leaks`, each with its `split`.
        rows: Split and images of each row of the training data.

    Returns:
        For each, the numbers of evaluation images (`references`), of leaked ones (`leaked`) and of their `questions`,
        of the `training_images` that are copies and of the `training_rows` with such an image.
    """
    known = Counter(reference.of for reference in references.known)
    questions = {(reference.of, reference.ids): reference.questions for reference in references.known}
    leaked: dict[str, set[tuple[str, ...]]] = {of: set() for of in known}
    images: dict[str, set[str]] = {of: set() for of in known}
    by_image = DiskMap()
    for leak in leaks:
        leaked[leak["of"]].add(tuple(leak["ids"]))
        images[leak["of"]].add(leak["path"])
        place = json.dumps([leak["split"], leak["image"]])
        by_image.replace([(place, json.dumps(sorted({leak["of"], *json.loads(by_image.get(place) or "[]")})))])
    about: Counter[str] = Counter()
    for split, named in rows if any(images.values()) else ():
        sources = (by_image.get(json.dumps([split, image])) for image in named)
        about.update({of for copied in sources if copied for of in json.loads(copied)})
    return {
        of: {
            "references": known[of],
            "leaked": len(leaked[of]),
            "questions": sum(questions[of, ids] for ids in leaked[of]),
            "training_images": len(images[of]),
            "training_rows": about[of],
        }
        for of in known
    }


IMAGE = "<image>"


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
            if text := read_question_text(row["benchmark"], row):
                self._add(row, *text)
            yield row

    def _add(self, row: dict, question: str, answers: list[str]) -> None:
        of, question = row["benchmark"], normalize_words(question)
        self.counts[of] = self.counts.get(of, 0) + 1
        if len(question.split()) < MIN_WORDS:
            return
        image = _hash(row["image"] if isinstance(row["image"], bytes) else str(row["image"]))
        if self._images.setdefault(_hash(of, question), image) != image:
            self._images.replace([(_hash(of, question), "")])
        for answer in filter(None, set(map(normalize_words, answers))):
            key = _hash(of, question, answer)
            self._right.replace([(key, json.dumps([*json.loads(self._right.get(key) or "[]"), row["id"]]))])

    def asked_by(self, conversation: list[dict]) -> dict[str, list[str]]:
        """Return the ids of the questions that a conversation asks and answers right, by benchmark."""
        ids_by_benchmark: dict[str, dict[str, None]] = {}
        for human, gpt in zip(conversation[::2], conversation[1::2], strict=False):
            text = human["value"].replace(IMAGE, "")
            answer = normalize_words(gpt["value"])
            for question in normalize_lines(text):
                if len(question.split()) >= MIN_WORDS:
                    for of in self.counts:
                        if self._images.get(_hash(of, question)):
                            ids = json.loads(self._right.get(_hash(of, question, answer)) or "[]")
                            ids_by_benchmark.setdefault(of, {}).update(dict.fromkeys(ids))
        return {of: list(ids) for of, ids in ids_by_benchmark.items() if ids}


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
