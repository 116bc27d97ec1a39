"""A file replaced by one with an older time stamp (`cp -p`, `rsync -t`) reruns the stage that reads it."""

import json
import os
import shutil
import time

import pytest

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.shapes import describe_scene, draw_image, draw_row_scene
from dj2mgm.storage.files import write_jsonl, write_text
from small_project import copy_project

CONFIG = ("dataset=photos", "recipe=mine")
UNTIL = ("baseline", "--until", "filter_data")


@pytest.fixture(scope="module")
def filtered(tmp_path_factory):
    """Return a project with filtered data of its own; tests restore their changes."""
    project = copy_project(tmp_path_factory.mktemp("older"))
    (project.folder / "photos").mkdir()
    rows = []
    for index in range(12):
        scene = draw_row_scene(3, "own", index)
        draw_image(scene).save(project.folder / f"photos/{index}.bmp")
        rows.append({"id": str(index), "text": build_dj_text(describe_scene(scene)), "images": [f"{index}.bmp"]})
    write_jsonl(project.folder / "photos/rows.jsonl", rows)
    write_text(project.folder / "config/recipes/mine.yaml", "process:\n  - text_length_filter: {min_len: 1}\n")
    project.run(*UNTIL, config=CONFIG)
    return project


def replace_by_older(file, content: bytes):
    """Write a file that was last changed an hour ago, like `cp -p`."""
    older_file = file.with_name(f"{file.name}.new")
    older_file.write_bytes(content)
    hour_ago = time.time() - 3600
    os.utime(older_file, (hour_ago, hour_ago))
    shutil.copy2(older_file, file)
    older_file.unlink()


def find_rerun_rules(project) -> set[str]:
    printed = project.run(*UNTIL, "--dry-run", config=CONFIG)
    return {rule for rule in ("make_dataset", "filter_data") if f"rule {rule}:" in printed}


def test_an_older_replacement_of_a_file_is_noticed(filtered):
    (filtered.folder / "photos/other.bmp").touch()
    assert find_rerun_rules(filtered) == set(), "an unused image"
    for name, rules in (
        ("photos/rows.jsonl", {"make_dataset", "filter_data"}),
        ("photos/3.bmp", {"make_dataset", "filter_data"}),
        ("config/recipes/mine.yaml", {"filter_data"}),
    ):
        file = filtered.folder / name
        backup = file.with_name(f"{file.name}.kept")
        shutil.move(file, backup)
        content = backup.read_bytes()
        replacements = {"rows.jsonl": content.replace(b'"id": "1"', b'"id": "x"'), "3.bmp": content[:-1] + b"\x01"}
        replace_by_older(file, replacements.get(file.name, content + b"  - text_length_filter: {max_len: 500}\n"))
        try:
            assert file.stat().st_mtime < backup.stat().st_mtime and find_rerun_rules(filtered) == rules, name
        finally:
            shutil.move(backup, file)
    assert find_rerun_rules(filtered) == set(), "as it was"


def test_an_older_model_folder_is_noticed(filtered):
    targets = ("results/foundation/small/clip/model.safetensors", "results/foundation/small/language_model/config.json")
    filtered.run(*targets)
    zoo = filtered.folder / "model_zoo"
    shutil.copytree(filtered.folder / "results/foundation/small", zoo)
    parts = {"language_model": "language_model", "vision_tower": "clip", "vision_tower_aux": "convnext"}
    small = (filtered.folder / "config/models/small.yaml").read_text(encoding="utf-8").split("foundation:")[0]
    lines = [line for line in small.splitlines() if line.partition(":")[0] not in (*parts, "clip")]
    model_folders = {key: f"model_zoo/{name}" for key, name in (parts | {"clip": "clip"}).items()}
    write_text(filtered.folder / "config/models/parts.yaml", "\n".join([*lines, ""]))
    with open(filtered.folder / "config/models/parts.yaml", "a", encoding="utf-8") as file:
        file.writelines(f"{key}: {json.dumps(value)}\n" for key, value in model_folders.items())
    target, config = "results/models/parts/mgm/config.json", (*CONFIG, "model=parts")
    filtered.run(target, config=config)
    assert "Nothing to be done" in filtered.run(target, "--dry-run", config=config)
    weights = zoo / "clip/model.safetensors"
    content = weights.read_bytes()
    replace_by_older(weights, content[:-1] + bytes([content[-1] ^ 1]))
    assert "rule assemble_model:" in filtered.run(target, "--dry-run", config=config)
