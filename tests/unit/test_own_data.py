"""Someone's own data, in particular the Better Synth challenge's folders as they come."""

import io
import shutil
from pathlib import Path

import pytest
from better_synth_kit import QUESTION, save_kit
from PIL import Image
from places import PROJECT

from errors import InputError
from files import read_json, read_jsonl, write_jsonl
from formats.dj_jsonl import text_of
from formats.llava import conversation
from formats.own_data import write_own_data
from settings.datasets import resolve_dataset


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """The kit beside a copy of config/, as the current folder."""
    shutil.copytree(PROJECT / "config", tmp_path / "config")
    monkeypatch.chdir(tmp_path)
    save_kit(tmp_path / "better_synth")
    return tmp_path / "better_synth"


def test_the_challenges_folders_become_the_workflows_files(kit, tmp_path):
    dataset = resolve_dataset("better_synth")
    summary = write_own_data(dataset["settings"], tmp_path / "out")
    assert summary == {"pretrain": 4, "finetune": 3, "evaluation": 2, "left_out": {"pretrain": 2}}
    pairs = list(read_jsonl(tmp_path / "out/pretrain.jsonl"))
    assert {row["question"] for row in pairs} == {QUESTION}
    assert all((tmp_path / dataset["images"]["pretrain"] / row["images"][0]).is_file() for row in pairs)
    instructions = read_json(tmp_path / "out/finetune.json")
    assert [row["id"] for row in instructions] == ["000000033471", "000000033471~2", "7"]
    assert (tmp_path / dataset["images"]["finetune"] / instructions[0]["image"]).is_file()


def test_a_pair_whose_question_is_not_there_is_named(kit, tmp_path):
    path = kit / "input/pretrain_stage_1_10k/stage_1.json"
    path.write_text("[]")
    with pytest.raises(InputError, match=r"stage_1.json has no row with the id '00000000\d' of a pair; leave"):
        write_own_data(resolve_dataset("better_synth")["settings"], tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


def pairs_with_images(folder: Path, rows: int, unreadable: set[int]) -> dict:
    """Settings of a dataset whose rows have an image each, some of them no image."""
    folder.mkdir(exist_ok=True)
    good = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(good, "PNG")
    for index in range(rows):
        (folder / f"{index}.png").write_bytes(b"no image" if index in unreadable else good.getvalue())
    lines = [{"id": str(i), "text": text_of("a red square"), "images": [f"{i}.png"]} for i in range(rows)]
    write_jsonl(folder / "pairs.jsonl", lines)
    return {"pretrain": {"file": str(folder / "pairs.jsonl"), "images": str(folder)}}


@pytest.mark.parametrize("rows", [7, 40])
def test_a_tenth_that_can_be_read_is_held_out_and_the_rest_is_trained_on(tmp_path, rows):
    unreadable = set(range(0, rows, 2))
    settings = pairs_with_images(tmp_path, rows, unreadable)
    counts = write_own_data(settings, tmp_path / "out")
    rows_of = {name: read_jsonl(tmp_path / f"out/{name}.jsonl") for name in ("pretrain", "evaluation")}
    rows_of["finetune"] = read_json(tmp_path / "out/finetune.json")
    ids = {name: {int(row["id"]) for row in found} for name, found in rows_of.items()}
    assert counts.pop("left_out") == {"pretrain": len(ids["evaluation"])}
    assert counts == {name: len(found) for name, found in ids.items()}
    assert len(ids["evaluation"]) == max(2, rows // 10) and not ids["evaluation"] & unreadable
    assert ids["pretrain"] == ids["finetune"] == set(range(rows)) - ids["evaluation"]
    again = write_own_data(settings, tmp_path / "again")
    assert again["evaluation"] == counts["evaluation"]
    assert (tmp_path / "again/evaluation.jsonl").read_bytes() == (tmp_path / "out/evaluation.jsonl").read_bytes()


def test_holding_out_opens_few_of_many_images(tmp_path, monkeypatch):
    settings, opened = pairs_with_images(tmp_path, 200, set()), []
    monkeypatch.setattr("formats.own_data.HELD_OUT_MOST", 5)
    monkeypatch.setattr("formats.own_data.load_image", opened.append)
    assert write_own_data(settings, tmp_path / "out")["evaluation"] == 5
    assert len(opened) < 50


def test_nothing_that_is_said_about_a_held_out_image_is_trained_on(tmp_path):
    """Five captions for each image, and instructions whose paths start elsewhere."""
    settings = pairs_with_images(tmp_path / "photos", 30, set())
    rows = [row | {"id": f"{row['id']}-{n}"} for row in read_jsonl(tmp_path / "photos/pairs.jsonl") for n in range(5)]
    write_jsonl(tmp_path / "photos/pairs.jsonl", rows)
    talks = [conversation(f"t{n}", f"photos/./{n}.png", "What?", "a square") for n in range(30)]
    talks.append({"id": "text", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]})
    write_jsonl(tmp_path / "talks.jsonl", talks)
    settings["finetune"] = {"file": str(tmp_path / "talks.jsonl"), "images": str(tmp_path)}
    counts = write_own_data(settings, tmp_path / "out")
    assert counts == {"pretrain": 135, "finetune": 28, "evaluation": 3, "left_out": {"pretrain": 15, "finetune": 3}}
    evaluation = list(read_jsonl(tmp_path / "out/evaluation.jsonl"))
    held_out = {row["image"] for row in evaluation}
    assert len(held_out) == 3 and all(len(row["captions"]) == 5 for row in evaluation)
    assert not held_out & {row["images"][0] for row in read_jsonl(tmp_path / "out/pretrain.jsonl")}
    trained = {row["image"].rpartition("/")[2] for row in read_json(tmp_path / "out/finetune.json") if "image" in row}
    assert not held_out & trained


def test_a_link_to_the_folder_of_images_hides_no_held_out_image(tmp_path):
    settings = pairs_with_images(tmp_path / "photos", 20, set())
    (tmp_path / "link").symlink_to("photos")
    talks = [conversation(f"t{n}", f"{n}.png", "What?", "a square") for n in range(20)]
    write_jsonl(tmp_path / "talks.jsonl", talks)
    settings["finetune"] = {"file": str(tmp_path / "talks.jsonl"), "images": str(tmp_path / "link")}
    assert write_own_data(settings, tmp_path / "out")["left_out"] == {"pretrain": 2, "finetune": 2}


def test_two_images_are_too_few_to_hold_out_and_train(tmp_path):
    with pytest.raises(InputError, match="pairs.jsonl: all its images are held out.*add images"):
        write_own_data(pairs_with_images(tmp_path, 2, set()), tmp_path / "out")


def test_of_many_captions_of_a_held_out_image_the_first_are_references(tmp_path, monkeypatch):
    monkeypatch.setattr("formats.own_data.REFERENCES_MOST", 2)
    settings = pairs_with_images(tmp_path, 3, set())
    pairs = list(read_jsonl(tmp_path / "pairs.jsonl"))
    rows = [row | {"id": f"{row['id']}-{n}", "text": text_of(f"caption {n}")} for row in pairs for n in range(4)]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    write_own_data(settings, tmp_path / "out")
    captions = [row["captions"] for row in read_jsonl(tmp_path / "out/evaluation.jsonl")]
    assert captions == [["caption 0", "caption 1"]] * 2


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (["0.png", "none.png"], "line 2: missing"),
        (["0.png", "1.png"], "line 2: undecodable"),
        (["0.png"], "has 1 rows"),
    ],
)
def test_an_evaluation_that_cannot_be_scored_is_refused_before_anything_is_trained(tmp_path, images, says):
    settings = pairs_with_images(tmp_path, 4, {1})
    rows = [{"id": str(n), "image": image, "captions": ["a square"]} for n, image in enumerate(images)]
    write_jsonl(tmp_path / "evaluation.jsonl", rows)
    settings["evaluation"] = {"file": str(tmp_path / "evaluation.jsonl"), "images": str(tmp_path)}
    with pytest.raises(InputError, match=f"evaluation.jsonl.*{says}"):
        write_own_data(settings, tmp_path / "out")
