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
    assert summary == {"pretrain": 4, "finetune": 3, "evaluation": 2}
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
    assert counts == {name: len(found) for name, found in ids.items()}
    assert len(ids["evaluation"]) == max(2, rows // 10) and not ids["evaluation"] & unreadable
    assert ids["pretrain"] == ids["finetune"] == set(range(rows)) - ids["evaluation"]
    again = write_own_data(settings, tmp_path / "again")
    assert again == counts
    assert (tmp_path / "again/evaluation.jsonl").read_bytes() == (tmp_path / "out/evaluation.jsonl").read_bytes()


def test_holding_out_opens_few_of_many_images(tmp_path, monkeypatch):
    settings, opened = pairs_with_images(tmp_path, 200, set()), []
    monkeypatch.setattr("formats.own_data.HELD_OUT_MOST", 5)
    monkeypatch.setattr("formats.own_data.load_image", opened.append)
    assert write_own_data(settings, tmp_path / "out")["evaluation"] == 5
    assert len(opened) < 50
