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
    find_near_pairs,
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
