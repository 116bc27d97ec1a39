"""Studies: the variants of each design, and errors that are refused before anything runs."""

import math
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

import keep_variant
from dj2mgm.errors import InputError
from dj2mgm.features.studies.axes import Interval, compute_axis_value, with_row_fraction
from dj2mgm.features.studies.studies_variants import list_sources
from dj2mgm.features.studies.study_inputs import (
    build_merge_settings,
    build_study_settings,
    has_diverged,
    list_batch_runs,
    list_study_experiments,
)
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.pages import build_page_settings
from dj2mgm.storage.files import write_yaml
from paths import PROJECT


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file into a copy of config/ in the current folder."""
    shutil.copytree(PROJECT / "config", tmp_path / "config")
    monkeypatch.chdir(tmp_path)

    def write(name: str, **values):
        Path(f"config/{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")

    return write


def read_runs(command_line: dict) -> Runs:
    return Runs(command_line, list_sources())


def owners(runs: Runs, name: str) -> dict[str, str]:
    run = runs.first_seed(name)
    return {stage: runs.reuse.find_owner(run, stage).experiment for stage in run.settings}


def grid(**space) -> dict:
    return {"kind": "grid", "space": space}


def operators(runs: Runs, name: str, stage: str = "filter") -> dict[str, dict | None]:
    return {
        key: value for step in runs.first_seed(name).settings[stage].recipe["process"] for key, value in step.items()
    }


def test_names_of_runs_of_shipped_studies_stay_the_same(write):
    runs = read_runs({})
    assert list_study_experiments(runs, "ablation") == [
        "dj_synth",
        "dj_synth-without-low_similarity_recaption_mapper",
        "dj_synth-without-batched_image_text_similarity_filter",
        "dj_synth-without-caption_log_likelihood_filter",
        "dj_synth-random",
    ]
    assert list_study_experiments(runs, "lora_sweep") == ["baseline", "baseline-lora-r8", "baseline-lora-r32"]
    assert list_study_experiments(runs, "lora_vs_full") == ["baseline-full", "baseline", "baseline-lora-all"]


def test_ablation_leaves_out_one_operator_at_a_time(write):
    names = ["words_num_filter", "text_length_filter"]
    write("studies/mine", design={"kind": "ablation", "operators": names}, controls=["random"])
    runs = read_runs({"without": ["image_integrity_filter"]})
    assert list_study_experiments(runs, "mine") == ["baseline", *(f"baseline-without-{name}" for name in names)]
    left = operators(runs, "baseline-without-words_num_filter")
    assert "words_num_filter" not in left and "image_integrity_filter" not in left and "text_length_filter" in left


def test_a_sweep_keeps_the_alpha_ratio_and_shares_stage_1(write):
    write("experiments/mine", finetune={"lora": {"r": 16, "alpha": 24}})
    ties = {"finetune.lora.alpha": "finetune.lora.r"}
    write("studies/ranks", experiment="mine", design=grid(**{"finetune.lora.r": [8, 16]}), proportional=ties)
    runs = read_runs({})
    assert list_study_experiments(runs, "ranks") == ["mine", "mine-lora-r8"], "rank 16 is the experiment's own"
    lora = runs.first_seed("mine-lora-r8").settings["finetune"].lora
    assert (lora.r, lora.alpha) == (8, 12)
    assert owners(runs, "mine-lora-r8")["pretrain"] == "baseline"
    assert owners(runs, "mine-lora-r8")["finetune"] == "mine-lora-r8"
    changes = [experiment["changes"] for experiment in build_study_settings(runs, "ranks")["experiments"]]
    assert changes == [{"finetune.lora.r": r, "finetune.lora.alpha": a} for r, a in ((16, 24), (8, 12))]


def test_variants_of_lora_override_the_command_line(write):
    runs = read_runs({"finetune": {"lora": {"r": "64", "alpha": "128", "dropout": "0.05"}, "max_steps": "100"}})
    full, lora, every_layer = (
        runs.first_seed(name).settings["finetune"].file_content()
        for name in list_study_experiments(runs, "lora_vs_full")
    )
    assert every_layer == lora | {"lora": lora["lora"] | {"targets": "all"}}
    assert full["lora"] is None and lora["lora"]["dropout"] == 0.05
    changed = {key for key in full if full[key] != lora.get(key)}
    assert changed == {"lora", "deepspeed", "deepspeed_choices"}
    assert owners(runs, "baseline-full")["pretrain"] == "baseline"
    swept = [runs.first_seed(name).settings["finetune"] for name in list_study_experiments(runs, "lora_sweep")]
    assert [settings.lora.r for settings in swept] == [64, 8, 16, 32]
    assert {(settings.lora.alpha / settings.lora.r, settings.max_steps) for settings in swept} == {(2.0, 100)}


def test_variants_can_change_arguments_sources_and_operators(write):
    changes = {
        "strict": {"recipe.words_num_filter.max_num": 14, "recipe.text_length_filter": False},
        "mixed": {"sources.my.jsonl": 0.5, "finetune.epochs": 2},
    }
    write("studies/mine", design={"kind": "list", "variants": changes})
    with pytest.raises(InputError, match="sources"):
        read_runs({}).experiments.require("mine")
    write("studies/mine", design={"kind": "list", "variants": {"strict": changes["strict"]}})
    runs = read_runs({})
    before, after = (operators(runs, name) for name in ("baseline", "baseline-strict"))
    assert after["words_num_filter"] == before["words_num_filter"] | {"max_num": 14}
    assert before.keys() - after.keys() == {"text_length_filter"}
    assert owners(runs, "baseline-strict")["filter"] == "baseline-strict"
    shown = [experiment["changes"] for experiment in build_study_settings(runs, "mine")["experiments"]]
    assert shown[1] == changes["strict"] and shown[0]["recipe.text_length_filter"] is True


def test_operators_that_are_left_out_can_be_enabled_again(write):
    write("experiments/less", without=["words_num_filter", "text_length_filter"])
    design = {"kind": "list", "variants": {"on": {"recipe.words_num_filter": True}}}
    write("studies/mine", experiment="less", design=design)
    design = {"kind": "ablation", "operators": ["words_num_filter", "image_size_filter"]}
    write("studies/others", experiment="less", design=design)
    runs = read_runs({})
    assert runs.experiments.configs["less-on"].without == ["text_length_filter"]
    assert list_study_experiments(runs, "others") == ["less", "less-without-image_size_filter"], "one changes nothing"


def test_the_order_of_changes_of_a_variant_has_no_effect(write):
    section, part = {"finetune.lora": {"r": 4}}, {"finetune.lora.alpha": 3}
    words = {"without": ["words_num_filter"]}, {"recipe.text_length_filter": False}
    variants = {"one": section | part | words[0] | words[1], "two": words[1] | words[0] | part | section}
    for name, changes in variants.items():
        write(f"studies/of_{name}", design={"kind": "list", "variants": {name: changes}})
    runs = read_runs({})
    first, second = (runs.experiments.configs[f"baseline-{name}"] for name in variants)
    assert first == second and (first.finetune.lora.r, first.finetune.lora.alpha) == (4, 3)
    assert first.without == ["words_num_filter", "text_length_filter"]
    assert runs.experiments.variants["baseline-one"].settings["finetune.lora"] == {"r": 4}


def test_variants_share_stages_with_each_other(write):
    space = {"recipe.words_num_filter.max_num": [12, 14], "finetune.lora.r": [4, 8]}
    write("studies/mine", design=grid(**space))
    runs = read_runs({})
    first, second = runs.experiments.variant_names["mine"][:2]
    shared = owners(runs, second)
    assert (shared["filter"], shared["pretrain"], shared["finetune"]) == (first, first, second)


def test_random_rows_of_a_study_have_the_references_recipe(write):
    write("experiments/mine", recipe="mine", arguments={"words_num_filter": {"max_num": 12}})
    recipe = {"process": [{"image_integrity_filter": {}}, {"words_num_filter": {"max_num": 14}}]}
    write("recipes/mine", **recipe)
    write("studies/ranks", experiment="mine", design=grid(**{"finetune.lora.r": [4]}), controls=["random"])
    runs = read_runs({})
    assert list_study_experiments(runs, "ranks")[-1] == "mine-random"
    assert operators(runs, "mine-random") == operators(runs, "baseline")
    assert operators(runs, "mine")["words_num_filter"] == {"max_num": 12}


def test_a_sample_covers_each_axis_evenly(write):
    space = {
        "finetune.learning_rate": {"low": 1e-5, "high": 1e-3, "log": True},
        "finetune.lora.r": "auto",
        "finetune.lr_scheduler": ["cosine", "linear"],
    }
    write("studies/mine", design={"kind": "sample", "space": space, "points": 8})
    runs = read_runs({})
    points = [runs.experiments.variants[name].settings for name in runs.experiments.variant_names["mine"]]
    assert len(points) == 8 == len({*runs.experiments.variant_names["mine"]})
    strata = [math.floor(8 * math.log(point["finetune.learning_rate"] / 1e-5) / math.log(100)) for point in points]
    assert sorted(strata) == list(range(8)), "one point in each eighth of the axis"
    ranks = [point["finetune.lora.r"] for point in points]
    assert all(isinstance(rank, int) and 4 <= rank <= 64 for rank in ranks)
    assert [point["finetune.lr_scheduler"] for point in points].count("linear") == 4
    assert [
        runs.experiments.variants[name].settings for name in read_runs({}).experiments.variant_names["mine"]
    ] == points


def test_a_mixture_varies_shares_of_one_split(write, tmp_path):
    source = {"format": "data_juicer", "path": "rows.jsonl", "split": "finetune"}
    (tmp_path / "rows.jsonl").touch()
    sources = {"a": source, "b.c": source, "d": source, "pairs": source | {"split": "pretrain"}}
    write("datasets/mixed", sources=sources)
    write("studies/mine", design={"kind": "sample", "points": 8, "mixture": {"sources": ["a", "b.c"], "total": 0.6}})
    runs = read_runs({"dataset": "mixed"})
    changes = [runs.experiments.variants[name].settings for name in runs.experiments.variant_names["mine"]]
    shares = sorted(changed["shares.a"] for changed in changes)
    assert shares == pytest.approx([0.6 * (stratum + 0.5) / 8 for stratum in range(8)], abs=6e-4)
    assert all(sum(changed.values()) == pytest.approx(0.6) for changed in changes)
    name = runs.experiments.variant_names["mine"][0]
    assert runs.first_seed(name).settings["jsonl"].shares == {
        "a": changes[0]["shares.a"],
        "b.c": changes[0]["shares.b.c"],
    }
    assert owners(runs, name)["pretrain"] == "baseline", "stage 1 trains on pairs, whose amounts stay"
    for design, message in [
        ({"sources": ["a", "e"]}, "design.mixture: shares: the dataset mixed has no source 'e'"),
        ({"sources": ["a", "pairs"]}, "expected sources of one split, found a: finetune, pairs: pretrain"),
    ]:
        write("studies/mine", design={"kind": "search", "mixture": design, "trainings": 4})
        with pytest.raises(InputError, match=message):
            list_study_experiments(read_runs({"dataset": "mixed"}), "mine")
    for config, message in [
        ({"shares": {"a": 0.5, "d": 0.6}}, "shares: those of the split finetune add up to 1.1, which exceeds 1"),
        ({"shares": {"a": 0.5}, "sources": {"a": 2.0}}, "shares.a: sources.a states an amount, too"),
    ]:
        with pytest.raises(InputError, match=message):
            list_study_experiments(read_runs({"dataset": "mixed"} | config), "baseline")


def test_merged_mixtures_have_a_training_for_each_source(write, tmp_path):
    source = {"format": "data_juicer", "path": "rows.jsonl", "split": "finetune"}
    (tmp_path / "rows.jsonl").touch()
    sources = {
        "a": source,
        "b.c": source,
        "pairs": source | {"split": "pretrain"},
        "more": source | {"split": "pretrain"},
    }
    write("datasets/mixed", sources=sources)
    mixture = {"sources": ["a", "b.c"], "total": 0.6}
    write("studies/mine", design={"kind": "sample", "points": 6, "mixture": mixture, "merged": 50})
    runs = read_runs({"dataset": "mixed"})
    *mixed, only_a, only_b = runs.experiments.variant_names["mine"]
    assert (only_a, only_b) == ("baseline-only-a", "baseline-only-b.c")
    assert runs.first_seed(only_b).settings["jsonl"].shares == {"a": 0.0, "b.c": 0.6}
    settings = build_merge_settings(runs, "mine")
    folders = {"a": f"results/mixed/tiny/{only_a}/finetune", "b.c": f"results/mixed/tiny/{only_b}/finetune"}
    assert settings.sources == folders
    assert [mixture.variant for mixture in settings.mixtures[:7]] == [*mixed, None]
    assert all(sum(mixture.shares.values()) == pytest.approx(0.6) for mixture in settings.mixtures)
    different = {tuple(mixture.shares.values()) for mixture in settings.mixtures}
    assert 48 < len(different) == len(settings.mixtures) <= 56, "shares have three decimals, so some draws are equal"
    for design, config, message in [
        ({"sources": ["pairs", "more"]}, {}, "the sources must have instructions, not pairs; remove `merged`"),
        (mixture, {"finetune": {"lora": None}}, "design.merged: baseline trains no LoRA; set finetune.lora"),
    ]:
        write("studies/mine", design={"kind": "sample", "points": 6, "mixture": design, "merged": 50})
        with pytest.raises(InputError, match=message):
            build_merge_settings(read_runs({"dataset": "mixed"} | config), "mine")


def test_a_curve_shares_the_filter_and_reduces_sources(write):
    write("studies/mine", design={"kind": "curve", "fractions": [0.25, 0.5]})
    runs = read_runs({})
    assert list_study_experiments(runs, "mine") == ["baseline", "baseline-rows-0.25", "baseline-rows-0.5"]
    quarter = runs.first_seed("baseline-rows-0.25")
    assert quarter.settings["jsonl"].used_fraction == 0.25
    assert quarter.settings["finetune"].min_steps == round(runs.first_seed("baseline").config.finetune.min_steps / 4)
    assert owners(runs, "baseline-rows-0.25")["filter"] == "baseline"
    write("studies/mine", design={"kind": "curve", "sources": ["a"]})
    with pytest.raises(InputError, match="the dataset shapes has no source 'a'"):
        list_study_experiments(read_runs({}), "mine")


def test_studies_with_equal_variants_share_their_runs(write):
    for name in ("one", "two"):
        write(f"studies/{name}", design={"kind": "list", "variants": {"small": {"finetune.lora.r": 4}}})
    runs = read_runs({})
    assert list_study_experiments(runs, "one") == list_study_experiments(runs, "two") == ["baseline", "baseline-small"]
    write("studies/two", design={"kind": "list", "variants": {"small": {"finetune.lora.r": 8}}})
    runs = read_runs({})
    assert list_study_experiments(runs, "one") == ["baseline", "baseline-small"]
    with pytest.raises(InputError, match="two.yaml: config/studies/one.yaml has a variant baseline-small with"):
        list_study_experiments(runs, "two")


def test_a_short_run_keeps_epochs_and_schedule(write):
    write("experiments/mine", pretrain={"max_steps": 30}, finetune={"min_steps": 0})
    parent = read_runs({}).experiments.configs["mine"]
    changes = with_row_fraction(parent, {"finetune.max_steps": 7, "finetune.lora.r": 4}, 0.25)
    assert changes == {
        **{"finetune.max_steps": 2, "finetune.lora.r": 4, "jsonl.fraction": 0.25},
        **{"pretrain.max_steps": 8, "pretrain.min_steps": round(parent.pretrain.min_steps / 4)},
    }


def test_a_search_trains_short_runs(write):
    space = {"recipe.words_num_filter.max_num": [12, 14]}
    design = {"kind": "search", "space": space, "rungs": [0.5, 1.0]}
    write("studies/mine", design=design)
    search = read_runs({}).experiments.sources["mine"].search
    trial = {"name": "baseline-0123456789", "changes": {"recipe.words_num_filter.max_num": 12}}
    for number, (step, fraction) in enumerate([("explore", 0.5), ("promote", 1.0)], start=1):
        record = {"step": step, "fraction": fraction, "trials": [trial], "seeds": [0], "trainings": 24}
        write_yaml(f"{search.folder}/batch-{number}/trials.yaml", record)
    runs = read_runs({})
    assert list_study_experiments(runs, "mine") == ["baseline", trial["name"]], "the only whole run"
    short, whole = (runs.first_seed(f"{trial['name']}{end}") for end in ("-0.5", ""))
    assert short.settings["jsonl"].used_fraction == 0.5
    assert owners(runs, trial["name"])["filter"] == f"{trial['name']}-0.5", "the filter runs once"
    assert operators(runs, trial["name"])["words_num_filter"]["max_num"] == 12
    assert whole.config.jsonl.fraction == 1


def test_a_search_does_not_continue_without_its_experiment(write):
    write("studies/mine", design={"kind": "search", "space": {"finetune.lora.r": "auto"}})
    runs = read_runs({})
    log = Path(runs.find_stage_folder(runs.first_seed("baseline"), "finetune"), "finetune.log")
    log.parent.mkdir(parents=True)
    log.write_text("training diverged by step 3", encoding="utf-8")
    assert has_diverged(runs, "baseline")
    assert list_batch_runs(runs, runs.experiments.sources["mine"].search, 0) == ["baseline"], "its training fails"


RANKS = grid(**{"finetune.lora.r": [8]})


ERRORS = [
    ({}, "design: the key is missing"),
    ({"design": RANKS, "pages": {}}, "pages: unknown key; did you mean 'page'"),
    (
        {"design": {"kind": "gridd"}},
        "expected ablation, curve, grid, list, sample or search, found 'gridd'",
    ),
    ({"design": RANKS, "experiment": "basline"}, "experiment: there is no experiment 'basline'; did you mean"),
    ({"design": grid(**{"finetun.lora.r": [8]})}, "finetun: unknown key; did you mean 'finetune'"),
    ({"design": grid(**{"finetune.lora.r": [0]})}, "finetune.lora.r: expected an integer from 1"),
    ({"design": grid(**{"finetune.lora.r": []})}, "design.space.finetune.lora.r: expected a list with at least"),
    (
        {"design": grid(**{"finetune.lora": [None], "finetune.lora.r": [8]})},
        "finetune.lora contains finetune.lora.r",
    ),
    ({"design": grid(**{"recipe.word_num_filter.max_num": [8]})}, "'word_num_filter'; did you mean 'words_num_fil"),
    ({"design": grid(**{"recipe.words_num_filter.max": [8]})}, "no argument 'max'; the nearest one is 'max_num'"),
    ({"design": grid(**{"recipe.words_num_filter": [8]})}, "recipe.words_num_filter: expected true or false"),
    (
        {"design": grid(**{"recipe.words_num_filter.min_num": [9], "recipe.words_num_filter.max_num": [8]})},
        "min_num 9 is above max_num 8",
    ),
    ({"design": grid(**{"experiment": ["dj_synth"]})}, "experiment: the setting applies to all experiments"),
    (
        {"design": grid(**{"finetune.lora.r": [*range(1, 41)], "finetune.lora.alpha": [*range(1, 41)]})},
        "the grid has 1600 variants, but at most 1000 are possible",
    ),
    ({"design": {"kind": "list", "variants": {"../x": {"finetune.epochs": 2}}}}, "../x: must be a name"),
    (
        {"design": {"kind": "list", "variants": {"A": {"finetune.epochs": 2}, "a": {"finetune.epochs": 3}}}},
        "cannot tell baseline-A and baseline-a apart",
    ),
    ({"design": {"kind": "search", "space": {"evaluate.judge_clip": ["a", "b"]}}}, "a search cannot vary it"),
    ({"design": RANKS, "proportional": {"finetune.lora.r": "finetune.lora.r"}}, "the variants set finetune.lo"),
    (
        {"design": RANKS, "proportional": {"finetune.epochs": "finetune.max_steps"}},
        "no variant sets finetune.max",
    ),
    ({"design": RANKS, "proportional": {"finetune.deepspeed": "finetune.lora.r"}}, "must be numbers"),
    ({"design": RANKS, "page": {"reference": "lora-r9"}}, "page.reference: no variant is 'lora-r9'; did you mean"),
    ({"design": {"kind": "sample", "points": 2}}, "design: nothing varies; state `space` or `mixture`"),
    (
        {"design": {"kind": "sample", "points": 2, "space": {"finetune.lora.r": [4, 8]}, "merged": 5}},
        "design.merged: models are merged for mixtures; state `mixture` without `space`",
    ),
    (
        {"design": {"kind": "sample", "points": 5, "mixture": {"sources": ["a", "b"]}, "merged": 5}},
        "design.points: 5 trained mixtures cannot show that merging orders mixtures as training does",
    ),
    (
        {"design": {"kind": "search", "goals": {"vqa_acuracy": 1}}},
        "design.goals.vqa_acuracy: unknown key; did you mean 'vqa_accuracy'",
    ),
    ({"design": {"kind": "search", "goals": {"gpu_hours": 0.01}}}, "design.goals.gpu_hours: expected"),
    ({"design": {"kind": "search", "goals": {"gpu_hours": -1}}}, "gpu_hours alone chooses the cheapest variant"),
    (
        {"design": {"kind": "search", "space": {"finetune.lora.r": {"low": 4, "high": 8, "step": 2}}}},
        "design.space.finetune.lora.r.step: unknown key; known are high, log, low",
    ),
    (
        {"design": {"kind": "search", "space": {"recipe.text_length_filter.max_len": {"low": 10.5, "high": 90.5}}}},
        r"with recipe.text_length_filter.max_len: [\d.]+: .*'max_len' must be a whole number",
    ),
    (
        {"design": {"kind": "search", "space": {"jsonl.fraction.a": [0.5, 0.7]}, "rungs": [0.5, 1.0]}},
        "jsonl.fraction.a: another change replaces fraction as a whole",
    ),
    (
        {"design": {"kind": "sample", "points": 8, "space": {"finetune.lora.r": [4, 8]}}},
        "design.points: the space has 2 points, fewer than 8; state 2",
    ),
    (
        {
            "design": {
                "kind": "list",
                "variants": {f"r{rank}": {"finetune.lora.r": rank} for rank in range(1, 1002)},
            }
        },
        "design.variants: 1001 variants, but at most 1000 are possible",
    ),
    (
        {
            "design": {
                "kind": "list",
                "variants": {"a": {"finetune.lora.r": 4}, "b": {"gpus": 2}, "c": {"finetune": {"lora": {"r": 4}}}},
            }
        },
        "design.variants.c: it changes the same as a; remove one of them",
    ),
    (
        {"design": {"kind": "search", "rungs": [0.5, 0.25, 1.0]}},
        r"design.rungs: expected rising shares up to 1, as \[0.125, 0.5, 1.0\]",
    ),
    (
        {"design": {"kind": "search", "space": {"finetune.lora.r": "auto"}, "trainings": 1, "rungs": [0.125, 1.0]}},
        "design.trainings: 1 is less than the 1.125 that one variant costs in all rungs; raise it",
    ),
    ({"design": {}}, "design.kind: the key is missing; expected ablation, curve, grid, list, sample or search"),
    (
        {"design": {"kind": "search", "space": {"shares.a": [0.1, 0.2]}, "mixture": {"sources": ["a", "b"]}}},
        "design.space.shares.a: `mixture` varies the shares, too; keep one of them",
    ),
    (
        {"design": {"kind": "sample", "points": 2, "space": {"finetune.lora.r": {"low": 9, "high": 4}}}},
        "low, 9, must be below high, 4",
    ),
    (
        {"design": {"kind": "sample", "points": 2, "space": {"finetune.epochs": "auto"}}},
        "finetune.epochs: the setting declares no range; state {low, high}",
    ),
    (
        {"experiment": "no_lora", "design": RANKS, "proportional": {"finetune.lora.alpha": "finetune.lora.r"}},
        "the experiment's finetune.lora.alpha and finetune.lora.r must be numbers",
    ),
]


def test_an_error_in_a_study_fails_only_its_target(write):
    """All studies are in one configuration, which is read once."""
    write("experiments/no_lora", finetune={"lora": None})
    for number, (values, _) in enumerate(ERRORS):
        write(f"studies/mine{number}", **values)
    runs = read_runs({})
    for number, (values, message) in enumerate(ERRORS):
        with pytest.raises(InputError) as failure:
            list_study_experiments(runs, f"mine{number}")
        assert re.search(message, str(failure.value)), values
        assert f"config/studies/mine{number}.yaml" in str(failure.value) or "baseline-" in str(failure.value)
    build_page_settings(runs, list_study_experiments(runs, "lora_sweep"))


def test_names_of_studies_and_variants_are_unique(write):
    write("experiments/baseline-full", description="mine")
    write("experiments/ablation", description="mine")
    for name in ("baseline-lora-r8", "plan", "filter_data", "datasets"):
        write(f"studies/{name}", design=RANKS)
    runs = read_runs({})
    assert runs.first_seed("baseline-full").config.description == "mine"
    with pytest.raises(InputError, match="baseline-full.yaml: config/studies/lora_vs_full.yaml uses this name"):
        list_study_experiments(runs, "lora_vs_full")
    with pytest.raises(InputError, match="baseline-lora-r8.yaml: config/studies/lora_sweep.yaml uses this name"):
        list_study_experiments(runs, "lora_sweep")
    expected = "config/studies/ablation.yaml: ablation is an experiment (config/experiments/ablation.yaml); rename"
    assert [warning for warning in runs.experiments.list_warnings() if expected in warning]
    for name in ("plan", "filter_data", "datasets"):
        with pytest.raises(InputError, match=f"{name} is a rule or a folder of results of the workflow; rename"):
            runs.experiments.require(name)


def test_settings_of_a_study_are_refused_on_the_command_line(write):
    with pytest.raises(InputError, match="'ablation' is a target; change its file, config/studies/ablation.yaml"):
        read_runs({"ablation": {"operators": []}})


def test_a_kept_variant_has_its_settings_and_fresh_seeds(write, monkeypatch, capsys):
    write("experiments/mine", finetune={"epochs": 2}, without=["words_num_filter"])
    variants = {
        "strict": {
            "recipe.text_length_filter.min_len": 6,
            "finetune.lora.r": 4,
            "recipe.image_integrity_filter": False,
        },
        "full": {"finetune.lora": None, "finetune.learning_rate": 2e-5},
        "on": {"recipe.words_num_filter": True},
    }
    ties = {"finetune.lora.alpha": "finetune.lora.r"}
    write("studies/kinds", experiment="mine", design={"kind": "list", "variants": variants}, proportional=ties)
    page = build_study_settings(read_runs({"seeds": [0, 4], "model": "tiny-llava"}), "kinds")
    for name in ("full", "on", "strict"):
        command = f"snakemake decide --config model=tiny-llava experiment=kept-{name}"
        if name == "strict":  # as if it were a search's trial that drops rows
            trial = {"name": "mine-strict", "changes": {}, "scores": [0.5], "fewer_rows": True}
            page["study"]["search"] = {"progress": "", "rungs": [1.0], "trials": [trial]}
            command = "the other commands at the end of the search's page"
        write_yaml("results/kinds/config.yaml", page)
        arguments = ["keep_variant.py", "results/kinds/config.yaml", f"mine-{name}", f"kept-{name}"]
        monkeypatch.setattr(sys, "argv", arguments)
        keep_variant.main()
        assert capsys.readouterr().out.endswith(f"next: {command}\n")
        with pytest.raises(SystemExit):
            keep_variant.main()
    configs = read_runs({"model": "tiny-llava"}).experiments.configs
    for name in variants:
        config, own = configs[f"kept-{name}"].model_dump(), configs[f"mine-{name}"].model_dump()
        assert config.pop("seeds") == [5, 6]
        assert config.pop("controls") == (["random"] if name == "strict" else [])
        assert "of the study kinds" in config.pop("description")
        assert config == {key: value for key, value in own.items() if key not in ("seeds", "description", "controls")}


STRICT = {"recipe.words_num_filter.max_num": 14}


def write_variants(write, study: str, **variants: dict) -> None:
    write(f"studies/{study}", experiment="baseline", controls=[], design={"kind": "list", "variants": variants})


def with_rate(rate: float) -> dict:
    return STRICT | {"finetune.learning_rate": rate}


def run_as_snakemake(runs: Runs, *names: str) -> dict[tuple[str, str], str]:
    """Write the settings of all stages to the folders of their owners, and return the owners."""
    owner_folders = {}
    for name in names:
        run = runs.first_seed(name)
        Path("results", run.folder).mkdir(parents=True, exist_ok=True)
        owner_folders |= {(name, stage): runs.find_stage_folder(run, stage) for stage in run.settings}
        for stage in run.settings:
            settings = runs.reuse.find_owner(run, stage).settings[stage]
            write_yaml(Path(runs.find_stage_folder(run, stage), "config.yaml"), settings.file_content())
    return owner_folders


def test_studies_with_a_common_variant_train_once(write):
    write_variants(write, "one", a=with_rate(1e-5), b=with_rate(1e-4))
    write_variants(write, "two", b=with_rate(1e-4), c=with_rate(1e-3))
    runs, names = read_runs({}), ("baseline", "baseline-b", "baseline-c")
    first = run_as_snakemake(runs, *names)
    assert run_as_snakemake(read_runs({}), *names) == first, "a job of the same command"
    runs.reuse.write_notes(runs.iterate_with_results())
    assert run_as_snakemake(read_runs({}), *names) == first, "the next command"
    write_variants(write, "all", c=with_rate(1e-3), b=with_rate(1e-4), a=with_rate(1e-5))
    assert run_as_snakemake(read_runs({}), *names) == first


def test_a_stage_with_results_keeps_its_folder(write):
    write_variants(write, "one", a=with_rate(1e-5) | {"recipe.words_num_filter.max_num": 12}, b=with_rate(1e-4))
    first = run_as_snakemake(read_runs({}), "baseline", "baseline-a", "baseline-b")
    write_variants(write, "one", a=with_rate(1e-5), b=with_rate(1e-4))  # both have the recipe of b now
    second = run_as_snakemake(read_runs({}), "baseline", "baseline-b")
    assert second.items() <= first.items()
    write_variants(write, "one", a=with_rate(1e-5) | {"recipe.words_num_filter.max_num": 13})
    write_variants(write, "two", b=with_rate(1e-4) | {"recipe.words_num_filter.max_num": 13})
    assert owners(read_runs({}), "baseline-a")["filter"] == "baseline-a", "b has run with other settings"
    Path("results/shapes/tiny/baseline-b/filter/config.yaml").write_text("")  # damaged
    assert owners(read_runs({}), "baseline-a")["filter"] == "baseline-a"


def test_jobs_have_the_owners_of_their_command(write):
    rates = {"a": {"finetune.learning_rate": 1e-5}, "b": {"finetune.learning_rate": 1e-4}}
    write_variants(write, "one", **rates)  # the filter belongs to the baseline, as recorded in a and b
    runs = read_runs({})
    run_as_snakemake(runs, "baseline", "baseline-a", "baseline-b")
    runs.reuse.write_notes(runs.iterate_with_results())
    write_variants(write, "one", **{name: STRICT | rate for name, rate in rates.items()})
    write_variants(write, "two", z=with_rate(1e-3))
    names = ("baseline", "baseline-a", "baseline-b", "baseline-z")
    assert run_as_snakemake(read_runs({}), *names) == run_as_snakemake(read_runs({}), *names)


def test_integer_ends_of_axes(write):
    axis = Interval(low=1, high=3)
    counts = Counter(compute_axis_value(axis, (number + 0.5) / 300) for number in range(300))
    assert counts == {1: 100, 2: 100, 3: 100}, "ends are as likely as other integers"
    assert [compute_axis_value(Interval(low=4, high=64, log=True), share) for share in (0, 1)] == [4, 64]
    space = {"finetune.learning_rate": {"low": 0, "high": 1}, "finetune.lora.r": {"low": 4, "high": 8}}
    write("studies/mine", design={"kind": "sample", "points": 4, "space": space})
    runs = read_runs({})
    changes = [runs.experiments.variants[name].settings for name in list_study_experiments(runs, "mine")[1:]]
    assert len({change["finetune.learning_rate"] for change in changes}) == 4, "a setting with decimals"
    assert all(isinstance(change["finetune.lora.r"], int) for change in changes)
