"""Finds pairs of binary codes that differ in few bits by multi-index hashing, without comparing all pairs.

Codes are divided into bands (Norouzi, Punjani and Fleet, 2012). Two codes that differ in at most `radius` bits differ
in at most `radius // BANDS` bits of some band. So it is enough to look up each band, and each band with one flipped
bit, in a table of all codes' bands. Matches are compared in full, so the result is exact.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dj2mgm.data.file_arrays import file_array

BANDS = 12
SPARSE = 2  # bits of a band in addition to those of the number of codes; a look-up finds 1/4 code on average
MAX_RADIUS = 2 * BANDS - 1  # one flipped bit per band
BLOCK = 1 << 14  # codes looked up at once, and candidates compared at once
Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]


def find_near_pairs(
    left: np.ndarray, right: np.ndarray, radius: int, folder: Path | None = None, rows: np.ndarray | None = None
) -> Iterator[Pairs]:
    """Yield every pair of a left and a right code that differ in at most `radius` bits, once, in batches.

    Args:
        left, right: (N, bytes) and (M, bytes) uint8, possibly memory-mapped.
        radius: at most `MAX_RADIUS`.
        folder: folder of the table of right codes, an unnamed file.
        rows: (Q,) places of the left codes to search for; None: all.

    Yields:
        Places in `left` (or in `rows`), places in `right`, and differing bits: (P,) int64 each.
    """
    if not 0 <= radius <= MAX_RADIUS:
        raise ValueError(f"radius must be from 0 to {MAX_RADIUS} bits, found {radius}")
    whole = left.shape[1] * 8 // BANDS
    width = min(whole, len(right).bit_length() + SPARSE)
    bands = [(band * whole, band * whole + width) for band in range(BANDS)]
    for number, band in enumerate(bands):
        table = _Table(right, band, folder)
        for start in range(0, len(left) if rows is None else len(rows), BLOCK):
            part = slice(start, start + BLOCK)
            codes = left[part] if rows is None else left[rows[part]]
            queries = _band(codes, *band)
            for flip in (0, *(1 << bit for bit in range(width))) if radius >= BANDS else (0,):
                for first, second in table.look_up(queries ^ flip):
                    distance = np.bitwise_count(codes[first] ^ right[second]).sum(axis=1, dtype=np.int64)
                    near = np.flatnonzero(distance <= radius)
                    first, second, distance = first[near], second[near], distance[near]
                    new = ~_found_by_earlier_band(codes[first], right[second], bands[:number], radius // BANDS)
                    if new.any():
                        yield start + first[new], second[new], distance[new]


class _Table:
    """Table of codes by the value of a band, in files, because it has one entry per row."""

    def __init__(self, codes: np.ndarray, band: tuple[int, int], folder: Path | None):
        start, end = band
        values, self.order = (file_array(len(codes), np.int32, folder) for _ in range(2))
        self.starts = file_array((1 << end - start) + 1, np.int32, folder)
        for first in range(0, len(codes), BLOCK):
            part = _band(codes[first : first + BLOCK], *band)
            values[first : first + BLOCK] = part
            found, counts = np.unique(part, return_counts=True)
            self.starts[found + 1] += counts.astype(np.int32)
        np.cumsum(self.starts, out=self.starts)
        self.order[:] = np.argsort(values)

    def look_up(self, queries: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield places in the queries and places of codes with the same value, about `BLOCK` at a time."""
        starts = self.starts[queries]
        counts = self.starts[queries + 1] - starts
        places = np.flatnonzero(counts)
        ends = np.cumsum(counts[places], dtype=np.int64)
        cuts = np.searchsorted(ends, np.arange(BLOCK, ends[-1] if len(ends) else 0, BLOCK))
        for part in np.split(places, cuts):
            repeats = counts[part]
            within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            yield np.repeat(part, repeats), self.order[np.repeat(starts[part], repeats) + within].astype(np.int64)


def _band(codes: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return the codes' bits from `start` to `end` as numbers: (N,) int32."""
    first, last = start // 8, -(-end // 8)
    value = np.zeros(len(codes), dtype=np.int32)  # a band spans at most four bytes
    for byte in range(first, last):
        value <<= 8
        value |= codes[:, byte]
    value >>= last * 8 - end
    value &= (1 << (end - start)) - 1
    return value


def _found_by_earlier_band(left: np.ndarray, right: np.ndarray, bands: list[tuple[int, int]], flips: int) -> np.ndarray:
    """Return whether an earlier band has found each pair: (P,) bool."""
    found = np.zeros(len(left), dtype=bool)
    for band in bands:
        found |= np.bitwise_count(_band(left, *band) ^ _band(right, *band)) <= flips
    return found
