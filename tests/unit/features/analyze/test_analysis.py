"""The analysis measures every row, drops none, and counts the rows that each limit of the recipe drops."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from accessibility import SIZES, find_serious
from browser import find_browser, open_browser
from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.shapes import draw_image, draw_row_scene
from dj2mgm.errors import InputError
from dj2mgm.features.analyze.analysis import analyze, convert_to_numbers, summarize_analysis
from dj2mgm.features.analyze.analysis_page import write_analysis_page
from dj2mgm.features.analyze.analyze_keys import AnalysisSettings
from dj2mgm.juicer.filter_limits import FilterLimit, read_statistic_limits
from dj2mgm.juicer.patched_data_juicer import Fields, load_ops
from dj2mgm.juicer.recipe_settings import RecipeSettings, prepare_filters
from dj2mgm.juicer.run_recipe import FILTERED, WORKING_FOLDER_PREFIX, run_recipe
from dj2mgm.recipes.recipe_parsing import parse_steps
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl, write_yaml
from forked_python import forked_python
from paths import PROJECT
from tiny_clip import save_tiny_clip

ROWS, SHORT = 230, 10
RECIPE = [
    {"text_length_filter": {"min_len": 2, "max_len": 500}},
    {"words_num_filter": {"lang": "en", "tokenization": False, "min_num": 7, "max_num": 10_000}},
    {"image_shape_filter": {"min_width": 1, "min_height": 1, "any_or_all": "all"}},
    {"image_size_filter": {"min_size": "1", "max_size": "20MiB"}},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Write captions of about ten words, ten short ones, three repeated rows, and two broken images."""
    folder = tmp_path_factory.mktemp("data with a space")
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    words = ["a", "red", "circle", "and", "blue", "squares", "under", "three", "green", "<b>stars</b>"]
    rows = []
    for number in range(ROWS):
        image = f"images/{number}.png"
        size = (6, 8) if number in range(20, 30) else (int(rng.integers(60, 80)), 64)
        Image.new("RGB", size, (number, 0, 0)).save(folder / image)
        chosen = " ".join(rng.choice(words, rng.integers(7, 14)))
        caption = f"x{number}" if number < SHORT else f"{chosen} {number}"
        rows.append({"id": f"r{number}", "text": build_dj_text(caption), "images": [image]})
    rows += [rows[number] | {"id": f"again{number}"} for number in (50, 51, 52)]
    (folder / "images/100.png").unlink()
    (folder / "images/101.png").write_bytes(b"<html>404</html>")
    write_jsonl(folder / "pretrain.jsonl", rows)
    return folder / "pretrain.jsonl"


def settings(data: Path, process: list) -> RecipeSettings:
    root = str(data.parent.resolve())
    return RecipeSettings(
        data.parent.resolve(), 1, parse_steps("recipe", process), {"image_integrity_filter": {"image_root": root}}
    )


@pytest.fixture(scope="module")
def analyzed(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("analyze")
    analysis = analyze(settings(data, RECIPE), None, data, output)
    return analysis, output


def test_every_row_is_measured_or_reported_as_unreadable(data, analyzed):
    analysis, output = analyzed
    summary = summarize_analysis(analysis, None)
    assert (summary["rows_in"], summary["rows_analyzed"]) == (ROWS + 3, ROWS + 1)
    assert summary["unreadable_images"] == {"missing": 1, "outside": 0, "empty": 0, "undecodable": 1}
    assert summary["repeats"] == {"image_text_deduplicator": 3}
    stats = {row["id"]: row for row in read_jsonl(output / "stats.jsonl")}
    assert set(stats) == {row["id"] for row in read_jsonl(data)}
    assert stats["r100"] == {"id": "r100", "image_integrity": "missing"}
    assert all(row["text_len"] > 0 and row["image_width"] for row in stats.values() if row["image_integrity"] == "ok")


def test_the_overall_table_equals_that_of_the_rows(analyzed):
    analysis, output = analyzed
    overall = pd.read_csv(output / "overall.csv", index_col=0)
    assert list(overall) == ["text_len", "num_words", "image_width", "image_height", "image_sizes"]
    lengths = np.array([len(caption) for caption in analysis.captions])
    assert (overall["text_len"]["count"] == len(lengths)) and (overall["text_len"]["max"] == lengths.max())
    assert overall["text_len"]["1%"] == pytest.approx(np.quantile(lengths, 0.01))


def test_the_filter_stage_keeps_as_many_rows_as_predicted(data, analyzed, tmp_path):
    analysis, _ = analyzed
    process = [{"image_integrity_filter": None}, *RECIPE, {"image_text_deduplicator": None}]
    summary = run_recipe(settings(data, process), data, tmp_path, FILTERED).as_dict()
    assert summary["rows_kept"] == summarize_analysis(analysis, None)["rows_kept"] > 0


def test_each_limit_of_the_recipe_is_counted_alone(analyzed):
    statistics = summarize_analysis(analyzed[0], None)["statistics"]
    assert statistics["num_words"]["limits"] == {
        "min_num": {"limit": 7, "drops": SHORT},
        "max_num": {"limit": 10_000, "drops": 0},
    }
    assert statistics["image_sizes"]["limits"]["max_size"] == {"limit": "20MiB", "drops": 0}
    assert not FilterLimit("min", "min_size", 5.0, "5").drops(np.array([np.nan])).any(), "a row without a value is kept"


def test_similarity_is_measured_without_a_limit(data, tmp_path):
    clip = str(save_tiny_clip(tmp_path / "clip"))
    arguments = {"batched_image_text_similarity_filter": {"hf_clip": clip}}
    with_clip = settings(data, RECIPE[:1])
    with_clip = RecipeSettings(with_clip.image_root, 1, with_clip.steps, with_clip.arguments | arguments)
    analysis = analyze(with_clip, clip, data, tmp_path / "out")
    similarity = analysis.statistics[-1]
    assert (similarity.name, similarity.of_images) == ("image_text_similarity", True)
    assert similarity.limits == {} and not similarity.dropped.any()
    assert len(similarity.finite) == analysis.rows


def test_a_recipes_kept_share_is_counted(data, tmp_path):
    save_tiny_clip(tmp_path / "clip")
    step_with_share = {
        "batched_image_text_similarity_filter": {"hf_clip": str(tmp_path / "clip"), "keep_fraction": 0.5}
    }
    analysis = analyze(settings(data, [step_with_share]), None, data, tmp_path)
    [scores] = analysis.statistics
    assert scores.limits["min"].argument == "keep_fraction" and scores.dropped.sum() == (ROWS + 1) // 2


def test_mappers_do_not_change_measurements(data, tmp_path):
    analysis = analyze(settings(data, [{"whitespace_normalization_mapper": None}, *RECIPE[:1]]), None, data, tmp_path)
    assert list(analysis.not_measured) == ["whitespace_normalization_mapper"]
    lengths = [row["text_len"] for row in read_jsonl(tmp_path / "stats.jsonl") if "text_len" in row]
    assert lengths == [len(caption) for caption in analysis.captions]


def test_near_duplicates_are_counted_and_kept(tmp_path):
    scene, other = (draw_image(draw_row_scene(3, "pretrain", number)) for number in (0, 1))
    images = {"a": scene, "b": scene.resize((90, 90)), "c": other}
    rows = [{"id": name, "text": build_dj_text(f"scene {name}"), "images": [f"{name}.png"]} for name in images]
    for name, image in images.items():
        image.save(tmp_path / f"{name}.png")
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    process = [*RECIPE[:1], {"image_near_deduplicator": None}]
    analysis = analyze(settings(tmp_path / "pairs.jsonl", process), None, tmp_path / "pairs.jsonl", tmp_path / "out")
    assert analysis.rows == 3 and analysis.repeats["image_near_deduplicator"].sum() == 1


def test_data_juicers_deduplicator_only_counts_duplicates(data, tmp_path):
    analysis = analyze(settings(data, [*RECIPE[:1], {"document_deduplicator": {}}]), None, data, tmp_path)
    assert summarize_analysis(analysis, None)["repeats"] == {"document_deduplicator": 3}
    assert analysis.rows == ROWS + 1 and analysis.repeated.sum() == 3


OPERATORS = [
    ({"text_length_filter": {"min_len": 20, "max_len": 60}}, {"text_len": 18}, {"text_len": 20}),
    ({"special_characters_filter": {}}, {"special_char_ratio": 0.26}, {"special_char_ratio": 0.25}),
    ({"image_size_filter": {"max_size": "2KiB"}}, {"image_sizes": [2049]}, {"image_sizes": [2048]}),
    (
        {"image_shape_filter": {"max_width": 70}},
        {"image_width": [71], "image_height": [9]},
        {"image_width": [70], "image_height": [71]},
    ),
]


@pytest.mark.parametrize(("step", "dropped_stats", "kept_stats"), OPERATORS, ids=lambda value: next(iter(value)))
def test_limits_equal_those_of_data_juicer(step, dropped_stats, kept_stats):
    [(name, arguments)] = step.items()
    [operator] = load_ops([{name: dict(arguments)}])
    for stats, expected in ((dropped_stats, False), (kept_stats, True)):
        assert [bool(keep) for keep in operator.process_batched({Fields.stats: [stats]})] == [expected]
        beyond = [
            limit.drops(convert_to_numbers([value])[0])[0]
            for statistic, value in stats.items()
            for limit in read_statistic_limits(operator, arguments, statistic, alone=len(stats) == 1).values()
        ]
        assert any(beyond) is not expected


def test_values_without_numbers_are_not_statistics():
    values, per_image = convert_to_numbers([[1], [], [2.5], None, [float("nan")]])
    assert per_image and np.array_equal(values, [1, np.nan, 2.5, np.nan, np.nan], equal_nan=True)
    assert (
        convert_to_numbers(["en", "de"]) is None
        and convert_to_numbers([[], []]) is None
        and convert_to_numbers([[1, 2], [3]])[0][1] == 3
    )


CHOSEN = {"dataset": "my_photos"}


def test_the_page_is_self_contained_and_escapes_captions(analyzed, tmp_path):
    analysis, _ = analyzed
    write_analysis_page(analysis, tmp_path / "analysis.html", CHOSEN)
    page = (tmp_path / "analysis.html").read_text(encoding="utf-8")
    assert re.findall("<code>([^<]*)</code>", page) == [
        "snakemake plan --config dataset=my_photos",
        f"python workflow_scripts/explore.py {tmp_path.parent}",
    ]
    assert "`" not in page
    assert "<script" not in page and "<b>stars</b>" not in page and "&lt;b&gt;stars&lt;/b&gt;" in page
    assert all(source.startswith("data:image/webp;base64,") for source in re.findall(r'src="([^"]*)"', page))
    assert page.count('<section class="card statistic"') == len(analysis.statistics)
    first = [page.index(text) for text in (f"keep {analysis.rows_kept} distinct rows", "How sure", "Cost", "Next")]
    assert first == sorted(first) and first[-1] < page.index('<dl class="facts"')
    assert not re.search(r"https?://|url\(|@import", page)
    assert page.count("just below") == sum(
        bool(limit.drops(s.finite).any()) for s in analysis.statistics for limit in s.limits.values()
    )


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
def test_a_browser_shows_the_page_at_every_width(analyzed, tmp_path):
    analysis, _ = analyzed
    write_analysis_page(analysis, tmp_path / "analysis.html", CHOSEN)
    with open_browser(find_browser(), tmp_path / "profile") as tab:
        for width in (360, 1400):
            tab.open(tmp_path / "analysis.html", width)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("[...document.images].every(image => image.naturalWidth > 0) && document.images.length > 0")
        assert not tab.reported("Log.entryAdded") and not tab.reported("Runtime.exceptionThrown")
        requested = {event["request"]["url"] for event in tab.reported("Network.requestWillBeSent")}
        for (width, height), dark in zip(SIZES, (False, True), strict=True):
            tab.open(tmp_path / "analysis.html", width, height, dark)
            assert find_serious(tab) == []
    assert {url for url in requested if not url.startswith("data:")} == {(tmp_path / "analysis.html").as_uri()}


def test_the_page_shows_a_constant_statistic(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "images/0.png")
    rows = [{"id": str(n), "text": build_dj_text(f"caption {n}"), "images": ["images/0.png"]} for n in range(3)]
    write_jsonl(tmp_path / "pretrain.jsonl", rows)
    analysis = analyze(
        settings(tmp_path / "pretrain.jsonl", RECIPE), None, tmp_path / "pretrain.jsonl", tmp_path / "out"
    )
    write_analysis_page(analysis, tmp_path / "out/analysis.html", {})
    assert "All rows have 64." in (tmp_path / "out/analysis.html").read_text(encoding="utf-8")


def test_missing_rows_images_or_filters_are_reported(data, tmp_path):
    empty = tmp_path / "pretrain.jsonl"
    empty.touch()
    with pytest.raises(InputError, match="has no rows"):
        analyze(settings(empty, RECIPE), None, empty, tmp_path / "out")
    write_jsonl(empty, [{"id": "a", "text": build_dj_text("a cat"), "images": ["gone.png"]}])
    first = r"none of 1 images can be read \(missing 1\); the first is .*gone.png. .*image_root"
    with pytest.raises(InputError, match=first):
        analyze(settings(empty, RECIPE), None, empty, tmp_path / "out")
    with pytest.raises(InputError, match="nothing to analyze: no filter"):
        analyze(settings(data, [{"image_text_deduplicator": None}]), None, data, tmp_path / "out")
    with pytest.raises(InputError, match="nowhere.*model.clip"):
        arguments = {"batched_image_text_similarity_filter": {"hf_clip": "/nowhere/clip"}}
        broken = RecipeSettings(data.parent, 1, parse_steps("recipe", RECIPE[:1]), arguments)
        analyze(broken, "/nowhere/clip", data, tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if not path.name.startswith(WORKING_FOLDER_PREFIX)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu_threads": 0}, "cpu_threads: expected an integer from 1 to 4096 or null, found 0"),
        ({"recipe": {"process": [{"text_lenght_filter": {}}]}}, "nearest known one is 'text_length_filter'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_settings_are_checked(change, message, data, tmp_path):
    values = {"image_root": str(data.parent), "processes": 1, "recipe": {"process": RECIPE}, "clip": None}
    write_yaml(tmp_path / "config.yaml", values | {"cpu_threads": None} | change)
    with pytest.raises(InputError, match=re.escape(message)):
        settings = load_settings(AnalysisSettings, tmp_path / "config.yaml")
        recipe = prepare_filters(tmp_path / "config.yaml", settings)
        analyze(recipe, settings.clip, data, tmp_path / "out")


def test_the_analysis_is_the_same_with_more_processes(data, analyzed, tmp_path):
    values = {"image_root": str(data.parent), "recipe": {"process": RECIPE}, "clip": None, "cpu_threads": None}
    write_yaml(tmp_path / "config.yaml", values | {"processes": 2})
    script = [forked_python(), "workflow_scripts/analyze_data.py", "--config", str(tmp_path / "config.yaml")]
    script += ["--data", str(data), "--output-dir", str(tmp_path / "out")]
    subprocess.run(script, cwd=PROJECT, check=True, capture_output=True)
    names = [path.name for path in sorted((tmp_path / "out").iterdir())]
    assert names == ["analysis.html", "overall.csv", "stats.jsonl", "summary.json"]
    for name in ("overall.csv", "stats.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (analyzed[1] / name).read_bytes(), name
    assert read_json(tmp_path / "out/summary.json")["rows_in"] == ROWS + 3
