"""Search for evaluation images in the training data."""

import json
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw

import find_leaks
from dj2mgm.data.formats import build_conversation, build_dj_text
from dj2mgm.data.near_duplicates import SIGNATURE_BYTES, compute_distances, compute_signature
from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import read_leaked_ids
from dj2mgm.evaluation.leak_search import (
    Reference,
    References,
    collect_folder_images,
    collect_held_out_images,
    count_leaks,
    read_references,
)
from dj2mgm.storage.files import read_json, read_jsonl, write_json_list, write_jsonl, write_yaml
from run_main import run_main


def draw_image(number: int, side: int = 96) -> Image.Image:
    grid = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(grid).resize((side, side), Image.Resampling.BICUBIC)


@pytest.fixture
def leak_folder(tmp_path, capsys):
    """Run the script on twelve training images, some of which are evaluation images."""
    images, others = tmp_path / "images", tmp_path / "others"
    images.mkdir()
    others.mkdir()
    for number in range(12):
        draw_image(number).save(images / f"{number}.png")
    (images / "broken.png").write_text("nothing")
    draw_image(0).save(images / "held.jpg", quality=60)
    draw_image(1, 200).save(others / "scaled.webp")
    draw_image(50).save(others / "new.png")
    draw_image(51).save(images / "apart.png")
    names = [*(f"{number}.png" for number in range(6)), "broken.png", "1.png"]
    pairs = ({"id": str(at), "text": build_dj_text("a"), "images": [name]} for at, name in enumerate(names))
    write_jsonl(tmp_path / "data/pretrain.jsonl", pairs)
    instructions = [build_conversation(str(number), f"{number}.png", "q", "a") for number in range(6, 12)]
    write_json_list(tmp_path / "data/finetune.json", [*instructions, build_conversation("x", "0.png", "q", "a")])
    questions = [{"type": "color", "question": f"What color is it, {at}?", "answer": "red"} for at in range(3)]
    rows = [
        {"id": f"e{at}", "image": image, "captions": ["a"], "questions": questions}
        for at, image in enumerate(("held.jpg", "apart.png"))
    ]
    write_jsonl(tmp_path / "data/evaluation.jsonl", rows)
    settings = dict.fromkeys(("pretrain_images", "finetune_images", "evaluation_images"), str(images))
    settings |= {"benchmarks": {}, "folders": [str(others)], "cpu_threads": 2}
    write_yaml(tmp_path / "config.yaml", settings)
    flags = ["--config", "config.yaml", "--dataset", "data", "--output-dir", "leaks"]
    flags = [flag if flag.startswith("--") else str(tmp_path / flag) for flag in flags]
    done = run_main(find_leaks, *flags, capture=capsys)
    assert done.status == 0, done.stderr
    return tmp_path / "leaks"


def test_copies_in_other_formats_and_sizes_are_found(leak_folder):
    leaks = list(read_jsonl(leak_folder / "leaks.jsonl"))
    folder = str(leak_folder.parent / "others")
    assert [(leak["split"], leak["image"], leak["of"], leak["ids"]) for leak in leaks] == [
        ("pretrain", "0.png", "held_out", ["e0"]),
        ("pretrain", "1.png", folder, ["scaled.webp"]),
        ("finetune", "0.png", "held_out", ["e0"]),
    ]
    summary = read_json(leak_folder / "summary.json")
    counts = {"references": 2, "leaked": 1, "training_images": 1, "training_rows": 2}  # two pairs have 1.png
    assert summary["held_out"] == counts | {"questions": 3}
    assert summary[folder] == counts | {"questions": 0}
    assert (
        read_leaked_ids(leak_folder / "leaks.jsonl", "held_out") == {"e0"}
        and read_leaked_ids(None, "held_out") == set()
    )


def test_an_image_under_two_names_is_held_out_once(tmp_path):
    for name in ("a.png", "copy.png", "b.png"):
        draw_image(name == "b.png").save(tmp_path / name)
    names = ("a.png", "b.png", "copy.png", "./a.png")
    rows = [{"id": str(at), "image": name, "questions": [{}] * at} for at, name in enumerate(names)]
    images = {Reference("held_out", ("0", "2", "3"), 5): tmp_path / "a.png"}
    assert collect_held_out_images(rows, tmp_path) == images | {Reference("held_out", ("1",), 1): tmp_path / "b.png"}


def test_a_row_counts_once_per_leaked_reference_set():
    images = [Reference("a", ("1", "2"), 2), Reference("a", ("3",), 1), Reference("b", ("4",), 1)]
    references = References(images, np.zeros((3, SIGNATURE_BYTES), dtype=np.uint8))
    leaks = [
        {"split": "finetune", "image": image, "path": f"/{image}", "of": origin, "ids": list(ids)}
        for image, origin, ids in (("x", "a", ("1", "2")), ("y", "a", ("1", "2")), ("y", "b", ("4",)))
    ]
    rows = [("pretrain", ["x"]), ("finetune", ["x", "y"]), ("finetune", ["y"]), ("finetune", ["z"]), ("finetune", [])]
    assert count_leaks(references, leaks, rows) == {
        "a": {"references": 2, "leaked": 1, "questions": 2, "training_images": 2, "training_rows": 2},
        "b": {"references": 1, "leaked": 1, "questions": 1, "training_images": 1, "training_rows": 2},
    }


def test_all_references_of_a_near_duplicate_are_named():
    draws = np.random.default_rng(0)
    signatures = draws.integers(0, 256, (200, SIGNATURE_BYTES), dtype=np.uint8)
    references = References([Reference("a", (str(number),)) for number in range(200)], signatures)
    signatures[4] = signatures[3]
    for number in (3, 77):
        near = signatures[number].copy()
        near[:2] ^= 5
        matches = references.find_copied(np.array([near]))[0]
        assert [reference.ids for reference, _ in matches] == [("3",), ("4",)] if number == 3 else [("77",)]
        assert matches[0][1] == compute_distances(signatures[number : number + 1], near[None], 23, 12)[0] == 4
    assert references.find_copied(np.array([draws.integers(0, 256, SIGNATURE_BYTES, dtype=np.uint8)]))[0] == []
    assert References([], signatures[:0]).find_copied(np.array([signatures[0]]))[0] == []


@pytest.mark.parametrize("lines", [0, 1, 5, 20])
def test_pages_of_text_match_only_the_same_pixels(lines):
    draw, pages = random.Random(0), []
    for number in range(6):
        page = Image.new("RGB", (1000, 1400), (255, 255, 255 - number))
        for line in range(lines):
            words = " ".join("".join(draw.choices("abcdefghij", k=6)) for _ in range(8))
            ImageDraw.Draw(page).text((60, 60 + 30 * line), words, fill=(20, 20, 20), font_size=22)
        pages.append(compute_signature(page))
    references = References([Reference("a", ("0",))], np.array(pages[:1]))
    matches = references.find_copied(np.array(pages))
    assert matches == [[(Reference("a", ("0",)), 0)], [], [], [], [], []]
    photo = compute_signature(draw_image(1))
    assert References([Reference("a", ("0",))], photo[None]).find_copied(np.array([photo]))[0] == [
        (Reference("a", ("0",)), 0)
    ]


def test_files_left_out_of_the_comparison_are_counted(tmp_path, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("a.PNG", "b", "c.heic"):
        (photos / name).write_text("")
    assert [reference.ids for reference in collect_folder_images(photos)] == [("a.PNG",)]
    assert "2 files are not compared" in capsys.readouterr().err


def test_unreadable_references_are_named(tmp_path):
    with pytest.raises(InputError, match="contains no image; correct the path"):
        collect_folder_images(tmp_path)
    (tmp_path / "bad.png").write_text(json.dumps("no image"))
    with pytest.raises(InputError, match="the image of bad.png cannot be read"):
        read_references(collect_folder_images(tmp_path), processes=1)
