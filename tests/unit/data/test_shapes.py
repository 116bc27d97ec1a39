"""Properties of the embedded dataset, checked by its written files only."""

import hashlib
import io
import random
import re
from collections import Counter
from functools import cache

import pytest
from PIL import Image

from dj2mgm.data.formats import extract_caption, read_evaluation, read_llava, read_pairs
from dj2mgm.data.images import BadImageError, load_image, locate_image
from dj2mgm.data.shapes import (
    COLORS,
    IMAGE_SIZE,
    POSITIONS,
    QUESTION_TYPES,
    SHAPES,
    assign_faults,
    count_faults,
    describe_scene,
    draw_mismatched_caption,
    draw_scene,
    write_shapes,
)
from dj2mgm.errors import InputError
from dj2mgm.storage.files import read_jsonl
from drawn_datasets import draw_dataset

RATES = {
    "mismatched": 0.4,
    "junk_text": 0.05,
    "short_text": 0.05,
    "duplicate": 0.05,
    "tiny_image": 0.05,
    "extreme_aspect": 0.05,
    "truncated_image": 0.05,
    "not_an_image": 0.05,
}
SPEC = draw_dataset(5, 200, 60, 20, **RATES)
PART = re.compile(rf"an? ({'|'.join(COLORS)}) ({'|'.join(SHAPES)}) at the ({'|'.join(POSITIONS)})")


def objects_in(caption: str) -> list[tuple[str, str, str]]:
    """Return (color, shape, position) of each object in a caption."""
    return PART.findall(caption)


def read_colors(image: Image.Image) -> dict[str, str]:
    """Return the color of each quadrant with an object, read from the pixels."""
    half, colors = IMAGE_SIZE // 2, {}
    for index, position in enumerate(POSITIONS):
        row, column = divmod(index, 2)
        quadrant = image.crop((column * half, row * half, (column + 1) * half, (row + 1) * half))
        counts = {rgb: count for count, rgb in quadrant.getcolors(half * half)}
        color = max(COLORS, key=lambda name: counts.get(COLORS[name], 0))
        if counts.get(COLORS[color], 0) > 200:
            colors[position] = color
    return colors


def tree_hash(folder) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(SPEC, folder)
    return folder


@pytest.fixture(scope="module")
def pairs(shapes):
    """Return (row, ground truth, bytes of the image's file) of each pretraining pair, in order."""
    rows = list(read_pairs(shapes / "pretrain.jsonl"))
    truths = list(read_jsonl(shapes / "ground_truth.jsonl"))
    return [(row, truth, (shapes / row["images"][0]).read_bytes()) for row, truth in zip(rows, truths, strict=True)]


def select_faults(pairs, *faults: str) -> list[tuple[dict, dict, bytes]]:
    return [pair for pair in pairs if pair[1]["fault"] in faults]


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def test_dataset_bytes_depend_on_the_seed_only(shapes, tmp_path):
    write_shapes(SPEC, tmp_path / "again")
    assert tree_hash(tmp_path / "again") == tree_hash(shapes)
    write_shapes(draw_dataset(6, 20, 3, 2), tmp_path / "other")
    write_shapes(draw_dataset(5, 20, 3, 2), tmp_path / "same seed")
    assert tree_hash(tmp_path / "other") != tree_hash(tmp_path / "same seed")


def test_a_larger_dataset_begins_with_the_same_clean_pairs(shapes, tmp_path):
    """Each row has its own generator, so it does not depend on the number of rows."""
    write_shapes(draw_dataset(5, 10, 6, 2), tmp_path)
    assert (tmp_path / "evaluation.jsonl").read_bytes() in (shapes / "evaluation.jsonl").read_bytes()
    for name in ("images/evaluation/e000001.png", "images/finetune/f000001.png"):
        assert (tmp_path / name).read_bytes() == (shapes / name).read_bytes()


def test_every_fault_occurs_exactly_at_its_rate(shapes, pairs):
    """Files have the requested numbers of rows."""
    assert [row["id"] for row, _, _ in pairs] == [truth["id"] for _, truth, _ in pairs]
    assert len(pairs) == SPEC.pretrain_pairs
    assert len(list(read_llava(shapes / "finetune.json"))) == SPEC.finetune_instructions
    assert len(list(read_evaluation(shapes / "evaluation.jsonl"))) == SPEC.evaluation_images
    assert len(list((shapes / "images").rglob("*.png"))) == SPEC.pretrain_pairs + 60 // 3 + SPEC.evaluation_images
    counts = Counter(truth["fault"] for _, truth, _ in pairs)
    expected = {fault: round(rate * SPEC.pretrain_pairs) for fault, rate in RATES.items()}
    assert counts == expected | {"clean": SPEC.pretrain_pairs - sum(expected.values())}
    assert count_faults(assign_faults(SPEC)) == dict(counts)


def test_faults_are_spread_over_the_whole_dataset(pairs):
    thirds = [Counter(truth["fault"] == "clean" for _, truth, _ in pairs[start::3])[True] for start in range(3)]
    halves = [sum(truth["fault"] == "clean" for _, truth, _ in part) for part in (pairs[:100], pairs[100:])]
    assert min(thirds) > 8 and min(halves) > 12


def test_ground_truth_describes_every_image(pairs):
    for _, truth, data in select_faults(pairs, "clean", "mismatched", "junk_text", "short_text", "duplicate"):
        described = {position: color for color, _, position in objects_in(truth["caption"])}
        assert described == read_colors(opened(data)), truth


def test_captions_are_true_unless_the_fault_changes_them(pairs):
    for row, truth, _ in pairs:
        is_true = extract_caption(row["text"]) == truth["caption"]
        assert is_true == (truth["fault"] not in ("mismatched", "junk_text", "short_text")), truth


def test_mismatched_captions_contain_a_false_object():
    for seed in range(1500):
        rng = random.Random(seed)
        scene = draw_scene(rng)
        assert not set(objects_in(draw_mismatched_caption(scene, rng))) <= set(objects_in(describe_scene(scene)))


def test_a_duplicate_has_the_bytes_of_an_earlier_clean_pair(pairs):
    earlier = set()
    for row, truth, data in pairs:
        if truth["fault"] == "duplicate":
            assert (row["text"], data) in earlier
        if truth["fault"] == "clean":
            earlier.add((row["text"], data))


def test_faulty_images_and_captions_have_their_documented_forms(shapes, pairs):
    for row, truth, data in pairs:
        fault, caption = truth["fault"], extract_caption(row["text"])
        if fault in ("junk_text", "short_text"):
            assert not objects_in(caption) and len(caption) <= (8 if fault == "short_text" else 1000)
        path = locate_image(shapes, row["images"][0])
        if fault in ("truncated_image", "not_an_image"):
            with pytest.raises(BadImageError):
                load_image(path)
            assert data.startswith(b"\x89PNG" if fault == "truncated_image" else b"<html>")
            continue
        width, height = load_image(path).size
        if fault == "tiny_image":
            assert 6 <= width == height <= 24
        elif fault == "extreme_aspect":
            assert 5.5 < max(width, height) / min(width, height) < 12.5  # widths are integers
        else:
            assert (width, height) == (IMAGE_SIZE, IMAGE_SIZE)


def right_answers(question: str, objects: list[tuple[str, str, str]]) -> set[str]:
    """Return every right answer for these objects by trying each object, independently of the dataset's code."""
    if question == "How many objects are there?":
        return {["zero", "one", "two", "three"][len(objects)]}
    if match := re.fullmatch(r"What color is the (\w+)\?", question):
        return {color for color, shape, _ in objects if shape == match[1]}
    if match := re.fullmatch(r"What shape is the (\w+) object\?", question):
        return {shape for color, shape, _ in objects if color == match[1]}
    if match := re.fullmatch(r"Where is the (\w+) (\w+)\?", question):
        return {position for color, shape, position in objects if (color, shape) == match.groups()}
    match = re.fullmatch(r"Is there an? (\w+) (\w+)\?", question)
    return {"yes" if any((color, shape) == match.groups() for color, shape, _ in objects) else "no"}


def test_every_held_out_question_has_one_correct_answer(shapes):
    for row in read_evaluation(shapes / "evaluation.jsonl"):
        objects = [(item["color"], item["shape"], item["position"]) for item in row["objects"]]
        assert objects_in(row["captions"][0]) == objects
        assert {position: color for color, _, position in objects} == read_colors(load_image(shapes / row["image"]))
        assert [question["type"] for question in row["questions"]] == list(QUESTION_TYPES)
        for question in row["questions"]:
            assert right_answers(question["question"], objects) == {question["answer"]}


def test_every_instruction_has_the_correct_answer(shapes):
    kinds = Counter()
    for row in read_llava(shapes / "finetune.json"):
        question = row["conversations"][0]["value"].removeprefix("<image>\n")
        answer = row["conversations"][1]["value"]
        quadrants = read_colors(load_image(shapes / row["image"]))
        kinds[question.split()[0], question.split()[1]] += 1
        if "many" in question:
            assert answer == ["zero", "one", "two", "three"][len(quadrants)]
        elif "color" in question:
            assert answer in quadrants.values()
        elif match := re.match(r"Where is the (\w+)", question):
            assert quadrants[answer] == match[1]
        elif match := re.match(r"What shape is the (\w+)", question):
            assert match[1] in quadrants.values()
        elif answer == "yes":
            assert re.match(r"Is there an? (\w+)", question)[1] in quadrants.values()
    assert sorted(kinds.values()) == [12] * 5  # equally many of the five types


def test_wrong_instructions_occur_at_their_rate(shapes, tmp_path):
    """Compare with the same dataset without wrong answers, which the test above checks."""
    write_shapes(SPEC.model_copy(update={"wrong_instructions": 0.2}), tmp_path)
    planted, clean = (
        {row["id"]: [turn["value"] for turn in row["conversations"]] for row in read_llava(folder / "finetune.json")}
        for folder in (tmp_path, shapes)
    )
    true_answers = {row["id"]: row for row in read_jsonl(tmp_path / "true_answers.jsonl")}
    assert planted.keys() == clean.keys() == true_answers.keys()
    wrong = [name for name in planted if planted[name] != clean[name]]
    assert len(wrong) == 12 and wrong == [name for name, truth in true_answers.items() if truth["fault"] == "wrong"]
    answers = {*COLORS, *SHAPES, *POSITIONS, "one", "two", "three", "yes", "no"}
    for name, truth in true_answers.items():
        assert planted[name][0] == clean[name][0] and planted[name][1] in answers
        assert truth["answer"] == clean[name][1]
    assert (tmp_path / "pretrain.jsonl").read_bytes() == (shapes / "pretrain.jsonl").read_bytes()


@cache
def many_scenes() -> list:
    return [draw_scene(random.Random(seed)) for seed in range(2000)]


def test_scenes_separate_objects_and_use_all_attributes():
    for scene in many_scenes():
        for values in zip(*((o.color, o.shape, o.position) for o in scene.objects), strict=True):
            assert len(set(values)) == len(scene.objects)
    names = [item for scene in many_scenes() for item in scene.objects]
    assert {(item.color, item.shape) for item in names} == {(c, s) for c in COLORS for s in SHAPES}
    shares = [sum(len(scene.objects) == n for scene in many_scenes()) / 2000 for n in (1, 2, 3)]
    assert shares == pytest.approx([0.45, 0.4, 0.15], abs=0.04)


def test_a_caption_lists_all_objects_in_reading_order():
    for scene in many_scenes():
        objects = [(item.color, item.shape, item.position) for item in scene.objects]
        assert objects_in(describe_scene(scene)) == objects
        assert objects == sorted(objects, key=lambda item: POSITIONS.index(item[2]))
        assert "a orange" not in describe_scene(scene)


def test_nearly_all_rows_may_be_faulty(tmp_path):
    write_shapes(draw_dataset(0, 10, 1, 2, duplicate=0.9), tmp_path)
    assert len({(tmp_path / row["images"][0]).read_bytes() for row in read_pairs(tmp_path / "pretrain.jsonl")}) == 1


@pytest.mark.parametrize("rates", [{"mismatched": 0.7, "duplicate": 0.4}, {"duplicate": 1.0}])
def test_impossible_fault_rates_are_refused(rates):
    with pytest.raises(InputError, match="at least one pair must be clean"):
        assign_faults(draw_dataset(0, 10, 1, 2, **rates))
