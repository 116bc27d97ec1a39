"""Users' data, in particular the unchanged folders of the Better Synth challenge."""

import json
import shutil
from pathlib import Path

import pytest

from better_synth_kit import QUESTION, save_kit
from dj2mgm.data.formats import build_conversation, build_dj_text
from dj2mgm.data.images import HeldOutImages, UnreadableImages
from dj2mgm.data.user_dataset import select_held_out, write_user_dataset
from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset
from dj2mgm.errors import InputError
from dj2mgm.settings.dataset_files import FilesDataset
from dj2mgm.storage.files import compute_sha256, read_json, read_jsonl, write_jsonl
from paths import PROJECT
from tiny_models import save_image


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """Write the kit and a copy of config/ to a folder, and make it the current folder."""
    shutil.copytree(PROJECT / "config", tmp_path / "config")
    monkeypatch.chdir(tmp_path)
    save_kit(tmp_path / "better_synth")
    return tmp_path / "better_synth"


def test_challenge_folders_become_files_of_the_workflow(kit, tmp_path):
    dataset = resolve_dataset("better_synth")
    summary = write_user_dataset(dataset.settings, tmp_path / "out")
    left_out = {"left_out": {"pretrain": 2}, "left_out_copies": {}}
    assert summary == {"pretrain": 4, "finetune": 3, "evaluation": 2} | left_out
    pairs = list(read_jsonl(tmp_path / "out/pretrain.jsonl"))
    assert {row["question"] for row in pairs} == {QUESTION}
    assert all((tmp_path / dataset.images["pretrain"] / row["images"][0]).is_file() for row in pairs)
    instructions = read_json(tmp_path / "out/finetune.json", list)
    assert [row["id"] for row in instructions] == ["000000033471", "000000033471~2", "7"]
    assert (tmp_path / dataset.images["finetune"] / instructions[0]["image"]).is_file()


def test_a_pair_with_a_missing_question_is_named(kit, tmp_path):
    path = kit / "input/pretrain_stage_1_10k/stage_1.json"
    path.write_text("[]")
    with pytest.raises(InputError, match=r"stage_1.json has no row with the id '00000000\d' of a pair; add"):
        write_user_dataset(resolve_dataset("better_synth").settings, tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


def write_files(keys: dict, folder: Path) -> dict:
    """Write the dataset that is described by a dataset file with these keys."""
    return write_user_dataset(FilesDataset.model_validate(keys), folder)


def pairs_with_images(folder: Path, rows: int, unreadable: set[int]) -> dict:
    """Write a dataset with a different image in each row, some of them invalid; return its settings."""
    folder.mkdir(exist_ok=True)
    for index in range(rows):
        save_image(folder / f"{index}.png", (200, index, 0), (32, 32))
        if index in unreadable:
            (folder / f"{index}.png").write_bytes(b"no image")
    lines = [{"id": str(i), "text": build_dj_text("a red square"), "images": [f"{i}.png"]} for i in range(rows)]
    write_jsonl(folder / "pairs.jsonl", lines)
    return {"pretrain": {"file": str(folder / "pairs.jsonl"), "images": str(folder)}}


def evaluation_about(folder: Path, *images: str) -> dict:
    """Return the settings of an evaluation file in the folder."""
    rows = [{"id": str(n), "image": image, "captions": ["a square"]} for n, image in enumerate(images)]
    write_jsonl(folder / "evaluation.jsonl", rows)
    return {"file": str(folder / "evaluation.jsonl"), "images": str(folder)}


def instructions_about(folder: Path, *images: str) -> dict:
    write_jsonl(folder / "talks.jsonl", [build_conversation(f"t{n}", i, "What?", "A.") for n, i in enumerate(images)])
    return {"file": str(folder / "talks.jsonl"), "images": str(folder)}


@pytest.mark.parametrize("rows", [7, 40])
def test_a_tenth_of_the_readable_images_is_held_out(tmp_path, rows):
    unreadable = set(range(0, rows, 2))
    settings = pairs_with_images(tmp_path, rows, unreadable)
    counts = write_files(settings, tmp_path / "out")
    rows_of = {name: read_jsonl(tmp_path / f"out/{name}.jsonl") for name in ("pretrain", "evaluation")}
    ids = {name: {int(row["id"]) for row in split_rows} for name, split_rows in rows_of.items()}
    assert (counts.pop("left_out"), counts.pop("left_out_copies")) == ({"pretrain": len(ids["evaluation"])}, {})
    assert counts == {name: len(split_ids) for name, split_ids in ids.items()} | {"finetune": 0}
    assert read_json(tmp_path / "out/finetune.json", list) == []  # stage 2 trains on the remaining captions
    assert len(ids["evaluation"]) == max(2, rows // 10) and not ids["evaluation"] & unreadable
    assert ids["pretrain"] == set(range(rows)) - ids["evaluation"]
    again = write_files(settings, tmp_path / "again")
    assert again["evaluation"] == counts["evaluation"]
    assert (tmp_path / "again/evaluation.jsonl").read_bytes() == (tmp_path / "out/evaluation.jsonl").read_bytes()


def test_few_of_many_images_are_opened_for_holding_out(tmp_path, monkeypatch):
    settings, opened = pairs_with_images(tmp_path, 200, set()), []
    monkeypatch.setattr("dj2mgm.data.user_dataset.MAX_HELD_OUT", 5)
    monkeypatch.setattr("dj2mgm.data.user_dataset.load_image", opened.append)
    assert write_files(settings, tmp_path / "out")["evaluation"] == 5
    assert len(opened) == 6, "one more, in place of an image that cannot be read"


def test_rows_about_held_out_images_are_not_trained_on(tmp_path):
    """Use five captions per image, and instructions with paths relative to another folder."""
    settings = pairs_with_images(tmp_path / "photos", 30, set())
    rows = [row | {"id": f"{row['id']}-{n}"} for row in read_jsonl(tmp_path / "photos/pairs.jsonl") for n in range(5)]
    write_jsonl(tmp_path / "photos/pairs.jsonl", rows)
    talks = [build_conversation(f"t{n}", f"photos/./{n}.png", "What?", "a square") for n in range(30)]
    talks.append({"id": "text", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]})
    write_jsonl(tmp_path / "talks.jsonl", talks)
    settings["finetune"] = {"file": str(tmp_path / "talks.jsonl"), "images": str(tmp_path)}
    counts = write_files(settings, tmp_path / "out")
    left_out = {"left_out": {"pretrain": 15, "finetune": 3}, "left_out_copies": {}}
    assert counts == {"pretrain": 135, "finetune": 28, "evaluation": 3} | left_out
    evaluation = list(read_jsonl(tmp_path / "out/evaluation.jsonl"))
    held_out = {row["image"] for row in evaluation}
    assert len(held_out) == 3 and all(len(row["captions"]) == 5 for row in evaluation)
    assert all((row["objects"], row["questions"]) == ([], []) for row in evaluation), "later stages read both"
    assert not held_out & {row["images"][0] for row in read_jsonl(tmp_path / "out/pretrain.jsonl")}
    instructions = read_json(tmp_path / "out/finetune.json", list)
    trained = {row["image"].rpartition("/")[2] for row in instructions if "image" in row}
    assert not held_out & trained


def test_first_captions_of_held_out_image_are_references(tmp_path, monkeypatch):
    monkeypatch.setattr("dj2mgm.data.user_dataset.MAX_REFERENCES", 2)
    settings = pairs_with_images(tmp_path, 3, set())
    pairs = list(read_jsonl(tmp_path / "pairs.jsonl"))
    rows = [row | {"id": f"{row['id']}-{n}", "text": build_dj_text(f"caption {n}")} for row in pairs for n in range(4)]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    write_files(settings, tmp_path / "out")
    captions = [row["captions"] for row in read_jsonl(tmp_path / "out/evaluation.jsonl")]
    assert captions == [["caption 0", "caption 1"]] * 2


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (["0.png", "none.png"], "line 2: missing"),
        (["0.png", "1.png"], "line 2: undecodable"),
        (["0.png"], "has 1 different images"),
        (["0.png", "./0.png", "copy.png"], "has 1 different images"),
    ],
)
def test_an_evaluation_without_scores_is_refused_early(tmp_path, images, says):
    settings = pairs_with_images(tmp_path, 4, {1})
    shutil.copy(tmp_path / "0.png", tmp_path / "copy.png")
    settings["evaluation"] = evaluation_about(tmp_path, *images)
    with pytest.raises(InputError, match=f"evaluation.jsonl.*{says}"):
        write_files(settings, tmp_path / "out")


def read_image_names(file: Path) -> list[str]:
    return [row["image"] if "image" in row else row["images"][0] for row in map(json.loads, file.open())]


def test_training_excludes_evaluation_images_by_any_path(tmp_path):
    """Another spelling, a symbolic or hard link, and a copy are the same image."""
    settings = pairs_with_images(tmp_path, 8, set())
    (tmp_path / "link.png").symlink_to("0.png")
    (tmp_path / "hard.png").hardlink_to(tmp_path / "1.png")
    shutil.copy(tmp_path / "2.png", tmp_path / "copy.png")
    settings["evaluation"] = evaluation_about(tmp_path, "0.png", "1.png", "2.png", "elsewhere.png")
    save_image(tmp_path / "elsewhere.png", (9, 9, 9))
    talked_about = ("./0.png", "link.png", "hard.png", "copy.png", "3.png", "missing.png", "4.png")
    settings["finetune"] = instructions_about(tmp_path, *talked_about)
    counts = write_files(settings, tmp_path / "out")
    assert counts["left_out"] == {"pretrain": 3, "finetune": 4}
    assert counts["left_out_copies"] == {"finetune": 2}
    assert read_image_names(tmp_path / "out/pretrain.jsonl") == [f"{n}.png" for n in range(3, 8)]
    assert [row["image"] for row in read_json(tmp_path / "out/finetune.json", list)] == [
        "3.png",
        "missing.png",
        "4.png",
    ]
    assert (tmp_path / "out/evaluation.jsonl").read_bytes().count(b"\n") == counts["evaluation"] == 4


def test_copy_of_selected_held_out_image_is_not_trained_on(tmp_path):
    settings = pairs_with_images(tmp_path, 30, set())
    for number in range(15):
        shutil.copy(tmp_path / f"{number}.png", tmp_path / f"{number + 15}.png")
    counts = write_files(settings, tmp_path / "out")
    trained, held_out = (
        {int(image.removesuffix(".png")) % 15 for image in read_image_names(tmp_path / f"out/{name}.jsonl")}
        for name in ("pretrain", "evaluation")
    )
    assert len(held_out) == counts["evaluation"] == 3 and not trained & held_out
    assert counts["left_out"] == {"pretrain": 6} and counts["left_out_copies"] == {"pretrain": 3}


def test_an_image_with_other_bytes_is_another_image(tmp_path):
    settings = pairs_with_images(tmp_path, 4, set())
    settings["evaluation"] = evaluation_about(tmp_path, "a.bmp", "b.bmp")
    save_image(tmp_path / "a.bmp", (200, 0, 0), (32, 32))  # the pixels of 0.png
    save_image(tmp_path / "b.bmp", (1, 2, 3), (32, 32))
    assert write_files(settings, tmp_path / "out")["left_out"] == {}


def test_only_files_with_the_size_of_a_held_out_one_are_read(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(10 + number // 2))
    held_out = HeldOutImages([{"id": "0", "image": "0.png"}], tmp_path)
    read = []
    monkeypatch.setattr(
        "dj2mgm.data.images.compute_image_digest", lambda path: read.append(path) or compute_sha256(path)
    )
    assert [held_out.match(path) for path in paths] == ["file", "copy", None, None, None]
    assert read == [paths[1]]


def test_a_split_about_held_out_images_only_is_refused(tmp_path):
    settings = pairs_with_images(tmp_path, 4, set())
    settings["evaluation"] = evaluation_about(tmp_path, "0.png", "1.png")
    settings["finetune"] = instructions_about(tmp_path, "0.png", "1.png")
    with pytest.raises(InputError, match="talks.jsonl: all its images are held out"):
        write_files(settings, tmp_path / "out")
    with pytest.raises(InputError, match="pairs.jsonl: all its images are held out.*add images"):
        write_files(pairs_with_images(tmp_path / "two", 2, set()), tmp_path / "out")


@pytest.mark.parametrize(("name", "content"), [("talks.json", "[]"), ("talks.jsonl", "")])
def test_empty_instructions_are_refused_before_writing(tmp_path, name, content):
    settings = pairs_with_images(tmp_path, 4, set())
    (tmp_path / name).write_text(content)
    settings["finetune"] = {"file": str(tmp_path / name), "images": str(tmp_path)}
    with pytest.raises(InputError, match=f"{name} has no rows; add some, or leave the file out"):
        write_files(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_different_spellings_of_a_path_are_one_image(tmp_path):
    settings = pairs_with_images(tmp_path, 5, set())
    rows = list(read_jsonl(tmp_path / "pairs.jsonl"))
    spelled = [
        row | {"id": f"{row['id']}-{s}", "images": [s + row["images"][0]]} for row in rows for s in ("./", ".//")
    ]
    write_jsonl(tmp_path / "pairs.jsonl", rows + spelled)
    counts = write_files(settings, tmp_path / "out")
    assert counts["evaluation"] == 2 and counts["pretrain"] == 9 and counts["left_out"] == {"pretrain": 6}
    assert counts["left_out_copies"] == {}
    assert [len(row["captions"]) for row in read_jsonl(tmp_path / "out/evaluation.jsonl")] == [3, 3]


@pytest.mark.parametrize("token", ["<image>", "<|im_end|>"])
def test_a_control_token_does_not_stop_the_dataset_stage(tmp_path, token):
    """`write_jsonl` refuses or drops such rows, depending on the experiment."""
    settings = pairs_with_images(tmp_path, 5, set())
    rows = [row | {"text": build_dj_text(f"a {token} square")} for row in read_jsonl(tmp_path / "pairs.jsonl")]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    talks = [
        build_conversation("t", "0.png", f"What {token}?", "A."),
        build_conversation("u", "0.png", "What?", f"A {token}."),
    ]
    write_jsonl(tmp_path / "talks.jsonl", [row | {"id": f"{row['id']}{n}"} for row in talks for n in range(2)])
    settings["finetune"] = {"file": str(tmp_path / "talks.jsonl"), "images": str(tmp_path)}
    counts = write_files(settings, tmp_path / "out")
    assert counts["pretrain"] == 3 and counts["finetune"] + counts["left_out"].get("finetune", 0) == 4


def test_missing_images_are_counted_and_the_first_is_named(tmp_path):
    settings = pairs_with_images(tmp_path, 12, set())
    for image in tmp_path.rglob("*.png"):
        image.unlink()
    (tmp_path / "0.png").write_bytes(b"x")
    message = (
        r"only 0 of 12 images can be read \(11 missing, 1 undecodable; the first is (.*)\), and .*; correct the paths, "
        r".*config/datasets/, whose lines a dry run \(-n\) prints"
    )
    with pytest.raises(InputError, match=message) as error:
        write_files(settings, tmp_path / "out")
    assert str(tmp_path) in str(error.value)


def test_heif_under_another_name_is_to_be_converted(tmp_path):
    settings = pairs_with_images(tmp_path, 12, set())
    for image in tmp_path.rglob("*.png"):
        image.write_bytes(b"\0\0\0\x18ftypheic")
    with pytest.raises(InputError, match=r"only 0 of 12 images can be read .*; convert the photos to JPEG"):
        write_files(settings, tmp_path / "out")


def test_a_caption_with_a_control_character_is_no_reference(tmp_path):
    for number in range(4):
        save_image(tmp_path / f"{number}.png", (number, 0, 0))
    captions = ["a b", "a\0 \0b", "\x1b[31m", "two\nlines"]
    rows = [
        {"id": str(number), "text": build_dj_text(caption), "images": [f"{number}.png"]}
        for number, caption in enumerate(captions)
    ]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    chosen = select_held_out(str(tmp_path / "pairs.jsonl"), str(tmp_path), 4, UnreadableImages())
    assert sorted(row["captions"][0] for row in chosen) == ["a b", "two\nlines"]
