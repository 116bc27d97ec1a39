"""Near-deduplicators in a stage: the kept row, the trace, and resuming."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.shapes import draw_image, draw_row_scene
from dj2mgm.errors import InputError
from dj2mgm.features.selection.operators.near_deduplicators import VectorIndex
from dj2mgm.juicer import decisions
from dj2mgm.juicer.patched_data_juicer import load_ops
from dj2mgm.juicer.recipe_settings import RecipeSettings, read_filter_settings
from dj2mgm.juicer.run_recipe import FILTERED, run_recipe
from dj2mgm.recipes.recipe_parsing import parse_steps
from dj2mgm.runs.experiment_recipes import needs_clip
from dj2mgm.storage.files import read_jsonl, write_jsonl, write_yaml
from tiny_clip import save_tiny_clip

NEAR, EMBEDDING = "image_near_deduplicator", "image_embedding_deduplicator"
FILES = (FILTERED, "stats.jsonl", "dropped.jsonl")
SMALL = 4  # rows in a batch and in a partition


@pytest.fixture
def data(tmp_path) -> Path:
    """Write nine scenes, scaled copies of three of them (one larger, two smaller), and a row without an image."""
    folder = tmp_path / "images"
    folder.mkdir()
    scenes = {f"s{number}": draw_image(draw_row_scene(3, "pretrain", number)) for number in range(9)}
    for name, image in scenes.items():
        image.save(folder / f"{name}.png")
    for name, copied, side, kind in (
        ("larger", "s1", 256, "webp"),
        ("smaller", "s1", 90, "jpg"),
        ("small", "s5", 64, "png"),
        ("equal", "s7", 128, "png"),
    ):
        scenes[copied].resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{name}.{kind}")
    names = ["s0.png", "s1.png", "smaller.jpg", "s2.png", "s3.png", "larger.webp", "s4.png", "small.png", "s5.png"]
    names += ["s6.png", "s7.png", "equal.png", "s8.png"]
    rows = [
        {"id": name.split(".")[0], "text": build_dj_text("a scene" + "!" * index), "images": [f"images/{name}"]}
        for index, name in enumerate(names)
    ]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    return tmp_path / "pairs.jsonl"


def make_settings(data: Path, process: list, processes: int = 1) -> RecipeSettings:
    return RecipeSettings(data.parent.resolve(), processes, parse_steps("recipe", process))


def run(data: Path, output: Path, process: list, processes: int = 1) -> dict:
    return run_recipe(make_settings(data, process, processes), data, output, FILTERED).as_dict()


def read_duplicates(output: Path) -> dict[str, str]:
    return {row["id"]: row["copy_of"] for row in read_jsonl(output / "dropped.jsonl")}


@pytest.fixture
def small_partitions(monkeypatch):
    for size in ("PARTITION_ROWS", "ROWS_AT_ONCE"):
        monkeypatch.setattr(f"dj2mgm.juicer.partitions.{size}", SMALL)


def test_the_largest_or_first_near_duplicate_is_kept(data, tmp_path):
    summary = run(data, tmp_path / "out", [{NEAR: None}])
    assert read_duplicates(tmp_path / "out") == {"s1": "larger", "smaller": "larger", "small": "s5", "equal": "s7"}
    rows = {row["id"]: row for row in read_jsonl(tmp_path / "out/dropped.jsonl")}
    assert (rows["equal"]["distance"], rows["equal"]["step"], rows["equal"]["event"]) == (0, 1, "dropped")
    assert 0 <= rows["small"]["distance"] <= 23 and rows["small"]["stats"] == {"image_pixels": 64.0 * 64}
    [step] = summary["operators"]
    assert (step["rows_in"], step["rows_out"], step["dropped"]) == (13, 9, 4)
    assert step["copies"] == {"clusters": {"2": 2, "3": 1}}


def test_the_recipes_preferred_statistic_decides(data, tmp_path):
    process = [{"text_length_filter": {"min_len": 1}}, {NEAR: {"prefer": "text_len"}}]  # later rows have longer strings
    run(data, tmp_path / "out", process)
    assert read_duplicates(tmp_path / "out") == {"s1": "larger", "smaller": "larger", "small": "s5", "s7": "equal"}


def test_an_unmeasured_statistic_is_named(data, tmp_path):
    with pytest.raises(
        InputError, match="'prefer' names the statistic 'text_len', but rows only have image_pixels. Put"
    ):
        run(data, tmp_path / "out", [{NEAR: {"prefer": "text_len"}}])


def test_all_images_of_a_row_are_compared_together(data, tmp_path):
    def row(name: str, *images: str) -> dict:
        return {"id": name, "text": build_dj_text(" ".join(["<__dj__image>"] * len(images))), "images": list(images)}

    samples = [
        row("a", "images/s1.png", "images/s5.png"),
        row("b", "images/larger.webp", "images/small.png"),
        row("c", "images/small.png", "images/larger.webp"),
        row("d", "images/s1.png"),
        row("e"),
        row("f"),
    ]
    [operator] = load_ops([{NEAR: {}}])
    for sample in samples:
        sample["images"] = [str(data.parent / image) for image in sample["images"]]
    columns = {key: [sample[key] for sample in samples] for key in samples[0]}
    hashed = operator.compute_hash(columns)
    rows = [dict(zip(hashed, values, strict=True)) for values in zip(*hashed.values(), strict=True)]
    assert operator.decide(rows, tmp_path).copy_of.tolist() == [1, -1, -1, -1, -1, -1]  # b has more pixels


def test_an_interrupted_run_resumes_with_the_same_result(data, tmp_path, small_partitions, monkeypatch):
    process = [{NEAR: None}, {"text_length_filter": {"min_len": 1}}]
    whole = run(data, tmp_path / "whole", process)
    write = decisions.write_partition

    def write_one(folder: Path, *arguments) -> None:
        if "000001" in folder.name:
            raise KeyboardInterrupt
        write(folder, *arguments)

    monkeypatch.setattr(decisions, "write_partition", write_one)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "out", process)
    monkeypatch.setattr(decisions, "write_partition", write)
    resumed = run(data, tmp_path / "out", process)
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert without_seconds(resumed) == without_seconds(whole)


def without_seconds(summary: dict) -> dict:
    return summary | {"operators": [step | {"seconds": 0} for step in summary["operators"]]}


def test_a_clip_finds_near_duplicates_by_embeddings(data, tmp_path):
    process = [{EMBEDDING: {"hf_clip": str(save_tiny_clip(tmp_path / "clip")), "min_similarity": 0.9999}}]
    run(data, tmp_path / "out", process)
    duplicates = read_duplicates(tmp_path / "out")
    assert duplicates["equal"] == "s7" and duplicates["s1"] == "larger"


def test_the_captions_judge_is_the_default_clip(tmp_path):
    recipe = {"process": [{EMBEDDING: None}]}
    assert needs_clip(recipe) and not needs_clip({"process": [{NEAR: None}]})
    values = {"image_root": str(tmp_path), "processes": 1, "recipe": recipe, "clip": "models/clip"}
    write_yaml(tmp_path / "config.yaml", values)
    assert read_filter_settings(tmp_path / "config.yaml").arguments[EMBEDDING] == {"hf_clip": "models/clip"}


def test_cells_find_all_near_vectors(tmp_path):
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((3000, 32))
    vectors[2000:] = vectors[:1000] + rng.standard_normal((1000, 32)) * np.linspace(0.05, 0.6, 1000)[:, None]
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    near_pairs = VectorIndex(vectors, tmp_path).find_near(vectors, 0.25)
    pairs = {pair for part in near_pairs for pair in zip(*(column.tolist() for column in part), strict=True)}
    squared = 2 - 2 * vectors.astype(np.float32) @ vectors.astype(np.float32).T
    surely, perhaps = ({tuple(pair) for pair in np.argwhere(squared < reach**2).tolist()} for reach in (0.249, 0.251))
    assert surely <= pairs <= perhaps
    assert 3600 < len(pairs) < 4400, "pairs on both sides of the distance"
    assert list(tmp_path.iterdir()) == []
