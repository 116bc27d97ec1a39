"""Search for pairs of codes that differ in few bits, without comparing all pairs.

In multi-index hashing, codes are divided into bands (Norouzi, Punjani and Fleet, 2012). Two codes that differ in at
most `radius` bits differ in at most `radius // BANDS` bits of some band. So it is enough to look up each band, and each
band with one flipped bit, in a table of all codes' bands. Matches are compared in full, so the result is exact.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dj2mgm.data.near_duplicates.file_arrays import allocate_file_array

BANDS = 12
EXTRA_BAND_BITS = 2  # bits of a band beyond log2 of the number of codes; a look-up then finds 1/4 code on average
MAX_RADIUS = 2 * BANDS - 1  # one flipped bit per band
CODES_AT_ONCE = 1 << 14  # codes looked up at once, and candidates compared at once
Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]


def find_near_pairs(
    left: np.ndarray, right: np.ndarray, radius: int, folder: Path | None = None, rows: np.ndarray | None = None
) -> Iterator[Pairs]:
    """Yield every pair of a left and a right code that differ in at most `radius` bits, once, in batches.

    Args:
        left, right: (N, bytes) and (M, bytes) uint8, possibly memory-mapped.
        radius: number of bits, up to `MAX_RADIUS`.
        folder: folder of the table of right codes, an unnamed file.
        rows: (Q,) indices of the left codes to search for; None: all.

    Yields:
        Indices in `left` (or in `rows`), indices in `right`, and numbers of differing bits: (P,) int64 each.
    """
    if not 0 <= radius <= MAX_RADIUS:
        raise ValueError(f"radius must be from 0 to {MAX_RADIUS} bits, found {radius}")
    whole = left.shape[1] * 8 // BANDS
    width = min(whole, len(right).bit_length() + EXTRA_BAND_BITS)
    bands = [(band * whole, band * whole + width) for band in range(BANDS)]
    for number, band in enumerate(bands):
        table = _Table(right, band, folder)
        for start in range(0, len(left) if rows is None else len(rows), CODES_AT_ONCE):
            part = slice(start, start + CODES_AT_ONCE)
            codes = left[part] if rows is None else left[rows[part]]
            queries = _extract_band(codes, *band)
            for flip in (0, *(1 << bit for bit in range(width))) if radius >= BANDS else (0,):
                for first, second in table.look_up(queries ^ flip):
                    distance = np.bitwise_count(codes[first] ^ right[second]).sum(axis=1, dtype=np.int64)
                    near = np.flatnonzero(distance <= radius)
                    first, second, distance = first[near], second[near], distance[near]
                    new = ~_is_in_earlier_band(codes[first], right[second], bands[:number], radius // BANDS)
                    if new.any():
                        yield start + first[new], second[new], distance[new]


class _Table:
    """Table of codes by the value of a band, in files, because it has one entry per row."""

    def __init__(self, codes: np.ndarray, band: tuple[int, int], folder: Path | None):
        start, end = band
        values, self.order = (allocate_file_array(len(codes), np.int32, folder) for _ in range(2))
        self.starts = allocate_file_array((1 << end - start) + 1, np.int32, folder)
        for first in range(0, len(codes), CODES_AT_ONCE):
            part = _extract_band(codes[first : first + CODES_AT_ONCE], *band)
            values[first : first + CODES_AT_ONCE] = part
            distinct, counts = np.unique(part, return_counts=True)
            self.starts[distinct + 1] += counts.astype(np.int32)
        np.cumsum(self.starts, out=self.starts)
        self.order[:] = np.argsort(values)

    def look_up(self, queries: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield indices of queries and indices of codes with the same value, about `CODES_AT_ONCE` at a time."""
        starts = self.starts[queries]
        counts = self.starts[queries + 1] - starts
        query_indices = np.flatnonzero(counts)
        ends = np.cumsum(counts[query_indices], dtype=np.int64)
        cuts = np.searchsorted(ends, np.arange(CODES_AT_ONCE, ends[-1] if len(ends) else 0, CODES_AT_ONCE))
        for part in np.split(query_indices, cuts):
            repeats = counts[part]
            within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            yield np.repeat(part, repeats), self.order[np.repeat(starts[part], repeats) + within].astype(np.int64)


def _extract_band(codes: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return the codes' bits from `start` to `end` as numbers: (N,) int32."""
    first, last = start // 8, -(-end // 8)
    value = np.zeros(len(codes), dtype=np.int32)  # a band spans at most four bytes
    for byte in range(first, last):
        value <<= 8
        value |= codes[:, byte]
    value >>= last * 8 - end
    value &= (1 << (end - start)) - 1
    return value


def _is_in_earlier_band(left: np.ndarray, right: np.ndarray, bands: list[tuple[int, int]], flips: int) -> np.ndarray:
    """Return whether an earlier band has found each pair: (P,) bool."""
    is_repeat = np.zeros(len(left), dtype=bool)
    for band in bands:
        is_repeat |= np.bitwise_count(_extract_band(left, *band) ^ _extract_band(right, *band)) <= flips
    return is_repeat
