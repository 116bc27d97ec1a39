"""A captioner with its captions on disk: no image is captioned twice, and no answer of a server is paid for twice."""

import hashlib
from functools import cached_property
from pathlib import Path

from loguru import logger

from dj2mgm.cli.messages import Progress
from dj2mgm.storage.image_files import compute_image_digest

from ..declarations import Captions, Declarations, get_declarations, take_report
from .caption_store import CaptionStore, has_captions
from .captioner import NO_ANSWER, Captioner

ENOUGH_TO_JUDGE = 5  # rows; one or two without a usable text do not prove that a model is broken
TOO_MANY_UNUSABLE = 0.1


class StoredCaptioner:
    """A captioner, and the file in which this run keeps its captions.

    Attributes:
        captioner: the captioner.
        folder: folder in which captions are kept for other runs (None: they are not kept).
        writer: name of this run's file in that folder.
        kind: name of the answers, for the progress.
    """

    def __init__(self, captioner: Captioner, folder: str | None, writer: str, kind: str = "captions"):
        self.captioner = captioner
        self.folder = folder
        self.writer = writer
        self.kind = kind

    @property
    def in_one_process(self) -> bool:
        return get_declarations(self.captioner.operator).in_one_process

    @property
    def budget(self) -> str | None:
        """Fingerprint of a captioner on a server, which stands for one common budget; None for other captioners."""
        return self.captioner.compute_fingerprint() if self.captioner.is_server else None

    def check_ready(self) -> None:
        """Check that the captioner's server answers, unless there are captions of it already."""
        if self.captioner.is_server and not self._has_captions():
            self.captioner.operator.connect()

    def caption(self, images: list[str]) -> tuple[list[Captions], int]:
        """Return the captions of each image, and the number of images without captions from earlier."""
        return self._get(self.captioner.make_keys([compute_image_digest(image) for image in images]), images)

    def ask(self, images: list[str], questions: list[str]) -> list[Captions]:
        """Return a server's answer to each question about an image; equal pairs are asked once."""
        keys = [
            f"{compute_image_digest(image)}-{hashlib.sha256(question.encode()).hexdigest()[:32]}"
            for image, question in zip(images, questions, strict=True)
        ]
        return self._get(keys, images, dict(zip(keys, questions, strict=True)))[0]

    def _get(
        self, keys: list[str], images: list[str], questions: dict[str, str] | None = None
    ) -> tuple[list[Captions], int]:
        stored = self._store.get(keys)
        missing = self.captioner.find_missing(dict(zip(keys, images, strict=True)), stored)
        new_count = sum(key in missing for key in keys)
        progress = Progress(f"{self.kind} by {self.captioner.name}", len(missing))

        def keep(captions: dict[str, Captions]) -> None:
            self._store.add(captions)
            stored.update(captions)
            progress.add(len(captions))

        self.captioner.caption(missing, self._store.earlier_counts, keep, questions)
        return [stored.get(key, NO_ANSWER) for key in keys], new_count

    def close(self) -> None:
        """Close this run's file of captions."""
        if "_store" in self.__dict__:
            self.__dict__.pop("_store").close()

    def _has_captions(self) -> bool:
        return bool(self.folder) and has_captions(Path(self.folder), self.captioner.compute_fingerprint())

    @cached_property
    def _store(self) -> CaptionStore:
        """Captions on disk, opened by the process that captions, at its first caption."""
        folder = Path(self.folder) if self.folder else None
        fingerprint = self.captioner.compute_fingerprint() if folder else ""
        return CaptionStore(folder, fingerprint, self.writer, alone=self.captioner.is_server)


class StoredAnswersOperator(Declarations, interface=True):
    """An operator that asks a model, if its arguments name one, and keeps the answers on disk."""

    _stored_captioner: StoredCaptioner | None = None

    @property
    def in_one_process(self) -> bool:
        return bool(self._stored_captioner) and self._stored_captioner.in_one_process

    @property
    def budget(self) -> str | None:
        return None if self._stored_captioner is None else self._stored_captioner.budget

    def check_ready(self) -> None:
        if self._stored_captioner:
            self._stored_captioner.check_ready()

    def close(self) -> None:
        if self._stored_captioner:
            self._stored_captioner.close()

    def _take_server_counts(self) -> dict:
        """Return the counts of the captioner's server since the last call, by their key in a report."""
        if self._stored_captioner is None:
            return {}
        operator = self._stored_captioner.captioner.operator
        server = take_report(operator)
        return {get_declarations(operator).report_key: server} if server else {}


def warn_of_unusable(sentence: str, unusable: dict[str, int], total: int, consequence: str) -> None:
    """Warn if more than a tenth of a model's answers cannot be used: `<count> of <total> <sentence> (<reasons>); …`."""
    count = sum(unusable.values())
    if count > TOO_MANY_UNUSABLE * total:
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(unusable.items()))
        logger.warning(f"{count} of {total} {sentence} ({reasons}); {consequence}")
