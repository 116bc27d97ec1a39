"""The search for codes that differ in few bits finds all pairs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dj2mgm.data.near_duplicates import MAX_RADIUS, find_near_pairs


def codes_with_neighbors(seed: int, count: int, most: int) -> np.ndarray:
    """Return random codes, and for half of them others that differ in up to `most` bits."""
    rng = np.random.default_rng(seed)
    bits = rng.random((count, 256)) < rng.choice([0.5, 0.05])  # balanced, or nearly all zero as for flat images
    copies = bits[rng.integers(0, count, count // 2)]
    for row in copies:
        row[rng.choice(256, rng.integers(0, most + 1), replace=False)] ^= True
    return np.packbits(np.concatenate([bits, copies]), axis=1)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), radius=st.integers(0, MAX_RADIUS), count=st.integers(0, 60))
def test_bands_find_all_pairs(seed, radius, count):
    codes = codes_with_neighbors(seed, count, MAX_RADIUS + 4)
    pairs = [
        pair
        for part in find_near_pairs(codes, codes, radius)
        for pair in zip(*map(np.ndarray.tolist, part), strict=True)
    ]
    differing = np.bitwise_count(codes[:, None] ^ codes[None]).sum(axis=-1, dtype=int)
    expected = [(i, j, differing[i, j]) for i, j in np.argwhere(differing <= radius).tolist()]
    assert sorted(pairs) == expected  # each pair once


def test_bands_find_all_pairs_of_two_sets():
    codes = codes_with_neighbors(1, 80, MAX_RADIUS)
    left, right = codes[:70], codes[70:]
    pairs = [
        pair
        for i, j, _ in find_near_pairs(left, right, MAX_RADIUS)
        for pair in zip(i.tolist(), j.tolist(), strict=True)
    ]
    near = np.bitwise_count(left[:, None] ^ right[None]).sum(axis=-1, dtype=int) <= MAX_RADIUS
    assert sorted(pairs) == [tuple(pair) for pair in np.argwhere(near).tolist()]


def test_a_radius_beyond_the_guarantee_of_bands_is_refused():
    codes = codes_with_neighbors(0, 4, 0)
    with pytest.raises(ValueError, match="from 0 to 23 bits, found 24"):
        next(find_near_pairs(codes, codes, MAX_RADIUS + 1))
