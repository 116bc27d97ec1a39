"""Near-duplicate images: signatures, and the search for codes that differ in few bits.

A signature survives re-encoding and scaling. It has 256 bits of structure, and the layout of colors. The bits are a
pHash (Zauner, 2010) of 16 × 16 frequencies: with the usual 8 × 8, different rendered scenes get equal bits. They do not
depend on color, so the mean color of each of 4 × 4 cells must agree too, as in the color layout of MPEG-7. Small pages
of text differ less from each other than a copy from its original, and an image with almost no structure sets hardly any
bits. For both, the bits are a digest of the pixels, so that only images with the same pixels match.

In multi-index hashing, codes are divided into bands (Norouzi, Punjani and Fleet, 2012). Two codes that differ in at
most `radius` bits differ in at most `radius // BANDS` bits of some band. So it is enough to look up each band, and each
band with one flipped bit, in a table of all codes' bands. Matches are compared in full, so the result is exact.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import DTypeLike
from PIL import Image

SIDE, FREQUENCIES, CELLS = 64, 16, 4
BITS = FREQUENCIES**2
CODE_BYTES = BITS // 8  # bytes of a signature for the bits; the others are colors
SIGNATURE_BYTES = CODE_BYTES + CELLS**2 * 3
MAX_BITS, MAX_LEVELS = 23, 12  # largest differences of a near-duplicate; see docs/measurements/near_duplicates.md
# An image with fewer set bits is compared by its exact pixels. Photos and rendered scenes set about 128 of 256 bits,
# pages of text up to 90.
MIN_BITS = 24
MIN_BITS_OF_PAGE = 96  # for images that look like a page
PAGE_SHARE = 0.99  # least share of nearly gray pixels on a page
NEARLY_GRAY = 24  # largest range of the colors of a nearly gray pixel
LIGHT = 230  # least level of a page's median pixel
COMPRESSION_NOISE = 200  # noise of JPEG and WebP stays below this, in frequencies that a symmetric drawing lacks
# the library imagehash would need SciPy and PyWavelets for this one transform
COSINES = np.cos(np.pi / SIDE * np.outer(np.arange(FREQUENCIES), np.arange(SIDE) + 0.5))  # DCT-II, (16, 64)


def compute_signature(image: Image.Image) -> np.ndarray:
    """Return the signature of an RGB image, (SIGNATURE_BYTES,) uint8: packed bits, then the colors of the cells."""
    small = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    spectrum = (COSINES @ np.asarray(small.convert("L"), dtype=np.float64) @ COSINES.T).ravel()
    bits = spectrum > max(np.median(spectrum[1:]), COMPRESSION_NOISE)  # median without the mean gray
    cell = SIDE // CELLS
    colors = np.asarray(small, dtype=np.float64).reshape(CELLS, cell, CELLS, cell, 3).mean(axis=(1, 3))
    packed = np.packbits(bits)
    if bits.sum() < (MIN_BITS_OF_PAGE if _is_page(np.asarray(small)) else MIN_BITS):
        pixels = hashlib.blake2b(repr(image.size).encode() + image.tobytes(), digest_size=CODE_BYTES).digest()
        packed = np.frombuffer(pixels, dtype=np.uint8)
    return np.concatenate([packed, np.rint(colors).astype(np.uint8).ravel()])


def _is_page(pixels: np.ndarray) -> bool:
    """Return whether the pixels, (SIDE, SIDE, 3) uint8, are dark and gray on white."""
    return bool((np.ptp(pixels, axis=2) <= NEARLY_GRAY).mean() >= PAGE_SHARE and np.median(pixels) >= LIGHT)


def compute_distances(left: np.ndarray, right: np.ndarray, max_bits: int, max_levels: int) -> np.ndarray:
    """Return the number of differing bits of P pairs, (P,) float64; infinity if bits or colors differ too much.

    Args:
        left, right: (P, SIGNATURE_BYTES) uint8.
        max_levels: largest difference of a color, of 256 levels.
    """
    bits = np.bitwise_count(left[:, :CODE_BYTES] ^ right[:, :CODE_BYTES]).sum(axis=1, dtype=np.float64)
    levels = np.abs(left[:, CODE_BYTES:].astype(np.int16) - right[:, CODE_BYTES:]).max(axis=1)
    bits[(bits > max_bits) | (levels > max_levels)] = np.inf
    return bits


def allocate_file_array(length: int, dtype: DTypeLike, folder: Path | None = None) -> np.ndarray:
    """Return zeros of shape (length,) in a memory-mapped file, which the kernel writes out if memory is short.

    The file is in `folder`, or in the folder of temporary files. A full disk raises OSError.
    """
    if not length:
        return np.zeros(0, dtype)
    with TemporaryFile(dir=folder) as file:
        # without this, a full disk would kill the process at a later access
        os.posix_fallocate(file.fileno(), 0, length * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, mode="r+", shape=(length,))


BANDS = 12
EXTRA_BAND_BITS = 2  # bits of a band beyond log2 of the number of codes; a look-up then finds 1/4 code on average
MAX_RADIUS = 2 * BANDS - 1  # one flipped bit per band
CODES_AT_ONCE = 1 << 14  # codes looked up at once, and candidates compared at once
NearPairs = tuple[np.ndarray, np.ndarray, np.ndarray]


def find_near_pairs(
    left: np.ndarray, right: np.ndarray, radius: int, folder: Path | None = None, rows: np.ndarray | None = None
) -> Iterator[NearPairs]:
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
