"""What stays of a picture when its file is encoded again or scaled: 256 bits of its structure, and its colors' layout.

The bits are those of a pHash (Zauner 2010; as in the library `imagehash`, which would bring SciPy and PyWavelets for this
one cosine transform), of 16 × 16 frequencies rather than 8 × 8: 64 bits alone confuse drawn scenes. They are blind to
color, so each of 4 × 4 cells' mean color must agree as well, as in MPEG-7's color layout.
"""

import numpy as np
from PIL import Image

SIDE, FREQUENCIES, CELLS = 64, 16, 4
BITS = FREQUENCIES**2
CODE = BITS // 8  # bytes of a signature that are bits; the others are colors
SIGNATURE = CODE + CELLS**2 * 3
COSINES = np.cos(np.pi / SIDE * np.outer(np.arange(FREQUENCIES), np.arange(SIDE) + 0.5))  # DCT-II, (16, 64)


def signature_of(image: Image.Image) -> np.ndarray:
    """(SIGNATURE,) uint8 of an RGB image: bits, packed, then the colors of the cells."""
    small = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    spectrum = (COSINES @ np.asarray(small.convert("L"), dtype=np.float64) @ COSINES.T).ravel()
    bits = spectrum > np.median(spectrum[1:])  # without the mean gray
    cell = SIDE // CELLS
    colors = np.asarray(small, dtype=np.float64).reshape(CELLS, cell, CELLS, cell, 3).mean(axis=(1, 3))
    return np.concatenate([np.packbits(bits), np.rint(colors).astype(np.uint8).ravel()])


def bits_that_differ(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(N,) of (N, SIGNATURE) each."""
    return np.bitwise_count(left[:, :CODE] ^ right[:, :CODE]).sum(axis=1, dtype=np.int32)


def levels_that_differ(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(N,) of (N, SIGNATURE) each: 0 to 255, in the cell and color where they differ most."""
    return np.abs(left[:, CODE:].astype(np.int16) - right[:, CODE:]).max(axis=1)
