"""Exported datasets can be read as sources with the same captions, images and scores."""

import io
import json
import re

import pytest
import yaml
from datasets import load_dataset
from PIL import Image

import export_data
from dj2mgm.data.formats import build_dj_text, read_pairs
from dj2mgm.data.images import locate_image
from dj2mgm.data.merged_sources import write_merged_sources
from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset
from dj2mgm.features.publish.exports import WRITERS
from dj2mgm.storage.files import write_json, write_jsonl, write_yaml
from dj2mgm.storage.image_files import read_file
from recipe_summaries import summarize_operator, write_recipe_summary
from run_main import run_main

ROWS = {f"web/{number}": f"caption {number} with an ü, a | and a\nbreak" for number in range(5)}
SOURCES = {"web": {"split": "pretrain", "rows": 12, "format": "table"}}
READ_AS = {"dj": ("data_juicer", "data.jsonl"), "llava": ("llava", "data.json")}


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 9 + number), (9, number * 20, 9)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def export(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    rows = []
    for number, (identifier, caption) in enumerate(ROWS.items()):
        (tmp_path / f"images/{number}.PNG").write_bytes(png(number))
        row = {"id": identifier, "text": build_dj_text(caption), "images": [f"{number}.PNG"], "source": "web"}
        rows.append(row | ({"recaption": {"original": "wrong", "caption": caption}} if number == 3 else {}))
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    stats = [
        {"id": row["id"], "image_integrity": "ok", "score": [0.5 + at], "words": at} for at, row in enumerate(rows)
    ]
    operator = summarize_operator(1, "words_filter", rows_in=9, dropped=4)
    for stage, own in (("filter", stats), ("synthesize", [{"id": "web/0", "score": [2.0]}])):
        write_jsonl(tmp_path / stage / "stats.jsonl", own)
        write_recipe_summary(tmp_path / stage, 9, 5, [operator])
    write_json(tmp_path / "summary.json", {"pretrain": 9, "left_out": {"pretrain": 3}, "sources": SOURCES})
    recipes = {"filter": {"process": [{"words_filter": {"min_num": 3}}]}, "synthesize": None}
    names = {"experiment": "mine", "dataset": "photos", "licenses": {"web": "CC-BY-4.0"}}
    write_yaml(tmp_path / "config.yaml", names | {"image_root": str(tmp_path / "images"), "recipes": recipes})

    def run(kind: str):
        stages = ["--stages", "filter", "synthesize", "--dataset", "summary.json", "--pairs", "pairs.jsonl"]
        flags = ["--config", "config.yaml", "--format", kind, "--output-dir", f"out/{kind}", *stages]
        done = run_main(export_data, *flags, capture=capsys)
        assert done.status == 0, done.stderr
        return tmp_path / "out" / kind

    return run


@pytest.mark.parametrize("kind", WRITERS)
def test_an_export_has_a_card_and_can_be_read_as_a_source(export, tmp_path, kind):
    folder = export(kind)
    _, head, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    assert yaml.safe_load(head)["license"] == "cc-by-4.0" and yaml.safe_load(head)["size_categories"] == ["n<1K"]
    assert re.search(r"^# `[^`]+`, `[^`]+`$", text, re.M)  # folder names may contain Markdown
    assert "| web | table | CC-BY-4.0 | 12 |" in text and "| held out for evaluation | 12 | 3 | 9 |" in text
    assert "A model wrote 1 of the captions." in text and ("about" in text) == (kind in ("dj", "llava"))
    assert text.count("| `words_filter` | 9 | 4 | 5 |") == 2
    assert "5 image–caption pairs" in text and "min_num: 3" in text and "`score`, `words`" in text
    reader, file = READ_AS.get(kind, (kind, ""))
    source = {"format": reader, "path": str(folder / file) if file else str(folder)}
    write_yaml(tmp_path / "config/datasets/again.yaml", {"sources": {"again": source}})
    merged, read = write_merged_sources(resolve_dataset("again").settings, tmp_path, tmp_path)
    assert read["again"]["rows"] == len(ROWS)
    rows = list(read_pairs(merged.pretrain.file))
    assert [row["text"] for row in rows] == [build_dj_text(caption) for caption in ROWS.values()]
    for number, row in enumerate(rows):
        assert read_file(locate_image(merged.pretrain.images, row["images"][0])) == png(number)


def test_huggingface_datasets_loads_the_export(export, tmp_path):
    rows = load_dataset("parquet", data_files=f"{export('parquet')}/data/*.parquet", split="train", cache_dir=tmp_path)
    assert [row["image"].size for row in rows] == [(9, 9 + number) for number in range(5)]
    assert rows["score"] == [2.0, 1.5, 2.5, 3.5, 4.5] and rows["words"] == [0, 1, 2, 3, 4]
    assert rows["original_caption"] == ["", "", "", "wrong", ""] and set(rows["source"]) == {"web"}


def test_file_suffixes_match_image_formats(export, tmp_path):
    for number, name in enumerate(("0.txt", "1", "2.json", "3.jfif", "4.PNG")):
        (tmp_path / f"images/{number}.PNG").rename(tmp_path / "images" / name)
    text = (tmp_path / "pairs.jsonl").read_text(encoding="utf-8")
    for name in ("0.txt", "1", "2.json", "3.jfif"):
        text = text.replace(f'"{name.split(".")[0]}.PNG"', f'"{name}"')
    (tmp_path / "pairs.jsonl").write_text(text, encoding="utf-8")
    names = {file.name for file in export("dj").glob("images/*/*")}
    assert names == {f"{number:09d}.png" for number in range(5)}


def test_statistics_named_like_columns_or_without_numbers(export, tmp_path):
    odd = [{"id": f"web/{number}", "caption": 0.5, "nan": float("nan")} for number in range(5)]
    (tmp_path / "synthesize/stats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    row = json.loads((export("dj") / "data.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert row["about"]["caption"] == ROWS["web/0"] and row["about"]["caption_statistic"] == 0.5
    assert "nan" not in row["about"]


def test_a_failed_export_keeps_the_previous_one(export, tmp_path, monkeypatch, capsys):
    before = (export("dj") / "data.jsonl").read_bytes()
    (tmp_path / "images/4.PNG").unlink()
    with pytest.raises(AssertionError, match="row 'web/4': missing"):
        export("dj")
    assert (tmp_path / "out/dj/data.jsonl").read_bytes() == before
    assert json.loads(before.splitlines()[0])["about"]["score"] == 2.0


def test_an_undecodable_image_is_named_with_its_row(export, tmp_path):
    (tmp_path / "images/4.PNG").write_bytes(b"no image")
    for kind in WRITERS:
        with pytest.raises(AssertionError, match=r"row 'web/4': .*4.PNG cannot be exported .*; replace the image"):
            export(kind)
