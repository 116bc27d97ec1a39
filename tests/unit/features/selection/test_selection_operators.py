"""Operators that select rows after all are measured keep the rows of their definition."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.images import load_image
from dj2mgm.errors import InputError
from dj2mgm.features.selection.operators.balance_filters import (
    EMBEDDING_COLUMN,
    LengthBalanceFilter,
    find_ngrams,
    fit_clusters,
)
from dj2mgm.juicer.clip_similarity import ClipSimilarity
from dj2mgm.juicer.operators.declarations import draw, sample_evenly
from dj2mgm.juicer.patched_data_juicer import Fields, load_ops
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.juicer.run_recipe import FILTERED, run_recipe
from dj2mgm.recipes.recipe_parsing import parse_steps
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl
from tiny_captioners import write_pairs
from tiny_clip import save_tiny_clip
from tiny_models import save_image

CLUSTERS, LENGTHS, NGRAMS = "cluster_balance_filter", "length_balance_filter", "ngram_balance_filter"
COLORS = {"red": 9, "green": 3, "blue": 1}  # colors of the images, in this order
RGB = {"red": (250, 0, 0), "green": (0, 250, 0), "blue": (0, 0, 250)}
CAPTIONS = ["a cat", "a dog", "one two three four five six", "a cat", "a cat and then a dog and a cow and so on"]
FILES = ("filtered.jsonl", "stats.jsonl", "dropped.jsonl")


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return str(save_tiny_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def colored(tmp_path_factory) -> Path:
    """Write rows r0 to r12 about images of few colors."""
    folder = tmp_path_factory.mktemp("colored")
    colors = [color for color, count in COLORS.items() for _ in range(count)]
    for color in COLORS:
        save_image(folder / f"{color}.png", RGB[color])
    rows = [{"id": f"r{n}", "text": build_dj_text(color), "images": [f"{color}.png"]} for n, color in enumerate(colors)]
    write_jsonl(folder / "pairs.jsonl", rows)
    return folder / "pairs.jsonl"


def run(data: Path, output: Path, *process: dict) -> list[str]:
    """Return the ids of a recipe's kept rows."""
    run_recipe(RecipeSettings(data.parent, 1, parse_steps("recipe", list(process))), data, output, FILTERED)
    return [row["id"] for row in read_jsonl(output / "filtered.jsonl")]


def texts(folder: Path, captions: list[str]) -> Path:
    return write_pairs(folder, captions)


def sample_in_turn(groups: list[int], draws: list[float], count: int) -> set[int]:
    """Sample evenly by hand: in each round, take a row of each group with remaining rows."""
    waiting = {
        group: sorted((draws[row], row) for row in range(len(groups)) if groups[row] == group) for group in set(groups)
    }
    taken: list[int] = []
    while len(taken) < count:
        offered = sorted(rows.pop(0) for rows in waiting.values() if rows)
        taken += [row for _, row in offered]
    return set(taken[:count])


@given(st.data())
def test_even_sampling_takes_a_row_of_each_group_in_turn(data):
    groups = data.draw(st.lists(st.integers(0, 5), max_size=40))
    draws = [data.draw(st.sampled_from([0.1, 0.2, 0.3])) for _ in groups]  # with ties, in which the earlier row wins
    count = data.draw(st.integers(0, len(groups)))
    mask = sample_evenly(np.array(groups, dtype=np.int64), np.array(draws), count)
    assert set(np.flatnonzero(mask).tolist()) == sample_in_turn(groups, draws, count)


def test_clusters_contribute_equally_if_possible(clip, colored, tmp_path):
    ids = run(colored, tmp_path, {CLUSTERS: {"hf_clip": clip, "clusters": 3, "keep_rows": 8}})
    rows = {row["id"]: row for row in read_jsonl(colored)}
    # 1 blue, 3 green and 4 red: 8 rows evenly
    assert Counter(rows[identifier]["images"][0] for identifier in ids) == {
        "red.png": 4,
        "green.png": 3,
        "blue.png": 1,
    }
    everyone = [*read_jsonl(tmp_path / "stats.jsonl"), *read_jsonl(tmp_path / "dropped.jsonl")]
    cluster = {row["id"]: row.get("stats", row)["clip_cluster"] for row in everyone}
    assert len({(rows[identifier]["images"][0], cluster[identifier]) for identifier in rows}) == 3
    summary = read_json(tmp_path / "summary.json")
    assert (summary["rows_in"], summary["rows_kept"], summary["rows_dropped"]) == (13, 8, 5)
    [step] = summary["operators"]
    assert step["selection"] == {"groups": 3, "largest_group": 9, "most_kept_of_a_group": 4, "without_group": 0}
    assert not list(tmp_path.glob(".data_juicer*")) and EMBEDDING_COLUMN not in json.dumps(everyone)


def test_a_rows_cluster_has_the_nearest_center(clip, tmp_path):
    data = texts(tmp_path, ["x"] * 40)
    images = [str(tmp_path / row["images"][0]) for row in read_jsonl(data)]
    samples = {
        "text": [build_dj_text("x")] * 40,
        "images": [[image] for image in images],
        Fields.stats: [{} for _ in images],
    }
    [operator] = load_ops([{CLUSTERS: {"hf_clip": clip, "clusters": 4, "keep_fraction": 0.5, "seed": 3}}])
    measured = operator.compute_stats(samples)
    rows = [{"id": str(number), EMBEDDING_COLUMN: column} for number, column in enumerate(measured[EMBEDDING_COLUMN])]
    clusters = operator.assign_groups(rows)
    embeddings = ClipSimilarity(clip, "cpu").embed(images, load_image).astype(np.float16)
    centers = fit_clusters(embeddings.astype(np.float32), 4, seed=3).reconstruct_n(0, 4)
    distances = np.linalg.norm(embeddings[:, None].astype(np.float64) - centers[None], axis=2)
    assert clusters.tolist() == distances.argmin(axis=1).tolist() and len(set(clusters.tolist())) == 4
    assert np.linalg.norm(embeddings.astype(np.float64), axis=1) == pytest.approx(1, abs=2e-3)


def test_captions_can_be_clustered(clip, tmp_path):
    data = texts(tmp_path, ["a cat"] * 6 + ["snow"] * 2)
    ids = run(data, tmp_path / "out", {CLUSTERS: {"hf_clip": clip, "embed": "text", "clusters": 2, "keep_rows": 4}})
    assert {"r6", "r7"} < set(ids) and len(ids) == 4


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({"clusters": 50, "keep_rows": 5}, 5),  # fewer rows than clusters
        ({"clusters": 3, "keep_rows": 99}, 13),  # fewer rows than requested
        ({"clusters": 3, "keep_fraction": 0.01}, 1),
    ],
)
def test_the_requested_number_of_rows_is_kept(clip, colored, tmp_path, arguments, count):
    assert len(run(colored, tmp_path, {CLUSTERS: {"hf_clip": clip} | arguments})) == count


def test_rows_without_an_image_are_kept_and_not_counted(clip, colored, tmp_path):
    [operator] = load_ops([{CLUSTERS: {"hf_clip": clip, "clusters": 3, "keep_rows": 2}}])
    images = [[], [str(colored.parent / "red.png")], [], *[[str(colored.parent / "blue.png")]] * 3]
    columns = operator.compute_stats({"text": ["x"] * 6, "images": images, Fields.stats: [{} for _ in images]})
    rows = [
        {"id": name, EMBEDDING_COLUMN: value} for name, value in zip("abcdef", columns[EMBEDDING_COLUMN], strict=True)
    ]
    mask = operator.decide(rows, tmp_path).mask
    assert mask[:3].all() and mask.sum() == 4 and operator.report["without_group"] == 2
    for name in (CLUSTERS, LENGTHS, NGRAMS):
        [operator] = load_ops([{name: {"keep_rows": 2}}])
        assert operator.decide([], tmp_path).mask.tolist() == []


def test_lengths_contribute_equally_if_possible(tmp_path):
    data = texts(tmp_path, ["a b"] * 10 + ["a b c d e"] * 4 + ["a b c d e f g h i j k"])
    ids = run(data, tmp_path / "out", {LENGTHS: {"bucket_words": 5, "keep_rows": 9}})
    words = [row["caption_words_from"] for row in read_jsonl(tmp_path / "out/stats.jsonl")]
    assert len(ids) == 9 and Counter(words) == {0: 4, 5: 4, 10: 1}


def test_a_second_filter_draws_independently(tmp_path):
    """Equal draws would drop more of the large group, whose kept rows have low draws."""
    data = texts(tmp_path, ["snow"] * 900 + ["a cat"] * 100)
    recipe = [{NGRAMS: {"words": 1, "keep_rows": 200}}, {LENGTHS: {"keep_fraction": 0.5}}]
    first, both = (run(data, tmp_path / str(len(steps)), *steps) for steps in (recipe[:1], recipe))
    large = [sum(int(row[1:]) < 900 for row in ids) / len(ids) for ids in (first, both)]
    assert len(first) == 200 and len(both) == 100 and abs(large[0] - large[1]) < 0.12


def test_ngrams_of_a_caption_are_distinct():
    assert find_ngrams(build_dj_text("A cat, a cat and a dog"), 2) == ["a cat", "cat a", "cat and", "and a", "a dog"]
    assert find_ngrams(build_dj_text("लाल नीला"), 1) == ["लाल", "नीला"], "combining marks belong to their word"
    assert find_ngrams(build_dj_text("Snow"), 2) == ["snow"] and find_ngrams(build_dj_text(""), 2) == [""]


def test_a_caption_is_kept_if_any_ngram_draws_it(tmp_path):
    """MetaCLIP's balancing draws each of the c captions of an n-gram with probability t/c."""
    captions = [f"a red {'cat' if number % 9 else 'cow'} {'sits' if number % 4 else 'runs'}" for number in range(80)]
    data = texts(tmp_path, captions)
    ids = run(data, tmp_path / "out", {NGRAMS: {"words": 2, "keep_fraction": 0.4, "seed": 5}})
    counts = Counter(gram for caption in captions for gram in find_ngrams(caption, 2))
    [step] = read_json(tmp_path / "out/summary.json")["operators"]
    limit = step["selection"]["limit"] + 0.001  # rounded like in the operator
    drawn = [
        f"r{number}"
        for number, caption in enumerate(captions)
        if any(draw(5, NGRAMS, f"r{number}", gram) < limit / counts[gram] for gram in find_ngrams(caption, 2))
    ]
    assert ids == drawn and len(ids) == 32
    rare = [f"r{number}" for number, caption in enumerate(captions) if "cow" in caption]
    assert len(set(rare) & set(ids)) / len(rare) > len(ids) / len(captions)


def test_equal_limits_keep_the_earlier_rows(monkeypatch, tmp_path):
    monkeypatch.setattr("dj2mgm.features.selection.operators.balance_filters.draw", lambda *names: 0.5)
    assert run(texts(tmp_path, ["a cat"] * 5), tmp_path / "out", {NGRAMS: {"keep_rows": 3}}) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("name", [LENGTHS, NGRAMS])
def test_draws_depend_on_the_seed_and_not_on_other_rows(tmp_path, name):
    data = texts(tmp_path, ["a cat"] * 30)
    first, again, other = (
        run(data, tmp_path / str(run_number), {name: {"keep_fraction": 0.5, "seed": seed}})
        for run_number, seed in enumerate((1, 1, 2))
    )
    assert first == again != other
    write_jsonl(data, list(read_jsonl(data))[1:])
    assert len(set(run(data, tmp_path / "less", {name: {"keep_rows": 15, "seed": 1}})) & set(first)) >= 14


def test_selections_apply_to_the_remaining_rows(clip, colored, tmp_path):
    process = [
        {"text_length_filter": {"min_len": 4}},  # without the red images
        {CLUSTERS: {"hf_clip": clip, "clusters": 2, "keep_rows": 2}},
        {LENGTHS: {"bucket_words": 1, "keep_rows": 1}},
        {"words_num_filter": {"min_num": 1}},
    ]
    assert len(run(colored, tmp_path, *process)) == 1
    counts = [(step["rows_in"], step["rows_out"]) for step in read_json(tmp_path / "summary.json")["operators"]]
    assert counts == [(13, 4), (4, 2), (2, 1), (1, 1)]


def test_a_later_failure_does_not_repeat_the_selection(tmp_path, monkeypatch):
    data, decide, calls = texts(tmp_path, CAPTIONS), LengthBalanceFilter.decide, []
    monkeypatch.setattr(LengthBalanceFilter, "decide", lambda *arguments: calls.append(1) or decide(*arguments))
    whole = {path: path.read_bytes() for path in (tmp_path / "images").iterdir()}
    for path in whole:
        path.write_text("no image")
    process = {LENGTHS: {"keep_rows": 3}}, {"image_shape_filter": {}}
    with pytest.raises(InputError, match="operator image_shape_filter failed"):
        run(data, tmp_path / "out", *process)
    for path, content in whole.items():
        path.write_bytes(content)
    assert len(run(data, tmp_path / "out", *process)) == 3 and len(calls) == 1
