"""What deduplicators of similar images share: a row is a copy of another if each of its images is near."""

import base64
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from data_juicer.utils.constant import Fields

from dj2mgm.data.near_copies import Copies, Search, find_copies
from dj2mgm.errors import InputError

from .batched_deduplicator import BatchedDeduplicator

PIXELS = "image_pixels"  # stat: width times height, the mean over a row's images
SIGNATURES = "__dj__image_signatures"


class NearDeduplicator(BatchedDeduplicator):
    """Signs each image; of rows whose images are near each other, keeps the one with the highest statistic `prefer`.

    Subclasses say what a signature is and which ones are near.
    """

    hash_key = SIGNATURES
    report_key = "copies"

    def __init__(self, prefer: str = PIXELS, *args, **kwargs):
        """
        Initialization method.

        :param prefer: name of a statistic that the recipe has measured by then; of rows that are copies of each other
            the one with the highest value is kept, and of equal ones the first. The default is the images' size.
        """
        super().__init__(*args, **kwargs)
        self.prefer = prefer
        self.report: dict = {}  # filled in by the engine, which knows all rows

    @abstractmethod
    def sign(self, images: Sequence[str], rank: int | None) -> list[tuple[bytes, int]]:
        """Signature, of a fixed number of bytes, and pixels of each image."""

    @abstractmethod
    def candidates(self, signatures: np.ndarray, folder: Path) -> Search:
        """A function: (Q,) places → pairs that may be near, the number in Q and the place, some at a time.

        Args:
            signatures: (N, bytes) uint8, a file mapped into memory.
            folder: for files that are removed again.
        """

    @abstractmethod
    def distance(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """(P,) of (P, bytes) and (P, bytes), infinite for what is not near."""

    def compute_hash(self, samples: dict, rank: int | None = None) -> dict:
        """
        Raises:
            InputError: the rows have no statistic `prefer`.
        """
        stats = samples.setdefault(Fields.stats, [{} for _ in samples[self.text_key]])
        rows = [images or [] for images in samples[self.image_key]]
        signed = iter(self.sign([image for images in rows for image in images], rank))
        samples[SIGNATURES] = []
        for images, values in zip(rows, stats, strict=True):
            signatures, pixels = zip(*(next(signed) for _ in images), strict=True) if images else ((), ())
            samples[SIGNATURES].append(f"{len(images)} {base64.b64encode(b''.join(signatures)).decode()}")
            values[PIXELS] = float(np.mean(pixels)) if images else 0.0
            if self.prefer not in values:
                raise InputError(
                    f"operator {self._name}: rows have no statistic {self.prefer!r}, which 'prefer' names; they have "
                    f"{', '.join(values)}: put the filter that measures it before this operator"
                )
        return samples

    def find_copies(self, rows: Iterable[tuple[str, dict]], folder: Path) -> Copies:
        """
        Args:
            rows: signatures and stats of all rows, in their order.
            folder: for files that are removed again.
        """
        return find_copies(map(self._signed, rows), folder, partial(self.candidates, folder=folder), self.distance)

    def _signed(self, row: tuple[str, dict]) -> tuple[int, bytes, float]:
        text, stats = row
        images, signatures = text.split(" ")
        values = np.asarray([] if stats[self.prefer] is None else stats[self.prefer], dtype=np.float64)
        score = float(values.mean()) if values.size else -np.inf
        return int(images), base64.b64decode(signatures), -np.inf if np.isnan(score) else score

    def process(self, dataset, show_num: int = 0) -> tuple:
        """Return the rows that are no copies, in order, and up to `show_num` pairs (kept row, copy)."""
        with TemporaryDirectory() as folder:
            rows = zip(dataset[SIGNATURES], dataset[Fields.stats], strict=True)
            copy_of = self.find_copies(rows, Path(folder)).copy_of
        shown = np.flatnonzero(copy_of >= 0)[:show_num]
        pairs = {str(place): [dataset[int(copy_of[place])], dataset[int(place)]] for place in shown}
        return dataset.select(np.flatnonzero(copy_of < 0)), pairs
