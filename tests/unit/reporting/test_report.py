"""The report of two small experiments is self-contained, shows the files' values, and has no empty sections."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.run_scores import estimate_paired_difference
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.report_page import describe_seed_coverage
from dj2mgm.reporting.sections.gallery import build_gallery
from dj2mgm.reporting.sections.run_details import build_times_table, list_versions
from dj2mgm.reporting.sections.training_charts import (
    compute_running_mean,
    draw_loss_chart,
    draw_memory_timeline,
    draw_score_charts,
)
from dj2mgm.reporting.verdicts.headline_panels import build_headline_panels, build_metric_verdicts
from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_json, write_jsonl, write_yaml
from report_pages import Elements, read_page_text, write_report
from report_results import IMAGES, ODD, write_photos, write_results


@pytest.fixture
def root(tmp_path):
    return tmp_path / "results ünd mehr"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Write results of two seeds that no test changes, and return their configuration."""
    return write_results(tmp_path_factory.mktemp("results ünd mehr"))


@pytest.fixture(scope="module")
def page(results):
    with pytest.MonkeyPatch.context() as patch:
        return write_report(patch, results)


@pytest.fixture
def experiments(results):
    return load_experiments(results)


def test_page_is_self_contained_and_escapes_answers(monkeypatch, results, page):
    html = page.read_text(encoding="utf-8")
    assert write_report(monkeypatch, results).read_text(encoding="utf-8") == html, "the page is deterministic"
    elements = Elements(html)
    assert elements.open == []
    assert not {tag for tag, _ in elements.tags} & {"script", "link", "iframe", "object"}
    assert all(source.startswith("data:image/") for source in elements.attributes("src"))
    inside = {target for target in elements.attributes("href") if target.startswith("#")}
    others = set(elements.attributes("href")) - inside
    assert all(re.match("explorer/(baseline|dj_synth).html#", target) for target in others)
    identifiers = elements.attributes("id")
    assert len(set(identifiers)) == len(identifiers)
    assert set(identifiers) >= {target[1:] for target in inside}
    assert "url(" not in html and "@import" not in html and "http" not in html
    assert "<b>bold" not in html and ODD in elements.text()
    assert all(attributes.get("alt") for tag, attributes in elements.tags if tag == "img")
    assert all(
        "aria-label" in attributes or attributes.get("aria-hidden") == "true"
        for tag, attributes in elements.tags
        if tag == "svg"
    )


def test_page_shows_the_values_of_the_files(page):
    text = read_page_text(page)
    for expected in (
        "After fine-tuning, dj_synth is better than baseline in VQA accuracy (+40.0 points)",
        "2 seeds (0 and 1)",
        "low_similarity_recaption_mapper",
        "19 recaptioned; unusable captions: empty 1",
        "text_length_filter −6",
        "training file −1 missing",
        "1 missing",
        "mgm",
        "9.8.7",
        "of 20 captions swapped between images on purpose were replaced or dropped",
        "of 32 correct captions were replaced or dropped",
        "finetuneGPU22.50 GiB21.00 GiB−7 %23.6 GiB",
        "finetunehost8.50 GiB9.00 GiB+6 %62.6 GiB",
        "The variance over images has 14 degrees of freedom for 15 images, and fewer if",
        "The variance over seeds has 1 degree of freedom for 2 seeds.",
        "five are recommended",
        "When the intervals are too narrow",
        "worse by chance",
    ):
        assert expected in text
    differences = len(re.findall(r"dj_synth − baseline, after", page.read_text(encoding="utf-8")))
    assert f"The {differences} intervals are not corrected for their number" in text
    assert "eaks" not in text, "no search for leaks, no section"
    assert ", with one seed." not in text and "for these two models" not in text and "not the data" not in text


def test_memory_is_drawn_with_peaks_and_predictions(experiments):
    baseline, dj_synth = map(draw_memory_timeline, experiments)
    assert [line.kind for line in baseline.chart.lines] == ["host", "host"], "without GPU and plan: only the host"
    assert {line.kind for line in dj_synth.chart.lines} == {"host", "host predicted", "gpu", "gpu predicted"}
    assert [(band.stage, band.left, band.width) for band in dj_synth.bands] == [
        ("pretrain", 0, 50),
        ("finetune", 50, 50),
    ]
    assert [meaning for _, meaning in dj_synth.bands[1].marks] == ["training begins", "saving begins"]
    assert dj_synth.chart.x_title.startswith("seconds")


def test_memory_keeps_the_highest_reading_and_joins_attempts(root):
    config = write_results(root, seeds=(0,))
    lines = ["attempt,time,seconds,phase,job_gib,host_gib,cgroup_gib"]
    lines += [f"{attempt},,{second},training,1.0,9.0," for attempt in (1, 2) for second in range(5000)]
    lines[7777] = "2,,2776,training,64.0,9.0,"
    (root / "baseline/pretrain/memory.csv").write_text("\n".join(lines) + "\n")
    timeline = draw_memory_timeline(load_experiments(config)[0])
    assert timeline.rows[0]["peak"] == "64.00 GiB"
    points = [tuple(map(float, point.split())) for point in timeline.chart.lines[0].path[1:].split("L")]
    at, height = min(points, key=lambda point: point[1])
    assert len(points) < 300 and height == pytest.approx(100 - 100 / 1.08, abs=0.02)
    assert at == pytest.approx(100 * (4999 + 2776) / (4999 + 4999 + 3), abs=0.02)
    assert timeline.chart.x_title.startswith("minutes")


def test_single_experiment_without_ground_truth(monkeypatch, root):
    text = read_page_text(write_report(monkeypatch, write_photos(root)))
    assert "With one seed, the 95 % intervals allow for other held-out images only. Another seed" in text
    assert "CLIPScore" in text and "What photos is for." in text
    for absent in (
        "VQA accuracy",
        "attribute",
        "better",
        "difference",
        "Rewritten captions",
        "Synthesis",
        "right answer",
    ):
        assert absent not in text


def test_captions_without_likelihoods_are_shown(monkeypatch, root):
    """Captioning servers return no likelihoods."""
    config = write_results(root, seeds=(0,))
    for file in (root / "dj_synth/synthesize").glob("*.jsonl"):
        text = re.sub(r'"log_likelihood": [-\d.]+', '"log_likelihood": null', file.read_text(encoding="utf-8"))
        file.write_text(re.sub(r'"caption_log_likelihood": \[[-\d.]+\]', '"caption_log_likelihood": []', text))
    text = read_page_text(write_report(monkeypatch, config))
    assert "19 recaptioned" in text and "log-likelihood" not in text


def test_experiments_on_other_images_have_own_galleries(monkeypatch, root):
    config, other = write_results(root, seeds=(7,)), write_photos(root)
    page = read_yaml(config)
    page["experiments"] += read_yaml(other)["experiments"]
    write_yaml(config, page)
    text = read_page_text(write_report(monkeypatch, config))
    assert "held-out images of shapes, evenly" in text and "held-out images of photos, evenly" in text


def test_panels_compare_common_metrics(experiments):
    differences = {"dj_synth": estimate_paired_difference(experiments[1].scores, experiments[0].scores)}
    panels = {panel.title: panel for panel in build_headline_panels(experiments, differences)}
    assert list(panels) == ["VQA accuracy", "Attribute accuracy", "CLIPScore"]
    assert [model.stage for model in panels["VQA accuracy"].models] == ["fine-tuning"]
    assert [model.stage for model in panels["CLIPScore"].models] == ["pretraining", "fine-tuning"]
    assert panels["VQA accuracy"].ceiling is None and panels["CLIPScore"].ceiling is not None
    for panel in panels.values():
        for model in panel.models:
            assert [level.experiment for level in model.levels] == ["baseline", "dj_synth"]
            [difference] = model.differences
            assert difference.verdict == "better" and len(difference.mark.seeds) == 2
            assert panel.zero < difference.mark.low <= difference.mark.at <= difference.mark.high <= 100
            for level in model.levels:
                assert 0 <= level.mark.low <= level.mark.at <= level.mark.high <= 100
                assert level.shuffled < level.mark.at


def test_panels_omit_unmeasured_metrics(root, experiments):
    compared = [load_experiments(write_photos(root))[0], experiments[0]]
    panels = {panel.title: panel for panel in build_headline_panels(compared, {})}
    assert [level.experiment for level in panels["VQA accuracy"].models[0].levels] == ["baseline"]
    assert [level.experiment for level in panels["CLIPScore"].models[0].levels] == ["photos", "baseline"]


@pytest.mark.parametrize(("low", "high", "kind"), [(0.01, 0.2, "better"), (-0.2, -0.01, "worse"), (-0.1, 0.1, "same")])
def test_verdict_follows_the_interval(experiments, low, high, kind):
    estimate = Estimate(9, 9, 2, (low + high) / 2, low, high)
    [verdict] = build_metric_verdicts(experiments, {"dj_synth": {"pretrain/own": {"clip_score": estimate}}})
    [sentence] = verdict.sentences
    titles = {name: getattr(sentence, name) for name in ("better", "worse", "same")}
    [statement] = titles.pop(kind)
    assert statement.startswith("CLIPScore") and ("(" in statement) == (kind != "same")
    assert set(map(tuple, titles.values())) == {()}


def test_gallery_marks_captions_and_answers(experiments):
    items = build_gallery(experiments, items=5)
    assert [item.identifier for item in items] == ["e00", "e03", "e06", "e09", "e12"]
    for item in items:
        assert [speaker.experiment for speaker in item.captions_by_experiment] == ["baseline", "dj_synth"]
        for speaker, better in zip(item.captions_by_experiment, (0, 6), strict=True):
            right = int(item.identifier[1:]) < 5 + better
            for caption in speaker.captions:
                assert caption.right == right
                assert re.fullmatch(r"(\d) of \1 right" if right else r"0 of \d right", caption.verdict)
        [question] = item.questions
        assert [answer.right for answer in question.answers] == [
            s.captions[0].right for s in item.captions_by_experiment
        ]
    assert len(build_gallery(experiments, items=100)) == IMAGES


def test_near_duplicate_clusters_are_counted_and_shown(monkeypatch, root, page):
    assert "ear-duplicate images" not in read_page_text(page)
    config = write_results(root, seeds=(0,))
    folder, dataset = root / "baseline/filter", root / "datasets/shapes"
    names = [f"p{number:03d}" for number in range(60)]
    write_jsonl(dataset / "pretrain.jsonl", [{"id": name, "images": [f"images/{name}.png"]} for name in names])
    write_yaml(folder / "config.yaml", {"image_root": str(dataset)})
    summary, [*others, _, second] = read_json(folder / "summary.json"), list(read_jsonl(folder / "dropped.jsonl"))
    first = {**second, "id": names[6]}
    match = {"copy_of": names[20], "distance": 3.0}
    write_jsonl(folder / "dropped.jsonl", [*others, first | match, second | match | {"distance": 1.0}])
    summary["operators"][3]["copies"] = {"clusters": {"3": 1}}
    write_json(folder / "summary.json", summary)
    page = write_report(monkeypatch, config).read_text(encoding="utf-8")
    elements = Elements(page)
    assert elements.attributes("id").count("near-duplicates") == 1
    assert "Clusters: 1; rows dropped: 2; clusters by size: 1 with 3 rows." in elements.text()
    assert "3 rows p020 kept p007 distance 1.0 p006 distance 3.0" in elements.text()


def test_an_unreadable_gallery_image_is_named(monkeypatch, root, capsys):
    config = write_results(root)
    (root / "datasets/shapes/images/e00.png").write_bytes(b"")
    with pytest.raises(SystemExit):
        write_report(monkeypatch, config)
    assert "e00.png has zero bytes; restore the image" in capsys.readouterr().err


def test_verdict_states_that_there_is_one_seed(monkeypatch, root):
    single = read_page_text(write_report(monkeypatch, write_results(root, (0,))))
    assert single.count(", with one seed.") == 2  # after pretraining and after fine-tuning
    statements = re.findall(r"[^.;|]*\b(?:better|worse)\b[^.;|]*", single)
    hints = ("for these two models", "not the data", "a lower loss does not mean a better model")
    assert statements and all(any(hint in part for hint in hints) for part in statements)
    assert "worse by chance" not in single


def test_the_note_on_seeds_explains_the_intervals(root, experiments):
    single = load_experiments(write_results(root, (0,)))
    assert "other held-out images only" in describe_seed_coverage(single)
    note = describe_seed_coverage(experiments)
    assert "other held-out images and other seeds" in note and "2 seeds (0 and 1)" in note
    assert "baseline with 2 and dj_synth with 1" in describe_seed_coverage([experiments[0], single[1]])


def make_experiment(*rows_by_run: list[dict]) -> SimpleNamespace:
    """Return an experiment with a run for each list of logged rows of stage 1."""
    runs = [SimpleNamespace(steps={"pretrain": rows}) for rows in rows_by_run]
    return SimpleNamespace(name="a", runs=runs)


def test_loss_curves_have_a_line_for_every_seed_and_a_mean():
    rows = [{"step": step, "loss": 2.0 - 0.01 * step} for step in range(1, 101)]

    losses = draw_loss_chart([make_experiment(rows, rows[:40])], "pretrain")
    assert [line.kind for line in losses.lines] == ["seed", "seed", "mean"]
    assert losses.ends == [("a", "1.605")]  # over the last two steps before the shorter run ends
    assert losses.x_ticks[-1].text == "100" and losses.x_ticks[-1].at == 100


def test_score_curves_have_a_band_over_the_seeds(experiments):
    assert [chart.quantity for chart in draw_score_charts(experiments, "pretrain")] == ["Loss of held-out answers"]
    loss, accuracy = draw_score_charts(experiments, "finetune")
    names = ["baseline", "dj_synth"]
    assert loss.ends == [(name, f"{4.5 / 29:.3f}") for name in names]
    kinds = [(kind, name) for kind in ("band", "mean") for name in names]
    assert [(line.kind, line.experiment) for line in accuracy.lines] == kinds
    heights = [100 - float(point.split()[1]) for point in re.findall(r"[\d.]+ [\d.]+", accuracy.lines[0].path)]
    # along the seeds' minima, then back along their maxima
    assert heights == pytest.approx([25, 50, 72.5, 82.5, 60, 35])
    assert "2.0 % of the stage's time" in loss.note
    # 15 questions, two seeds; dj_synth answers six more, and both judge the first question differently
    notes = [draw_score_charts([experiment], "finetune")[1].note for experiment in experiments]
    agreements = [re.search(r"on (\d+) of (\d+) answers", note) for note in notes]
    assert [match.groups() for match in agreements] == [("28", "30"), ("16", "30")]


def test_runs_without_questions_have_no_score_curves(monkeypatch, root, page):
    config = write_photos(root)
    for stage in ("pretrain", "finetune"):
        for name in ("scores.jsonl", "scored.jsonl"):
            write_jsonl(root / "photos" / stage / name, [])
    assert "Held-out answers during training" in page.read_text(encoding="utf-8")
    assert "Held-out answers during training" not in write_report(monkeypatch, config).read_text(encoding="utf-8")


def test_loss_that_is_not_a_number_leaves_a_gap():
    rows = [{"step": step, "loss": loss} for step, loss in enumerate((2.0, float("nan"), 1.0), start=1)]
    paths = [line.path for line in draw_loss_chart([make_experiment(rows)], "pretrain").lines]
    assert all("nan" not in path for path in paths)


def test_running_mean_keeps_a_straight_line():
    line = np.linspace(2, 1, 50)
    assert compute_running_mean(line, 6)[3:-3] == pytest.approx(line[3:-3])
    assert compute_running_mean(line, 0) == pytest.approx(line)


def test_versions_equal_those_in_the_records(experiments):
    assert list_versions(experiments) == [("data-juicer", "1.6.1"), ("numpy", "2.4.6"), ("torch", "9.8.7")]


def test_times_equal_those_measured_by_snakemake(root):
    experiments = load_experiments(write_results(root))
    for experiment, seconds in zip(experiments, (90, 4), strict=True):
        for run in experiment.runs:
            (run.stages["filter"] / "filter_data.benchmark.tsv").write_text("s\th:m:s\n6.0\t0:00:06\n")
            (run.stages["finetune"] / "finetune.benchmark.tsv").write_text(f"s\th:m:s\n{seconds}\t-\n")
    (experiments[1].runs[0].stages["synthesize"] / "synthesize_captions.benchmark.tsv").write_text("s\n4.5\n")
    table = build_times_table(experiments)
    assert table.columns == ["mean time per run", "filter", "synthesize", "finetune", "seeds"]
    # the second training was resumed and took at least the 75 s of its record
    assert {row.head: [cell.text for cell in row.cells] for row in table.rows} == {
        "baseline": ["6.0 s", "–", "1 min 30 s", "0, 1"],
        "dj_synth": ["6.0 s", "4.5 s", "1 min 15 s", "0, 1"],
    }
