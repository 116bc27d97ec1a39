"""dj_synth compared with the baseline: shared stages, consistent counts, and one caption per image."""

import pandas
import pytest

from dj2mgm.storage.files import read_json, read_jsonl
from edited_files import edit_file

DJ_SYNTH_RULES = {
    "synthesize_captions",
    "write_jsonl",
    "pretrain",
    "finetune",
    "generate_answers",
    "evaluate_clip",
    "evaluate_vqa",
    "write_explorers",
    "compare_experiments",
}
SUMMARY = "results/small/small/dj_synth/synthesize/summary.json"


def test_both_experiments_share_dataset_foundation_and_filters(fresh):
    counts = fresh.job_counts("dj_synth")
    once = {"make_dataset", "train_clip", "train_language_model", "assemble_model", "filter_data"}
    once |= {"synthesize_captions", "write_explorers", "compare_experiments"}
    assert {rule for rule, count in counts.items() if count == 1} == once
    assert {count for rule, count in counts.items() if rule not in once} == {2}


def test_two_seeds_and_a_random_subset_train_six_models(fresh):
    counts = fresh.job_counts("dj_synth", config=("seeds=[0,1]", "controls=[random]"))
    assert (counts["filter_data"], counts["synthesize_captions"]) == (1, 2)
    assert (counts["write_jsonl"], counts["pretrain"], counts["finetune"], counts["evaluate_vqa"]) == (6, 6, 6, 6)


def test_the_ablation_runs_the_recipe_once_without_each_operator(fresh):
    operators = "operators: [caption_log_likelihood_filter, words_num_filter]"
    file = fresh.folder / "config/studies/mine.yaml"
    file.write_text(f"experiment: dj_synth\ndesign: {{kind: ablation, {operators}}}\ncontrols: [random]\n")
    counts = fresh.job_counts("mine")
    assert counts["synthesize_captions"] == 3
    assert counts["filter_data"] == 2, "words_num_filter belongs to the filter stage"
    assert counts["compare_study"] == 1


def test_only_different_stages_run_after_the_baseline(finished):
    assert set(finished.job_counts("dj_synth")) <= DJ_SYNTH_RULES  # fewer rules if another test has run dj_synth


def test_both_train_on_equally_many_samples(synthesized):
    assert synthesized.job_counts("dj_synth") == {}, "it has finished"
    baseline, dj_synth = (
        read_json(synthesized.result("jsonl", name) / "summary.json") for name in ("baseline", "dj_synth")
    )
    assert baseline["pretrain"]["rows_out"] == dj_synth["pretrain"]["rows_out"]
    steps = [
        read_json(synthesized.result("pretrain", name) / "metrics.json")["steps"] for name in ("baseline", "dj_synth")
    ]
    assert steps[0] == steps[1]

    folder = synthesized.result("synthesize", "dj_synth")
    summary = read_json(folder / "summary.json")
    input_ids = [row["id"] for row in read_jsonl(synthesized.result("filter") / "filtered.jsonl")]
    kept_ids = [row["id"] for row in read_jsonl(folder / "synthesized.jsonl")]
    dropped_ids = [row["id"] for row in read_jsonl(folder / "dropped.jsonl") if row["event"] == "dropped"]
    assert sorted(kept_ids + dropped_ids) == sorted(input_ids)
    assert kept_ids == [identifier for identifier in input_ids if identifier in set(kept_ids)]
    assert (summary["rows_in"], summary["rows_kept"]) == (len(input_ids), len(kept_ids))
    counts = dj_synth["pretrain"]
    assert counts["rows_in"] == len(kept_ids) and counts["rows_out"] == len(kept_ids) + counts["repeated"]

    folder = synthesized.folder / "results/small/small/report"
    assert "dj_synth" in (folder / "report.html").read_text(encoding="utf-8")
    table = pandas.read_csv(folder / "comparison.csv")
    assert set(table["experiment"]) == {"baseline", "dj_synth"}
    assert table[table["experiment"] == "dj_synth"]["difference"].notna().any()


@pytest.mark.slow
def test_another_threshold_captions_only_new_rows(synthesized):
    folder, recipe = synthesized.result("synthesize", "dj_synth"), synthesized.folder / "config/recipes/dj_synth.yaml"
    first = {name: (folder / name).read_bytes() for name in ("synthesized.jsonl", "dropped.jsonl", "stats.jsonl")}
    below = read_json(folder / "summary.json")["operators"][0]["recaption"]["below"]

    with edit_file(recipe, "keep_fraction: &kept 0.5", "keep_fraction: &kept 0.6"):
        synthesized.run(SUMMARY)
        higher = read_json(folder / "summary.json")["operators"][0]["recaption"]
        assert higher["captioned"] == 0 and 0 < higher["cached"] == higher["below"] < below
    with edit_file(recipe, "keep_fraction: &kept 0.5", "keep_fraction: &kept 0.4"):
        synthesized.run(SUMMARY)
        lower = read_json(folder / "summary.json")["operators"][0]["recaption"]
        assert lower["cached"] >= below and lower["captioned"] == lower["below"] - lower["cached"] > 0
    synthesized.run(SUMMARY)
    assert {name: (folder / name).read_bytes() for name in first} == first
