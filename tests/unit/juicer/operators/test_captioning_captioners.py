"""Captioners (the workflow's own model, Data-Juicer's operator with a BLIP-2) and their stored captions."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from data_juicer.utils.lazy_loader import LazyLoader

from dj2mgm.data.formats import build_dj_text, extract_caption
from dj2mgm.errors import InputError
from dj2mgm.juicer.operators.captioners import CANDIDATES_KEY, LOG_LIKELIHOODS, Captioner, CaptionStore
from dj2mgm.juicer.operators.declarations import Captions
from dj2mgm.juicer.patched_data_juicer import Fields, load_ops
from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from dj2mgm.storage.files import read_jsonl
from tiny_captioners import recaption, save_tiny_blip2, save_tiny_mgm, write_pairs
from tiny_clip import save_tiny_clip

COUNT = 11


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> list[str]:
    data = write_pairs(tmp_path_factory.mktemp("pairs"), ["x"] * COUNT)
    return [str(data.parent / row["images"][0]) for row in read_jsonl(data)]


@pytest.fixture(scope="module")
def mgm(tmp_path_factory) -> dict:
    """Return the captioner mgm with a random model, as in a recipe."""
    folder = tmp_path_factory.mktemp("mgm")
    base, stage = save_tiny_mgm(folder)
    arguments = {"base_model": str(base), "stage": str(stage), "num_beams": 3, "batch_size": 4, "max_new_tokens": 5}
    return {"mgm_captioning_mapper": arguments}


@pytest.fixture(scope="module")
def blip2(tmp_path_factory) -> dict:
    """Return Data-Juicer's own operator with a random BLIP-2."""
    folder = save_tiny_blip2(tmp_path_factory.mktemp("blip2"))
    sizes = {"gpu_batch_size": 4, "batch_size": 4}
    return {"image_captioning_mapper": {"hf_img2seq": str(folder), "keep_original_sample": False} | sizes}


def caption_all(captioner: Captioner, images: list[str]) -> list[Captions]:
    size = captioner.batch_size
    return [
        captions
        for start in range(0, len(images), size)
        for captions in captioner(images[start : start + size], images[start : start + size])
    ]


def test_the_mappers_captions_equal_the_models(mgm, images):
    [arguments] = mgm.values()
    [operator] = load_ops([mgm])
    samples = {"text": ["a", "b", "c"], "images": [images[:1], [], images[1:2]], Fields.meta: [{}, {}, {}]}
    captioned = operator.process(samples)
    generator = MGMGenerator(Path(arguments["base_model"]), Path(arguments["stage"]))
    captions = list(generator.generate_candidates([images[0], images[1]], "", "plain", 3, 5, batch_size=2))
    assert captioned["text"] == [build_dj_text(captions[0][0][0]), "b", build_dj_text(captions[1][0][0])]
    for row, expected in ((0, captions[0]), (1, []), (2, captions[1])):
        meta = captioned[Fields.meta][row]
        assert meta[CANDIDATES_KEY].tolist() == [caption for caption, _ in expected]
        assert meta[LOG_LIKELIHOODS].tolist() == pytest.approx([value for _, value in expected], abs=1e-4)


def test_captions_do_not_depend_on_order_or_number_of_images(mgm, images):
    """Captions are equal byte for byte, although the batches differ and the last one is not full."""
    captioner = Captioner(mgm, seed=0)
    reference = dict(zip(images, caption_all(captioner, images), strict=True))
    assert len({captions.candidates[0] for captions in reference.values()}) > 1
    for number in range(3):
        some = random.Random(number).sample(images, COUNT - number)
        for image, captions in zip(some, caption_all(captioner, some), strict=True):
            assert captions.candidates == reference[image].candidates
            assert captions.log_likelihoods == pytest.approx(reference[image].log_likelihoods, abs=1e-4)
    assert caption_all(captioner, images) == list(reference.values())


def test_data_juicers_captioner_depends_on_seed_and_images(blip2, images, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail(f"started {args}"))
    monkeypatch.setattr(LazyLoader, "_install_package", lambda *args, **kwargs: pytest.fail("installs a package"))
    captioner = Captioner(blip2, seed=0)
    first = captioner(images[:2], ["a", "b"])
    for captions in first:
        [text] = captions.candidates
        assert captions.log_likelihoods is None and text.startswith("w") and "<" not in text
    random.random()  # change the state of the random generator
    assert captioner(images[:2], ["a", "b"]) == first
    assert captioner(images[:2], ["a", "d"]) != first
    assert Captioner(blip2, seed=1)(images[:2], ["a", "b"]) != first


def test_data_juicers_captioner_recaptions_rows(blip2, images, tmp_path):
    clip = str(save_tiny_clip(tmp_path / "clip"))
    rows = {"text": [build_dj_text("x")] * 2, "images": [[image] for image in images[:2]]}
    arguments = {"hf_clip": clip, "min_similarity": 10.0, "captioner": blip2, "max_caption_length": 3000}
    for row in recaption(rows, **arguments)[0]:
        assert extract_caption(row["text"]) == row[Fields.meta]["recaption"]["caption"] != "x"
        assert row[Fields.stats]["caption_log_likelihood"] == []


def moved(captioner: dict, folder: Path) -> dict:
    """Return the same captioner in other folders."""
    [(name, arguments)] = captioner.items()
    copies = {}
    for key, value in arguments.items():
        if isinstance(value, str):
            copies[key] = str(shutil.copytree(value, folder / key))
    return {name: arguments | copies}


@pytest.mark.parametrize("kind", ["mgm", "blip2"])
def test_a_fingerprint_depends_on_contents_and_not_on_paths(kind, request, tmp_path):
    captioner = request.getfixturevalue(kind)
    copy = moved(captioner, tmp_path)
    original = Captioner(captioner, 0).compute_fingerprint()
    assert Captioner(copy, 0).compute_fingerprint() == original
    [(name, arguments)] = copy.items()
    (tmp_path / next(iter(arguments)) / "notes.md").write_text("not the model's")
    assert Captioner(copy, 0).compute_fingerprint() == original
    default = {"mgm": {"question": ""}, "blip2": {"caption_num": 1.0}}[kind]
    assert Captioner({name: default | arguments}, 0).compute_fingerprint() == original
    assert (Captioner(copy, 1).compute_fingerprint() == original) == (kind == "mgm"), "beam search draws nothing"
    assert Captioner({name: arguments | {"batch_size": 2}}, 0).compute_fingerprint() != original
    weights = next(tmp_path.rglob("projector.safetensors" if kind == "mgm" else "model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert Captioner(copy, 0).compute_fingerprint() != original


def test_training_records_are_not_in_the_fingerprint(mgm, tmp_path):
    copy = moved(mgm, tmp_path)
    before = Captioner(copy, 0).compute_fingerprint()
    (tmp_path / "stage/metrics.json").write_text("{}")
    (tmp_path / "stage/checkpoints").mkdir()
    assert Captioner(copy, 0).compute_fingerprint() == before
    (tmp_path / "stage/adapter").mkdir()
    (tmp_path / "stage/adapter/adapter_model.safetensors").write_bytes(b"0")
    assert Captioner(copy, 0).compute_fingerprint() != before


def test_writers_share_captions_and_write_their_own_files(tmp_path):
    two_captions, one_caption = Captions(["a", "b"], [-1.0, -2.5]), Captions(["c"], None)
    first = CaptionStore(tmp_path, "f", "first")
    first.add({"x": two_captions})
    second = CaptionStore(tmp_path, "f", "second")
    assert second.get(["x", "y"]) == {"x": two_captions}
    second.add({"y": one_caption})
    again = CaptionStore(tmp_path, "f", "first")  # while the first store is open, as in another process
    assert again.get(["x", "y"]) == {"x": two_captions, "y": one_caption}
    again.add({"z": two_captions})
    assert CaptionStore(tmp_path, "g", "first").get(["x"]) == {}
    lines = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "f").iterdir()}
    assert lines == {"first.jsonl": 1, "second.jsonl": 1, "first-2.jsonl": 1}


@pytest.mark.parametrize("cut", [1, 40])
def test_an_incomplete_line_is_removed_and_captioned_again(tmp_path, cut):
    store = CaptionStore(tmp_path, "f", "w")
    store.add({"x": Captions(["a"], [-1.0]), "y": Captions(["ü"], [-2.0])})
    del store
    [path] = (tmp_path / "f").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    reader = CaptionStore(tmp_path, "f", "another")
    assert set(reader.get("xy")) == {"x"} and path.read_bytes() == whole[:-cut], "only the writer may cut"
    store = CaptionStore(tmp_path, "f", "w")
    assert set(store.get("xy")) == {"x"}
    store.add({"y": Captions(["ü"], [-2.0])})
    assert path.read_bytes() == whole


WRONG_LINES = {
    "other keys": '{"a": 1}',
    "no candidate": '{"image": "y", "candidates": [], "log_likelihoods": null}',
    "a list as image": '{"image": ["y"], "candidates": ["a"], "log_likelihoods": null}',
    "too few numbers": '{"image": "y", "candidates": ["a", "b"], "log_likelihoods": [-1]}',
    "a number as candidate": '{"image": "y", "candidates": [5], "log_likelihoods": null}',
    "half a character": '{"image": "y", "candidates": ["\\ud800"], "log_likelihoods": null}',
    "a negative budget": '{"image": "y", "candidates": ["a"], "log_likelihoods": null, "tokens": -1000}',
    "a problem of markup": '{"image": "y", "candidates": ["a"], "log_likelihoods": null, "problem": "<b>"}',
}


@pytest.mark.parametrize("line", WRONG_LINES.values(), ids=WRONG_LINES)
def test_a_file_with_other_contents_is_named(tmp_path, line):
    (tmp_path / "f").mkdir()
    (tmp_path / "f/w.jsonl").write_text(f'{{"image": "x", "candidates": ["a"], "log_likelihoods": null}}\n{line}\n')
    with pytest.raises(InputError, match=r"w.jsonl, line 2: expected a row of captions. Delete the file"):
        CaptionStore(tmp_path, "f", "other")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("own.jsonl", lambda path, file: path.symlink_to(file)),
        ("turn", lambda path, file: path.symlink_to(file)),
        ("other.jsonl", lambda path, _: os.mkfifo(path)),
    ],
)
def test_links_and_pipes_are_not_opened(tmp_path, name, make):
    """A link instead of a store's file must not change a file elsewhere, and a pipe must not block."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("a line without an end")
    (tmp_path / "f").mkdir()
    make(tmp_path / "f" / name, elsewhere)
    with pytest.raises(InputError, match=rf"{name} is (a link|not a regular file)"):
        CaptionStore(tmp_path, "f", "own", alone=True)
    assert elsewhere.read_text() == "a line without an end"


def recaption_images(images: list[str], clip: str, mgm: dict, folder: Path, **arguments) -> tuple[list[dict], dict]:
    texts = [build_dj_text(f"x{number}") for number in range(len(images))]
    rows = {"text": texts, "images": [[path] for path in images]}
    return recaption(rows, hf_clip=clip, captioner=mgm, captions_folder=str(folder), **arguments)


def test_another_threshold_or_recipe_needs_no_new_captions(mgm, images, tmp_path):
    clip = str(save_tiny_clip(tmp_path / "clip"))
    _, half = recaption_images(images, clip, mgm, tmp_path / "captions", keep_fraction=0.5)
    assert (half["captioned"], half["cached"]) == (half["below"], 0)
    rows, every = recaption_images(images, clip, mgm, tmp_path / "captions", min_similarity=10.0, writer="other")
    assert (every["captioned"], every["cached"]) == (COUNT - half["below"], half["below"])
    fresh, _ = recaption_images(images, clip, mgm, tmp_path / "fresh", min_similarity=10.0)
    assert [row["text"] for row in rows] == [row["text"] for row in fresh]
    again, report = recaption_images(images, clip, mgm, tmp_path / "captions", min_similarity=10.0)
    assert again == rows and report["captioned"] == 0


def test_one_image_in_two_files_is_captioned_once(mgm, images, tmp_path):
    clip = str(save_tiny_clip(tmp_path / "clip"))
    copy = str(shutil.copy(images[0], tmp_path / "copy.png"))
    recaption_images([images[0], copy], clip, mgm, tmp_path / "captions", min_similarity=10.0)
    [path] = (tmp_path / "captions").rglob("*.jsonl")
    assert len(path.read_text().splitlines()) == 1
