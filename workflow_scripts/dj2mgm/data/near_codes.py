"""Pairs of binary codes that differ in few bits, without a comparison of all pairs: multi-index hashing.

Bands are cut out of codes (Norouzi, Punjani and Fleet, 2012). Two codes that differ in at most `radius` bits differ in
at most `radius // BANDS` bits of some band, so it is enough to look up each band, and each band with one bit flipped,
in a table of all codes' bands. What is found is compared in full: the result is exact.
"""

from collections.abc import Iterator

import numpy as np

BANDS = 12
SPARSE = 2  # bits of a band beyond those that number all codes: a look-up finds a quarter of a code on average
MAX_RADIUS = 2 * BANDS - 1  # one flipped bit a band
CANDIDATES = 1 << 16  # compared at a time
Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]


def near_pairs(left: np.ndarray, right: np.ndarray, radius: int) -> Iterator[Pairs]:
    """Every pair of a left and a right code that differ in at most `radius` bits, once, some at a time.

    Args:
        left, right: (N, bytes) and (M, bytes) uint8, perhaps files mapped into memory. Where both are the same object,
            a pair is (earlier, later).
        radius: up to `MAX_RADIUS`.

    Yields:
        places in left, places in right, differing bits: (P,) int64 each.
    """
    if not 0 <= radius <= MAX_RADIUS:
        raise ValueError(f"codes are found up to {MAX_RADIUS} differing bits, not {radius}")
    whole = left.shape[1] * 8 // BANDS
    width = min(whole, len(right).bit_length() + SPARSE)
    bands = [(band * whole, band * whole + width) for band in range(BANDS)]
    for number, band in enumerate(bands):
        wanted, table = _band(left, *band), _Table(_band(right, *band), width)
        for flip in (0, *(1 << bit for bit in range(width))) if radius >= BANDS else (0,):
            for first, second in table.look_up(wanted ^ flip):
                if left is right:
                    earlier = first < second
                    first, second = first[earlier], second[earlier]
                differing = np.bitwise_count(left[first] ^ right[second])  # (P, bytes)
                distance = differing.sum(axis=1, dtype=np.int64)
                near = np.flatnonzero(distance <= radius)
                first, second = first[near], second[near]
                new = ~_found_before(left[first], right[second], bands[:number], radius // BANDS)
                yield first[new], second[new], distance[near[new]]


class _Table:
    """Codes by the value of a band."""

    def __init__(self, values: np.ndarray, bits: int):
        self.order = np.argsort(values, kind="stable").astype(np.int32)
        self.starts = np.zeros((1 << bits) + 1, dtype=np.int32)
        np.cumsum(np.bincount(values, minlength=1 << bits), out=self.starts[1:])

    def look_up(self, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(places in `wanted`, places of codes with that value), about `CANDIDATES` at a time."""
        starts = self.starts[wanted]
        counts = self.starts[wanted + 1] - starts
        places = np.flatnonzero(counts).astype(np.int32)
        ends = np.cumsum(counts[places], dtype=np.int64)
        cuts = np.searchsorted(ends, np.arange(CANDIDATES, ends[-1] if len(ends) else 0, CANDIDATES))
        for part in np.split(places, cuts):
            repeats = counts[part]
            within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            yield np.repeat(part, repeats), self.order[np.repeat(starts[part], repeats) + within].astype(np.int64)


def _band(codes: np.ndarray, start: int, end: int) -> np.ndarray:
    """(N,) int32: the codes' bits from `start` to `end`, as a number."""
    first, last = start // 8, -(-end // 8)
    value = np.zeros(len(codes), dtype=np.int32)  # a band lies in four bytes at most
    for byte in range(first, last):
        value = value << 8 | codes[:, byte]
    return (value >> (last * 8 - end)) & ((1 << (end - start)) - 1)


def _found_before(left: np.ndarray, right: np.ndarray, bands: list[tuple[int, int]], flips: int) -> np.ndarray:
    """(P,) bool: pairs that an earlier band has found."""
    found = np.zeros(len(left), dtype=bool)
    for band in bands:
        found |= np.bitwise_count(_band(left, *band) ^ _band(right, *band)) <= flips
    return found
