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
    compute_distances,
    compute_signature,
    find_near_duplicates,
    keep_best,
)
from dj2mgm.data.shapes import describe_scene, draw_image, draw_row_scene
from dj2mgm.evaluation.leak_search import Reference, find_leaks, read_references

SCENES = 300


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
        lambda image: encoded(image, "JPEG", 95),
        lambda image: encoded(image, "WEBP", 50),
        lambda image: scaled(image, 0.3),
        lambda image: scaled(image, 2),
    ],
    ids=["jpeg 30", "jpeg 95", "webp 50", "a third", "twice"],
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


@pytest.mark.parametrize("processes", [1, 2])
def test_images_of_a_reference_set_are_recognized(scenes, tmp_path: Path, processes):
    for number, image in enumerate(scenes[:12]):
        image.save(tmp_path / f"reference-{number}.png")
    random.Random(0).shuffle(trained := list(range(6, 18)))
    for number in trained:
        scaled(scenes[number], 0.7).save(tmp_path / f"trained-{number}.jpg", quality=80)
    images = {Reference("a", (str(number),)): tmp_path / f"reference-{number}.png" for number in range(12)}
    names = [f"trained-{number}.jpg" for number in trained]
    leaks = list(find_leaks(names, tmp_path, read_references(images, processes), processes))
    assert [(leak["image"], leak["ids"]) for leak in leaks] == [
        (f"trained-{number}.jpg", [str(number)]) for number in trained if number < 12
    ]
    assert all(leak["bits"] <= MAX_BITS for leak in leaks)
