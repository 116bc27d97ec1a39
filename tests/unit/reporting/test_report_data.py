"""Sections of the report on data: rows by lane, statistics, rewritten captions, and differences of settings."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from dj2mgm.records import JsonlSummary, SourceSamples, find_differences
from dj2mgm.reporting.charts import BAR_CHART_HEIGHT, Scale, compute_bin_edges, stack_bars
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.rendering import format_integer, list_counts
from dj2mgm.reporting.row_flow import (
    WIDTH,
    FlowStep,
    Lanes,
    build_pretrain_steps,
    build_recaption_gallery,
    build_source_table,
    count_instructions,
    draw_flows,
    measure_synthesis_quality,
    read_recaptions,
    read_truth,
)
from dj2mgm.reporting.sections.histograms import (
    align_bin_edges,
    build_similarity_histogram,
    build_statistic_histograms,
    parse_number,
    read_statistics,
)
from dj2mgm.reporting.sections.run_details import SettingRow, label_operators, list_config_differences
from dj2mgm.storage.files import write_jsonl
from report_results import (
    LOW,
    PAIRS,
    SIMILARITY,
    TOO_SHORT,
    TOO_SIMILAR,
    UNLIKE,
    UNLIKELY,
    UNUSABLE,
    write_photos,
    write_results,
)

LEFT = PAIRS - TOO_SHORT - TOO_SIMILAR
ACCEPTED = LOW - UNUSABLE - UNLIKE - UNLIKELY


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return write_results(tmp_path_factory.mktemp("results"))


@pytest.fixture
def experiments(results):
    return load_experiments(results)


def chain(experiment):
    run = experiment.runs[0]
    return build_pretrain_steps(experiment, run, read_recaptions(run))


# rows by lane


def test_every_row_is_in_one_lane_at_every_step(experiments):
    for experiment in experiments:
        steps = chain(experiment)
        for before, after in zip(steps, steps[1:], strict=False):
            lanes = after.lanes
            assert lanes.original + lanes.recaptioned + lanes.dropped == PAIRS
            assert lanes.dropped == before.lanes.dropped + after.dropped
        assert steps[-1].lanes.left == experiment.runs[0].records["pretrain"].samples == LEFT - 1


def test_recaptioned_rows_have_a_lane_until_dropped(experiments):
    steps = {step.name: step for step in chain(experiments[1])}
    high = LEFT - LOW
    mapper, unlike = steps["low_similarity_recaption_mapper"], steps["batched_image_text_similarity_filter"]
    assert (mapper.lanes.original, mapper.lanes.recaptioned) == (high + UNUSABLE, LOW - UNUSABLE)
    assert (unlike.lanes.original, unlike.lanes.recaptioned) == (high, LOW - UNUSABLE - UNLIKE)
    assert steps["caption_log_likelihood_filter"].lanes.recaptioned == ACCEPTED
    file, trained = steps["training file"], steps["trained on"]
    assert (file.lanes.recaptioned, file.lanes.original) == (ACCEPTED - 1, high)  # the omitted row is a recaption
    assert trained.lanes.repeated == LOW - ACCEPTED
    assert "recaptioned" not in {step.kind for step in chain(experiments[0])}


def test_instructions_are_counted_up_to_training(experiments):
    counts = count_instructions(experiments[0], experiments[0].runs[0])
    assert counts == [("in the dataset", 40), ("dropped (missing)", -2), ("trained on", 38)]


@pytest.mark.parametrize(
    ("epochs", "between", "name"),
    [
        (0.5, ("not trained on (training ended first)", -19), "in the training file"),
        (2, ("repeated in later epochs", 38), "trained on"),
    ],
)
def test_samples_count_uses_and_not_rows_of_the_file(experiments, epochs, between, name):
    run = experiments[0].runs[0]
    for stage, record in run.records.items():
        run.records[stage] = replace(record, samples=int(epochs * record.samples))
    counts = count_instructions(experiments[0], run)
    assert counts == [("in the dataset", 40), ("dropped (missing)", -2), between, ("trained on", int(epochs * 38))]
    assert sum(count for _, count in counts[:-1]) == counts[-1][1]
    end, samples = chain(experiments[0])[-1], run.records["pretrain"].samples
    assert end.name == name and end.note.startswith(f"{samples} samples in 29 steps, ")


def test_instructions_made_from_pairs_are_counted(experiments):
    none = replace(experiments[0], dataset_counts=experiments[0].dataset_counts | {"finetune": 0})
    rows_in = none.runs[0].jsonl.files["finetune"].rows_in
    assert count_instructions(none, none.runs[0])[0] == ("made from the pairs", rows_in)


def test_source_table_counts_rows_and_samples(experiments):
    assert build_source_table(experiments[0], experiments[0].runs[0]) == []
    read = {"a": {"split": "pretrain", "rows": 9, "format": "table"}}
    read["b"] = {"split": "finetune", "rows": 5, "format": "llava"}
    read["held"] = {"rows": 40, "format": "folder", "split": "evaluation"}  # not trained on
    mixed = replace(experiments[0], dataset_counts=experiments[0].dataset_counts | {"sources": read})
    mixed = replace(mixed, licenses={"a": "CC0", "b": None})
    files = mixed.runs[0].jsonl.files
    pretrain = replace(files["pretrain"], sources={"a": SourceSamples(usable=8, used=2, rows_out=4, words=30)})
    run = replace(mixed.runs[0], jsonl=JsonlSummary(files | {"pretrain": pretrain}, {}))
    first, second = build_source_table(mixed, run)
    expected = {"name": "a", "rows": 9, "used": 2, "rows_out": 4, "times": 2.0, "license": "CC0"}
    assert first | expected == first
    assert (second["name"], second["rows_out"], second["times"]) == ("b", 0, 0.0)


# the flow diagram


def edges(path: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the left and right edges of a band at its top and at its bottom."""
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", path)]
    if "C" not in path:
        return (numbers[0], numbers[2]), (numbers[0], numbers[2])
    return (numbers[0], numbers[-2]), (numbers[6], numbers[8])


def test_the_width_of_bands_is_proportional_to_rows(experiments):
    chains = [chain(experiment) for experiment in experiments]
    flows = draw_flows(chains)
    top = edges(flows[0][0][0].path)[0]
    unit = (top[1] - top[0]) / PAIRS
    for steps, flow in zip(chains, flows, strict=True):
        for step, shapes in zip(steps, flow, strict=True):
            widths = dict.fromkeys(("original", "recaptioned", "repeated", "dropped"), 0.0)
            for shape in shapes:
                left, right = edges(shape.path)[1]
                assert -0.1 <= left <= right <= WIDTH + 0.1
                widths[shape.lane] += right - left
            for lane, width in widths.items():
                assert width == pytest.approx(getattr(step.lanes, lane) * unit, abs=0.5), (step.name, lane)


def test_lanes_never_overlap():
    start, mapped = Lanes(100), Lanes(40, recaptioned=60)
    steps = [
        FlowStep("dataset", "dataset", start),
        FlowStep("mapper", "recaption", mapped),
        FlowStep("filter", "operator", Lanes(40, recaptioned=1, dropped=59), dropped=59),
        FlowStep("file", "file", Lanes(40, recaptioned=1, dropped=59)),
        FlowStep("fill", "repeat", Lanes(40, recaptioned=1, repeated=400, dropped=59)),
        FlowStep("trained on", "trained", Lanes(40, recaptioned=1, repeated=400, dropped=59)),
    ]
    [flow] = draw_flows([steps])
    bands = sorted(edges(shape.path)[1] for shape in flow[-1])
    assert len(bands) == 4
    assert all(left[1] < right[0] for left, right in zip(bands, bands[1:], strict=False))


def test_one_dropped_row_of_a_million_has_a_shape():
    steps = [
        FlowStep("dataset", "dataset", Lanes(1_000_000)),
        FlowStep("filter", "operator", Lanes(999_999, dropped=1), dropped=1),
        FlowStep("trained on", "trained", Lanes(999_999, dropped=1)),
    ]
    [flow] = draw_flows([steps])
    assert [shape.title for shape in flow[1] if shape.lane == "dropped"] == ["filter: 1 dropped"]


# statistics


def test_a_row_is_counted_at_the_operator_that_dropped_it(experiments):
    folder, recipe = experiments[0].runs[0].stages["filter"], experiments[0].recipes.filter
    histograms = {histogram.title: histogram for histogram in build_statistic_histograms(folder, recipe)}
    length = histograms["text length (characters)"]
    assert length.counts == {"kept": LEFT, "here": TOO_SHORT, "elsewhere": TOO_SIMILAR}
    # 528 is off the axis
    assert length.limits_text == "38 to 528" and [limit.kind for limit in length.limits] == ["min"]
    assert histograms["image integrity"].words == f"ok {PAIRS}" and not histograms["image integrity"].bars
    assert histograms["image width (px)"].words == "all 128"
    ratios = histograms["image width / height"]  # a NaN and an empty list are no values
    assert ratios.counts == {"kept": LEFT - 2, "here": 0, "elsewhere": TOO_SIMILAR}
    assert ratios.limits_text == "at least 0.25"


def test_nan_null_and_lists_are_read_as_numbers(tmp_path):
    values = [1.5, [2.5], [], [3.5, 4.5], math.nan, None]
    write_jsonl(tmp_path / "stats.jsonl", [{"id": str(n), "score": value} for n, value in enumerate(values)])
    dropped = [{"id": "d", "event": "dropped", "operator": "a", "stats": {"score": 9}}, {"id": "c", "event": "changed"}]
    write_jsonl(tmp_path / "dropped.jsonl", dropped)
    score_values = read_statistics(tmp_path)["score"]
    assert score_values == [("", 1.5), ("", 2.5), ("", 3.5), ("", 4.5), ("a", 9)]


def test_bars_are_proportional_and_stacked():
    [lower, upper] = stack_bars({"kept": np.array([50, 100]), "dropped": np.array([50, 0])}, highest=100)
    heights = [[float(number) for number in re.findall(r"v([\d.]+)", bars.path)] for bars in (lower, upper)]
    assert heights == [[50, 100], [50]]
    assert f"M{0.12 * 50 / 2:.2f} 0.00" in upper.path  # on top of the first bar
    assert stack_bars({"kept": np.array([0, 0])}, highest=1) == []


def test_bars_of_single_rows_are_visible():
    for bars in stack_bars({"kept": np.array([100_000]), "dropped": np.array([1])}, highest=100_001):
        [(top, height)] = [(float(a), float(b)) for a, b in re.findall(r"M[\d.]+ ([\d.]+)h[\d.]+v([\d.]+)", bars.path)]
        assert height > 1 and 0 <= top and top + height <= BAR_CHART_HEIGHT + 0.01


@pytest.mark.parametrize(
    ("values", "log"),
    [([1, 2, 3, 20], False), ([0.01, 1, 1, 1], True), ([1, 1, 1, 50], True), ([-5, 0.1, 7], False)],
)
def test_bins_cover_all_values_and_are_log_for_outliers(values, log):
    edges_, logarithmic = compute_bin_edges(np.array(values, dtype=float))
    assert logarithmic == log
    assert np.histogram(values, edges_)[0].sum() == len(values)
    integers, _ = compute_bin_edges(np.arange(10, 111, dtype=float))
    assert set(np.histogram(np.arange(10, 110), integers)[0]) <= {4, 0}, "equal bins"


@pytest.mark.parametrize(("text", "expected"), [("64", 64), ("20MiB", 20 * 2**20), ("1.5 KiB", 1536), ("en", None)])
def test_limits_as_numbers(text, expected):
    assert parse_number(text) == expected


# scales


def test_ticks_are_round_and_on_the_axis():
    assert [tick.text for tick in Scale(0, 1).choose_ticks(5, factor=100)] == ["0", "20", "40", "60", "80", "100"]
    assert [tick.text for tick in Scale(-0.012, 0.03).choose_ticks(4, signed=True)] == [
        "−0.01",
        "0.00",
        "+0.01",
        "+0.02",
        "+0.03",
    ]
    assert [tick.text for tick in Scale(4, 300, log=True).choose_ticks(3)] == ["10", "30", "100", "300"]
    assert [tick.text for tick in Scale(0, 12_000).choose_ticks(3)] == ["0", "5,000", "10,000"]
    for scale in (Scale(0, 0.0013), Scale(-3, 1e6), Scale(5, 5), Scale(0.001, 5000, log=True)):
        ticks = scale.choose_ticks(4)
        assert 1 <= len(ticks) <= 6
        assert all(0 <= tick.at <= 100 for tick in ticks)


def test_counts_in_words():
    assert format_integer(1234567) == "1,234,567"
    assert list_counts({"too_long": 3, "empty": 0, "missing": 1000}) == "too long 3, missing 1,000"


# recaptions


def test_recaptions_that_remain_are_accepted(experiments):
    recaptions = read_recaptions(experiments[1].runs[0])
    assert len(recaptions) == LOW and sum(recaption.accepted for recaption in recaptions) == ACCEPTED
    assert [r.id for r in recaptions] == sorted(r.id for r in recaptions)
    assert [r.problem for r in recaptions if r.caption is None] == ["empty"] * UNUSABLE
    assert read_recaptions(experiments[0].runs[0]) == []


def test_similarity_histogram_has_all_filtered_rows(experiments):
    run = experiments[1].runs[0]
    similarities = build_similarity_histogram(run, read_recaptions(run))
    assert similarities.counts == {
        "kept": LEFT - LOW,
        "replaced": LOW,
        "accepted": ACCEPTED,
        "rejected": UNLIKE + UNLIKELY,
    }
    assert [bars.series for bars in similarities.after] == ["kept", "accepted", "rejected"]
    assert 0 < similarities.limit < 100 and similarities.limit_text == str(SIMILARITY)
    assert build_similarity_histogram(experiments[0].runs[0], []) is None


@pytest.mark.parametrize(
    ("low", "high", "limit"), [(-0.13, 0.16, 0.135), (0.2, 0.5, 0.1), (0.1, 0.1, 0.1), (0, 1, None)]
)
def test_limit_is_an_edge_of_the_similarity_bins(low, high, limit):
    edges_ = align_bin_edges(low, high, limit)
    assert np.histogram([low, (low + high) / 2, high], edges_)[0].sum() == 3
    assert limit is None or not edges_[0] < limit < edges_[-1] or np.isclose(edges_, limit).any()


def test_quality_is_measured_against_the_ground_truth(experiments):
    run = experiments[1].runs[0]
    recaptions, truth = read_recaptions(run), read_truth(experiments[1])
    wrong = sum(r.accepted and "bold" in r.caption for r in recaptions)
    assert 0 < wrong < ACCEPTED
    assert [fact.value for fact in measure_synthesis_quality(run, recaptions, truth)] == [
        "100.0 %",
        "0.0 %",
        f"{100 * (ACCEPTED - wrong) / ACCEPTED:.1f} %",
    ]
    assert measure_synthesis_quality(run, recaptions, {}) == []


def test_recaption_gallery_needs_ground_truth_for_marks(experiments, tmp_path):
    run = experiments[1].runs[0]
    recaptions, truth = read_recaptions(run), read_truth(experiments[1])
    for item in build_recaption_gallery(run, recaptions, truth, items=LOW):
        caption = item.recaption.caption
        assert item.true == (None if caption is None else "bold" not in caption)
        assert item.image.startswith("data:image/webp;base64,")
    assert {item.true for item in build_recaption_gallery(run, recaptions, {})} == {None}
    assert read_truth(load_experiments(write_photos(tmp_path / "other"))[0]) == {}


# settings


def test_only_different_settings_are_listed(experiments):
    baseline, synthesis = experiments
    assert list_config_differences(baseline, baseline) == []
    rows = list_config_differences(synthesis, baseline)
    assert SettingRow("synthesize.mgm.num_beams", "4", "8", "4", same_weights=False) in rows
    assert SettingRow("finetune.save_steps", "20", "5", "20", same_weights=True) in rows
    limit = "synthesize recipe: batched_image_text_similarity_filter.min_score"
    assert SettingRow(limit, "–", "0.135", "–", same_weights=False) in rows
    assert not [row for row in rows if row.reference == row.value]
    assert not [row for row in rows if row.name.startswith(("filter", "pretrain", "seeds"))]


def test_settings_are_flat_and_repeated_operators_numbered():
    flat = find_differences({}, {"a": {"b": {"c": 1}, "d": [1, 2]}, "e": {}})
    assert {row.name: row.values[1] for row in flat} == {"a.b.c": 1, "a.d": [1, 2], "e": {}}
    process = [{"f": {"x": 1}}, {"g": None}, {"f": {"x": 2}}]
    assert label_operators("filter recipe", process) == {
        "filter recipe: f": {"x": 1},
        "filter recipe: g": "no arguments",
        "filter recipe: f (2)": {"x": 2},
    }
