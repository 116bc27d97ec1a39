"""Pairs of binary codes that differ in few bits, without a comparison of all pairs: multi-index hashing.

Bands are cut out of codes (Norouzi, Punjani and Fleet, 2012). Two codes that differ in at most `radius` bits differ in
at most `radius // BANDS` bits of some band, so it is enough to look up each band, and each band with one bit flipped,
in a table of all codes' bands. What is found is compared in full: the result is exact.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dj2mgm.data.file_arrays import file_array

BANDS = 12
SPARSE = 2  # bits of a band beyond those that number all codes: a look-up finds a quarter of a code on average
MAX_RADIUS = 2 * BANDS - 1  # one flipped bit a band
BLOCK = 1 << 14  # codes that are looked up together, and candidates that are compared together
Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]


def near_pairs(
    left: np.ndarray, right: np.ndarray, radius: int, folder: Path | None = None, rows: np.ndarray | None = None
) -> Iterator[Pairs]:
    """Every pair of a left and a right code that differ in at most `radius` bits, once, some at a time.

    Args:
        left, right: (N, bytes) and (M, bytes) uint8, perhaps files mapped into memory.
        radius: up to `MAX_RADIUS`.
        folder: where a table of the right codes goes, in a file without a name.
        rows: (Q,) of the left codes, those that are looked for; None: all.

    Yields:
        places in left, or among these rows, places in right, differing bits: (P,) int64 each.
    """
    if not 0 <= radius <= MAX_RADIUS:
        raise ValueError(f"codes are found up to {MAX_RADIUS} differing bits, not {radius}")
    whole = left.shape[1] * 8 // BANDS
    width = min(whole, len(right).bit_length() + SPARSE)
    bands = [(band * whole, band * whole + width) for band in range(BANDS)]
    for number, band in enumerate(bands):
        table = _Table(right, band, folder)
        for start in range(0, len(left) if rows is None else len(rows), BLOCK):
            part = slice(start, start + BLOCK)
            codes = left[part] if rows is None else left[rows[part]]
            wanted = _band(codes, *band)
            for flip in (0, *(1 << bit for bit in range(width))) if radius >= BANDS else (0,):
                for first, second in table.look_up(wanted ^ flip):
                    distance = np.bitwise_count(codes[first] ^ right[second]).sum(axis=1, dtype=np.int64)
                    near = np.flatnonzero(distance <= radius)
                    first, second, distance = first[near], second[near], distance[near]
                    new = ~_found_before(codes[first], right[second], bands[:number], radius // BANDS)
                    if new.any():
                        yield start + first[new], second[new], distance[new]


class _Table:
    """Codes by the value of a band, in files: they are as many as rows."""

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

    def look_up(self, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(places in `wanted`, places of codes with that value), about `BLOCK` at a time."""
        starts = self.starts[wanted]
        counts = self.starts[wanted + 1] - starts
        places = np.flatnonzero(counts)
        ends = np.cumsum(counts[places], dtype=np.int64)
        cuts = np.searchsorted(ends, np.arange(BLOCK, ends[-1] if len(ends) else 0, BLOCK))
        for part in np.split(places, cuts):
            repeats = counts[part]
            within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            yield np.repeat(part, repeats), self.order[np.repeat(starts[part], repeats) + within].astype(np.int64)


def _band(codes: np.ndarray, start: int, end: int) -> np.ndarray:
    """(N,) int32: the codes' bits from `start` to `end`, as a number."""
    first, last = start // 8, -(-end // 8)
    value = np.zeros(len(codes), dtype=np.int32)  # a band lies in four bytes at most
    for byte in range(first, last):
        value <<= 8
        value |= codes[:, byte]
    value >>= last * 8 - end
    value &= (1 << (end - start)) - 1
    return value


def _found_before(left: np.ndarray, right: np.ndarray, bands: list[tuple[int, int]], flips: int) -> np.ndarray:
    """(P,) bool: pairs that an earlier band has found."""
    found = np.zeros(len(left), dtype=bool)
    for band in bands:
        found |= np.bitwise_count(_band(left, *band) ^ _band(right, *band)) <= flips
    return found
