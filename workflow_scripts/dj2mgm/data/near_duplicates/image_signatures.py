"""What stays of a picture when its file is encoded again or scaled: 256 bits of its structure, and its colors' layout.

The bits are those of a pHash (Zauner, 2010; as in the library `imagehash`, which would bring SciPy and PyWavelets for
one cosine transform), of 16 × 16 frequencies rather than 8 × 8: 64 bits confuse drawn scenes. They are blind to color,
so the mean color of each of 4 × 4 cells must agree as well, as in the color layout of MPEG-7.

Pages of text differ from each other by less than a copy from its original once they are so small, and of a picture with
next to no structure hardly any bits are set. Of both, the bits are those of a digest of the pixels, so that they are
copies of the same pixels only.
"""

import hashlib

import numpy as np
from PIL import Image

SIDE, FREQUENCIES, CELLS = 64, 16, 4
BITS = FREQUENCIES**2
CODE = BITS // 8  # bytes of a signature that are bits; the others are colors
SIGNATURE = CODE + CELLS**2 * 3
MAX_BITS, MAX_LEVELS = 23, 12  # of a copy; docs/measurements/near_duplicates.md has the figures
# bits of 256 that are set at least, in any picture and in one like a page; photos and drawn scenes have about half of
# them, pages of text up to 90
STRUCTURE, OF_PAGES = 24, 96
PAGE = 0.99  # share of its pixels that are nearly gray
NEARLY, LIGHT = 24, 230  # levels between the colors of a gray pixel; level of a page's median pixel, at least
NOISE = 200  # a frequency that a drawing lacks, since it is symmetric, has less after JPEG or WebP
COSINES = np.cos(np.pi / SIDE * np.outer(np.arange(FREQUENCIES), np.arange(SIDE) + 0.5))  # DCT-II, (16, 64)


def compute_signature(image: Image.Image) -> np.ndarray:
    """(SIGNATURE,) uint8 of an RGB image: bits, packed, then the colors of the cells."""
    small = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    spectrum = (COSINES @ np.asarray(small.convert("L"), dtype=np.float64) @ COSINES.T).ravel()
    bits = spectrum > max(np.median(spectrum[1:]), NOISE)  # of the median without the mean gray
    cell = SIDE // CELLS
    colors = np.asarray(small, dtype=np.float64).reshape(CELLS, cell, CELLS, cell, 3).mean(axis=(1, 3))
    packed = np.packbits(bits)
    if bits.sum() < (OF_PAGES if _is_page(np.asarray(small)) else STRUCTURE):
        pixels = hashlib.blake2b(repr(image.size).encode() + image.tobytes(), digest_size=CODE).digest()
        packed = np.frombuffer(pixels, dtype=np.uint8)
    return np.concatenate([packed, np.rint(colors).astype(np.uint8).ravel()])


def _is_page(pixels: np.ndarray) -> bool:
    """Dark and gray on white; (SIDE, SIDE, 3) uint8."""
    return bool((np.ptp(pixels, axis=2) <= NEARLY).mean() >= PAGE and np.median(pixels) >= LIGHT)


def distance(left: np.ndarray, right: np.ndarray, max_bits: int, max_levels: int) -> np.ndarray:
    """Bits that differ, where at most `max_bits` do, and colors by at most `max_levels` of 256; elsewhere infinity.

    Args:
        left, right: (P, SIGNATURE) uint8.

    Returns:
        (P,) float64.
    """
    bits = np.bitwise_count(left[:, :CODE] ^ right[:, :CODE]).sum(axis=1, dtype=np.float64)
    levels = np.abs(left[:, CODE:].astype(np.int16) - right[:, CODE:]).max(axis=1)
    bits[(bits > max_bits) | (levels > max_levels)] = np.inf
    return bits
