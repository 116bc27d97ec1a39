"""The batched CLIP similarity filter compared with Data-Juicer's own, with a random CLIP."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPProcessor, ViTConfig

from dj2mgm.data.score_limits import compute_score_limits
from dj2mgm.errors import InputError
from dj2mgm.juicer.clip_similarity import ClipSimilarity, PixelBatches
from dj2mgm.juicer.patched_data_juicer import Fields, load_ops
from dj2mgm.storage.files import read_jsonl, write_jsonl, write_yaml
from forked_python import forked_python
from paths import PROJECT
from tiny_clip import save_tiny_clip

STOCK, BATCHED = "image_text_similarity_filter", "batched_image_text_similarity_filter"
STAT = "image_text_similarity"
IMAGE, END = "<__dj__image>", "<|__dj__eoc|>"


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    """Save a random CLIP, whose tokens are single characters, with `save_pretrained`."""
    return str(save_tiny_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[str]:
    """Write noise images of different sizes, shapes and modes; the last one has an EXIF orientation."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    paths = []
    for number, (size, mode) in enumerate(
        [((32, 32), "RGB"), ((90, 41), "RGB"), ((20, 77), "L"), ((33, 32), "RGBA"), ((64, 48), "P"), ((50, 30), "RGB")]
    ):
        noise = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        exif = Image.Exif()
        if number == 5:
            exif[0x0112] = 6  # orientation: rotated by 90 degrees
        paths.append(str(folder / f"{number}.png"))
        Image.fromarray(noise).convert(mode).save(paths[-1], exif=exif)
    return paths


@pytest.fixture(scope="module")
def rows(photos) -> list[tuple[str, list[str]]]:
    """Return text and images of rows of every kind."""
    a, b, c, d, e, f = photos
    return [
        (f"{IMAGE}\na red cat {END}", [a]),
        (f"{IMAGE}\na red cat {END}", [b]),  # the same text again
        ("no image at all", []),
        ("an image, but no token for it", [a]),
        (f"{IMAGE}{IMAGE} two of them {END}", [c, d]),
        (f"{IMAGE} first {END} between {END} {IMAGE} {IMAGE} second {END} third {IMAGE}", [a, e, f, a]),
        (f"{IMAGE} {'a caption far beyond what the text tower holds ' * 3}{END}", [b]),
        (f"{IMAGE}{END}", [e]),  # no words
        (f"{IMAGE} one token more than images {IMAGE}", [f]),
        (f"{IMAGE} words with <|endoftext|> in them", [d]),
    ]


def scores(name: str, rows: list[tuple[str, list[str]]], **arguments) -> list[list[float]]:
    """Return each row's scores, computed on `batch_size` rows at a time."""
    [operator] = load_ops([{name: arguments}])
    values = []
    for start in range(0, len(rows), operator.batch_size):
        texts, images = zip(*rows[start : start + operator.batch_size], strict=True)
        samples = {"text": list(texts), "images": list(images), Fields.stats: [{} for _ in texts]}
        values += [list(stats[STAT]) for stats in operator.compute_stats(samples)[Fields.stats]]
    return values


def assert_equal_scores(left: list[list[float]], right: list[list[float]], tolerance: float) -> None:
    assert [len(row) for row in left] == [len(row) for row in right]
    assert np.concatenate(left) == pytest.approx(np.concatenate(right), abs=tolerance)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"horizontal_flip": True, "reduce_mode": "min"}, {"vertical_flip": True, "reduce_mode": "max"}],
    ids=lambda arguments: ", ".join(arguments) or "defaults",
)
def test_scores_equal_those_of_the_stock_operator(clip, rows, arguments):
    stock = scores(STOCK, rows, hf_clip=clip, **arguments)
    assert [len(row) for row in stock] == [1, 1, 0, 0, 1, 3, 1, 1, 1, 1]
    assert len(set(np.concatenate(stock))) == 10  # every pair has its own score
    assert_equal_scores(scores(BATCHED, rows, hf_clip=clip, **arguments), stock, tolerance=1e-6)


def test_scores_have_the_scale_of_the_stock_operator(clip, rows, tmp_path):
    """Compare with the logit divided by 100, which equals the cosine only for a logit scale of ln 100."""
    model = CLIPModel.from_pretrained(clip)
    model.logit_scale.data.fill_(1.0)
    model.save_pretrained(tmp_path)
    CLIPProcessor.from_pretrained(clip).save_pretrained(tmp_path)
    batched = scores(BATCHED, rows, hf_clip=str(tmp_path))
    assert_equal_scores(batched, scores(STOCK, rows, hf_clip=str(tmp_path)), tolerance=1e-6)
    assert max(map(abs, np.concatenate(batched))) <= np.e / 100


def test_scores_do_not_depend_on_the_batch(clip, rows):
    one_by_one = scores(BATCHED, rows, hf_clip=clip, batch_size=1)
    for size in (3, 100):
        assert_equal_scores(scores(BATCHED, rows, hf_clip=clip, batch_size=size), one_by_one, tolerance=1e-6)
    assert_equal_scores(scores(BATCHED, rows[::-1], hf_clip=clip)[::-1], one_by_one, tolerance=1e-6)
    assert scores(BATCHED, rows, hf_clip=clip) == scores(BATCHED, rows, hf_clip=clip)


def test_encoded_bytes_in_a_row_precede_the_path(clip, photos):
    [operator] = load_ops([{BATCHED: {"hf_clip": clip}}])
    data = [[Path(photos[1]).read_bytes()], [None]]
    samples = {"text": [f"{IMAGE} a cat"] * 2, "images": [["/nowhere.png"], [photos[1]]], "image_bytes": data}
    from_bytes, from_path = operator.compute_stats(samples | {Fields.stats: [{}, {}]})[Fields.stats]
    assert from_bytes[STAT] == from_path[STAT]


def test_an_existing_score_is_kept(clip, photos):
    [operator] = load_ops([{BATCHED: {"hf_clip": clip}}])
    samples = {"text": [f"{IMAGE} a cat"] * 2, "images": [photos[:1]] * 2, Fields.stats: [{STAT: [0.5]}, {}]}
    first, second = operator.compute_stats(samples)[Fields.stats]
    assert first == {STAT: [0.5]} and second[STAT] != [0.5]


@pytest.mark.parametrize(
    "pipeline",
    [
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        {"size": {"shortest_edge": 37}, "crop_size": {"height": 20, "width": 31}, "resample": 2},
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 32, "width": 32}},  # padded
        {"size": {"height": 32, "width": 32}, "do_center_crop": False, "do_normalize": False},
    ],
    ids=["usual", "uneven crop", "crop beyond the image", "stretched"],
)
def test_pixels_equal_the_image_processors_bit_for_bit(photos, pipeline):
    processor = CLIPImageProcessorPil(**pipeline)
    images = [Image.open(photo).convert("RGB") for photo in photos]
    batches = PixelBatches(processor, torch.device("cpu"))
    expected = processor(images, return_tensors="pt").pixel_values
    pixels = batches(range(len(images)), lambda number: images[number])
    assert pixels.dtype == torch.float32 and torch.equal(pixels, expected)
    assert (batches.table is not None) == ("crop_size" in pipeline and pipeline["size"]["shortest_edge"] >= 32)


@pytest.mark.parametrize(
    ("arguments", "decisions"),
    [
        ({}, [True, True, True, False]),
        ({"any_or_all": "all"}, [True, True, False, False]),
        ({"any_or_all": "all", "max_score": 0.3}, [True, False, False, False]),
        ({"reversed_range": True}, [True, False, True, True]),
    ],
)
def test_rows_are_kept_as_by_the_stock_operator(clip, arguments, decisions):
    stats = [{STAT: values} for values in ([], [0.4, 0.5], [0.2, 0.4], [0.1, 0.2])]
    for name in (STOCK, BATCHED):
        [operator] = load_ops([{name: {"hf_clip": clip, "min_score": 0.3, **arguments}}])
        assert list(operator.process({Fields.stats: stats})) == decisions


@settings(deadline=None)
@given(
    scores=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    quantiles=st.tuples(st.none() | st.floats(0, 0.9), st.none() | st.floats(0, 1)),
)
def test_a_window_keeps_rows_between_two_quantiles_and_ties(clip, scores, quantiles):
    lower, upper = quantiles
    if (lower or 0) >= (1 if upper is None else upper):
        return
    stats = [{STAT: [score / 31]} for score in scores]
    arguments = {"hf_clip": clip, "lower_quantile": lower, "upper_quantile": upper}
    arguments |= {"min_score": -1.0} if lower is None and upper is None else {}
    [operator] = load_ops([{BATCHED: arguments}])
    operator.set_limits(stats)
    ordered, count = sorted(scores), len(scores)
    first = min(round((lower or 0) * count), count - 1)
    last = max(first, round((1 if upper is None else upper) * count) - 1)
    lowest = ordered[first] if lower is not None else min(scores)
    highest = ordered[last] if upper is not None else max(scores)
    assert list(operator.process({Fields.stats: stats})) == [lowest <= score <= highest for score in scores]


def test_an_unloadable_clip_is_reported_in_one_sentence(clip, tmp_path):
    with pytest.raises(InputError, match=r"hf_clip '.*/gone' is not a folder .* Name one in the recipe"):
        ClipSimilarity(str(tmp_path / "gone"), "cpu")
    ViTConfig().save_pretrained(tmp_path / "vit")
    with pytest.raises(InputError, match="it is a model of type 'vit'"):
        ClipSimilarity(str(tmp_path / "vit"), "cpu")
    pickled = tmp_path / "pickled"
    CLIPProcessor.from_pretrained(clip).save_pretrained(pickled)
    model = CLIPModel.from_pretrained(clip)
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        ClipSimilarity(str(pickled), "cpu")


def test_missing_images_of_a_row_are_an_error(clip, photos):
    [operator] = load_ops([{BATCHED: {"hf_clip": clip}}])
    samples = {"text": [f"{IMAGE} one {END} {IMAGE} two"], "images": [photos[:1]], Fields.stats: [{}]}
    with pytest.raises(ValueError, match="at least 2 image tokens, but the row has 1 images"):
        operator.compute_stats(samples)


def run_recipe(folder: Path, rows: list[dict], arguments: dict, processes: int) -> subprocess.CompletedProcess:
    write_jsonl(folder / "data.jsonl", rows)
    recipe = {"process": [{BATCHED: arguments}]}
    write_yaml(folder / "config.yaml", {"image_root": str(folder), "processes": processes, "recipe": recipe})
    script = PROJECT / "workflow_scripts/filter_data.py"
    flags = ["--config", folder / "config.yaml", "--data", folder / "data.jsonl", "--output-dir", folder / "out"]
    return subprocess.run([forked_python(), script, *flags], capture_output=True, text=True)


def test_a_recipe_keeps_exactly_the_rows_above_the_threshold(clip, photos, tmp_path):
    texts = [f"{IMAGE}\n{'abcdefgh'[number % 8] * (number + 1)} {END}" for number in range(12)]
    rows = [
        {"id": str(number), "text": text, "images": [Path(photos[number % 5]).name]}
        for number, text in enumerate(texts)
    ]
    for photo in photos:
        (tmp_path / Path(photo).name).symlink_to(photo)
    expected = scores(STOCK, [(text, [photos[number % 5]]) for number, text in enumerate(texts)], hf_clip=clip)
    ordered = sorted(score for [score] in expected)
    threshold = (ordered[5] + ordered[6]) / 2
    arguments = {"hf_clip": clip, "min_score": threshold, "batch_size": 4}
    done = run_recipe(tmp_path, rows, arguments, processes=2)
    assert done.returncode == 0, done.stderr
    kept_ids = [row["id"] for row in read_jsonl(tmp_path / "out/filtered.jsonl")]
    assert kept_ids == [str(number) for number, [score] in enumerate(expected) if score >= threshold]
    for row in read_jsonl(tmp_path / "out/stats.jsonl"):
        assert row[STAT] == pytest.approx(expected[int(row["id"])], abs=1e-6)


def test_a_score_that_is_not_a_number_counts_as_the_lowest():
    scores = [0.1 * number for number in range(8)] + [float("nan")] * 2
    assert compute_score_limits(scores, keep_fraction=0.5)["min"] == pytest.approx(0.3, abs=1e-5)
    assert compute_score_limits(scores, keep_fraction=1.0)["min"] == pytest.approx(0.0, abs=1e-5)
    assert compute_score_limits(scores, lower_quantile=0.2, upper_quantile=0.9)["max"] == pytest.approx(0.6, abs=1e-5)
    assert compute_score_limits([float("nan")], keep_fraction=0.5) == {"min": 0.0, "max": 0.0}
