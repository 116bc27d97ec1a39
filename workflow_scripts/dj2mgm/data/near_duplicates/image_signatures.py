"""Signatures of images that survive re-encoding and scaling, and distances between them.

A signature has 256 bits of structure, and the layout of colors. The bits are a pHash (Zauner, 2010) of 16 × 16
frequencies: with the usual 8 × 8, different rendered scenes get equal bits. They do not depend on color, so the mean
color of each of 4 × 4 cells must agree too, as in the color layout of MPEG-7. Small pages of text differ less from each
other than a copy from its original, and an image with almost no structure sets hardly any bits. For both, the bits are
a digest of the pixels, so that only images with the same pixels match.
"""

import hashlib

import numpy as np
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
