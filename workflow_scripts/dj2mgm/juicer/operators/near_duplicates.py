"""Base class of deduplicators of near-duplicate images.

Two rows are near-duplicates if their images are near each other, one by one.
"""

import base64
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from data_juicer.utils.constant import Fields

from dj2mgm.data.near_duplicates.clusters import NearDuplicates, Search, find_near_duplicates
from dj2mgm.errors import InputError

from .batched_deduplicator import BatchedDeduplicator

PIXELS = "image_pixels"  # stat: width times height, averaged over the row's images
SIGNATURES = "__dj__image_signatures"


class NearDeduplicator(BatchedDeduplicator, interface=True):
    """A deduplicator that computes image signatures and keeps the near-duplicate with the highest statistic `prefer`.

    Subclasses define signatures and their distance.
    """

    hash_key = SIGNATURES
    report_key = "copies"

    def __init__(self, prefer: str = PIXELS, *args, **kwargs):
        """Initialize the operator.

        Args:
            prefer: name of a statistic that an earlier operator has measured. Of near-duplicates the row with the
                highest value is kept, and of equal ones the first. The default is the size of the images.
        """
        super().__init__(*args, **kwargs)
        self.prefer = prefer
        self.report: dict = {}  # filled in by the engine, which has all rows

    @abstractmethod
    def sign(self, images: Sequence[str], rank: int | None) -> list[tuple[bytes, int]]:
        """Return the signature (a fixed number of bytes) and the number of pixels of each image."""

    @abstractmethod
    def candidates(self, signatures: np.ndarray, folder: Path) -> Search:
        """Return a function from (Q,) places to pairs that may be near (index in Q, place), some at a time.

        Args:
            signatures: (N, bytes) uint8, a file mapped into memory.
            folder: folder for temporary files.
        """

    @abstractmethod
    def distance(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the (P,) distances of signatures (P, bytes) and (P, bytes), infinite for pairs that are not near."""

    def compute_hash(self, samples: dict, rank: int | None = None) -> dict:
        """Add signatures, and the stat `image_pixels`.

        Raises:
            InputError: If the rows have no statistic `prefer`.
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
                    f"operator {self._name}: 'prefer' names the statistic {self.prefer!r}, but rows only have "
                    f"{', '.join(values)}. Put the filter that measures it before this operator"
                )
        return samples

    def find_duplicates(self, rows: Iterable[tuple[str, dict]], folder: Path) -> NearDuplicates:
        """Find the near-duplicates among all rows.

        Args:
            rows: signatures and stats of all rows, in their order.
            folder: folder for temporary files.
        """
        return find_near_duplicates(
            map(self._signed, rows), folder, partial(self.candidates, folder=folder), self.distance
        )

    def _signed(self, row: tuple[str, dict]) -> tuple[int, bytes, float]:
        text, stats = row
        images, signatures = text.split(" ")
        values = np.asarray([] if stats[self.prefer] is None else stats[self.prefer], dtype=np.float64)
        score = float(values.mean()) if values.size else -np.inf
        return int(images), base64.b64decode(signatures), -np.inf if np.isnan(score) else score

    def process(self, dataset, show_num: int = 0) -> tuple:
        """Return the kept rows, in order, and up to `show_num` pairs (kept row, near-duplicate)."""
        with TemporaryDirectory() as folder:
            rows = zip(dataset[SIGNATURES], dataset[Fields.stats], strict=True)
            copy_of = self.find_duplicates(rows, Path(folder)).copy_of
        shown = np.flatnonzero(copy_of >= 0)[:show_num]
        pairs = {str(place): [dataset[int(copy_of[place])], dataset[int(place)]] for place in shown}
        return dataset.select(np.flatnonzero(copy_of < 0)), pairs
