"""The search for near-duplicates is exact, keeps the best image, and distinguishes rendered scenes."""

import random
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dj2mgm.data.near_duplicates import (
    MAX_BITS,
    MAX_LEVELS,
    MAX_RADIUS,
    compute_distances,
    compute_signature,
    find_near_duplicates,
    find_near_pairs,
    keep_best,
)
from dj2mgm.data.shapes import describe_scene, draw_image, draw_row_scene
from dj2mgm.evaluation.leak_search import Reference, find_leaks, read_references

SCENES = 150


@pytest.fixture(scope="module")
def scenes() -> list[Image.Image]:
    return [draw_image(draw_row_scene(3, "pretrain", number)) for number in range(SCENES)]


def encoded(image: Image.Image, kind: str, quality: int) -> Image.Image:
    file = BytesIO()
    image.save(file, kind, quality=quality)
    return Image.open(file).convert("RGB")


def scaled(image: Image.Image, factor: float) -> Image.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


@settings(deadline=None)
@given(
    pairs=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11)).filter(lambda pair: pair[0] < pair[1])),
    order=st.permutations(range(12)),
)
def test_every_duplicate_and_no_kept_row_is_near_a_kept_row(pairs, order):
    first, second = np.array(sorted(pairs), dtype=int).reshape(-1, 2).T
    rank = np.array(order)
    either = np.append(first, second), np.append(second, first)

    def near(positions):
        for query, position in enumerate(positions):  # in any order
            others = either[1][either[0] == position]
            yield np.full(len(others), query), others, others + position + 1.0

    center, compute_distance = keep_best(near, rank)
    kept_rows = set(np.flatnonzero(center == np.arange(12)))
    for item in range(12):
        if item not in kept_rows:
            pair = tuple(sorted((item, int(center[item]))))
            assert center[item] in kept_rows and pair in pairs and compute_distance[item] == sum(pair) + 1
            assert rank[center[item]] < rank[item]
    assert not any(set(pair) <= kept_rows for pair in pairs)


def test_not_all_pairs_of_large_clusters_are_computed(monkeypatch):
    """Use 5000 rows in two groups; while there are too many pairs, a quarter of the rows is taken first."""
    monkeypatch.setattr("dj2mgm.data.near_duplicates.MAX_PAIRS_IN_MEMORY", 20_000)
    rank, pairs_of_query = np.random.default_rng(0).permutation(5000), []

    def near(positions):
        for query, position in enumerate(positions):
            others = np.arange(position % 2, 5000, 2)
            pairs_of_query.append(len(others))
            yield np.full(len(others), query), others, np.ones(len(others))

    center, _ = keep_best(near, rank)
    assert [np.unique(center[group::2]).tolist() for group in (0, 1)] == [
        [2 * rank[0::2].argmin()],
        [2 * rank[1::2].argmin() + 1],
    ]
    assert sum(pairs_of_query) < 10**6, "of 12.5 million"


def test_rows_with_equally_many_images_are_compared_in_order(tmp_path):
    a, b, c = b"aaaa", b"aaab", b"zzzz"
    rows = [(1, a, 0.0), (1, b, 1.0), (2, a + c, 0.0), (2, b + c, 0.0), (2, c + a, 0.0), (0, b"", 0.0), (0, b"", 0.0)]
    rows += [(1, b, 1.0), (2, a + c, -np.inf)]

    def candidates(signatures):
        return lambda positions: [tuple(np.indices((len(positions), len(signatures))).reshape(2, -1))]

    def compute_distance(left, right):
        differing = (left != right).sum(axis=1).astype(float)
        return np.where(differing < 2, differing, np.inf)

    copies = find_near_duplicates(rows, tmp_path, candidates, compute_distance)
    assert copies.copy_of.tolist() == [1, -1, -1, 2, -1, -1, -1, 1, 2]
    assert copies.distance.tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 0]
    assert copies.count_clusters() == {"3": 2}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda image: encoded(image, "JPEG", 30),
        lambda image: encoded(image, "WEBP", 50),
        lambda image: scaled(image, 0.3),
        lambda image: scaled(image, 2),
    ],
    ids=["jpeg 30", "webp 50", "a third", "twice"],
)
def test_an_image_is_recognized_after_encoding_and_scaling(scenes, change):
    before = np.stack([compute_signature(image) for image in scenes])
    after = np.stack([compute_signature(change(image)) for image in scenes])
    assert np.isfinite(compute_distances(before, after, MAX_BITS, MAX_LEVELS)).mean() >= 0.99


def test_different_scenes_are_not_near_duplicates(scenes):
    signatures = np.stack([compute_signature(image) for image in scenes])
    first, second = np.triu_indices(SCENES, 1)
    near = np.isfinite(compute_distances(signatures[first], signatures[second], MAX_BITS, MAX_LEVELS))
    texts = [describe_scene(draw_row_scene(3, "pretrain", number)) for number in range(SCENES)]
    assert all(texts[i] == texts[j] for i, j in zip(first[near], second[near], strict=True))


def test_images_in_other_colors_are_different(scenes):
    red, green, blue = scenes[0].split()
    left, right = compute_signature(scenes[0])[None], compute_signature(Image.merge("RGB", (blue, red, green)))[None]
    assert compute_distances(left, right, 256, MAX_LEVELS) == np.inf


def test_images_of_a_reference_set_are_recognized(scenes, tmp_path: Path):
    for number, image in enumerate(scenes[:12]):
        image.save(tmp_path / f"reference-{number}.png")
    random.Random(0).shuffle(trained := list(range(6, 18)))
    for number in trained:
        scaled(scenes[number], 0.7).save(tmp_path / f"trained-{number}.jpg", quality=80)
    images = {Reference("a", (str(number),)): tmp_path / f"reference-{number}.png" for number in range(12)}
    names = [f"trained-{number}.jpg" for number in trained]
    leaks = list(find_leaks(names, tmp_path, read_references(images, processes=1), processes=2))
    assert [(leak["image"], leak["ids"]) for leak in leaks] == [
        (f"trained-{number}.jpg", [str(number)]) for number in trained if number < 12
    ]
    assert all(leak["bits"] <= MAX_BITS for leak in leaks)


def codes_with_neighbors(seed: int, count: int, most: int) -> np.ndarray:
    """Return random codes, and for half of them others that differ in up to `most` bits."""
    rng = np.random.default_rng(seed)
    bits = rng.random((count, 256)) < rng.choice([0.5, 0.05])  # balanced, or nearly all zero as for flat images
    copies = bits[rng.integers(0, count, count // 2)]
    for row in copies:
        row[rng.choice(256, rng.integers(0, most + 1), replace=False)] ^= True
    return np.packbits(np.concatenate([bits, copies]), axis=1)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), radius=st.integers(0, MAX_RADIUS), count=st.integers(0, 60), first=st.integers(0, 9))
def test_bands_find_all_pairs(seed, radius, count, first):
    codes = codes_with_neighbors(seed, count, MAX_RADIUS + 4)
    right = codes[first:]
    pairs = [
        pair
        for part in find_near_pairs(codes, right, radius)
        for pair in zip(*map(np.ndarray.tolist, part), strict=True)
    ]
    differing = np.bitwise_count(codes[:, None] ^ right[None]).sum(axis=-1, dtype=int)
    expected = [(i, j, differing[i, j]) for i, j in np.argwhere(differing <= radius).tolist()]
    assert sorted(pairs) == expected  # each pair once


def test_a_radius_beyond_the_guarantee_of_bands_is_refused():
    codes = codes_with_neighbors(0, 4, 0)
    with pytest.raises(ValueError, match="from 0 to 23 bits, found 24"):
        next(find_near_pairs(codes, codes, MAX_RADIUS + 1))
