"""Results of another dataset or model are not replaced without request; targets such as `crate` start no training."""

import re
import shutil

import pytest

from dj2mgm.storage.files import write_json, write_text, write_yaml
from small_project import copy_project
from source_files import PAIR


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("other"))


@pytest.fixture
def fresh(copied):
    """Return a copy of one project without results for each test."""
    shutil.rmtree(copied.folder / "results", ignore_errors=True)
    return copied


def leave_results(project, dataset, model="small", folder="baseline", stage="finetune"):
    """Write the files of a finished training stage that state its sources."""
    stage = project.folder / "results" / folder / stage
    write_yaml(stage / "config.yaml", {"labels": {"dataset": dataset, "model": model}})
    write_json(stage / "metrics.json", {})


def refusal(project, *arguments, config=()) -> str:
    printed = project.run(*arguments, "--dry-run", ok=False, config=config)
    assert "Traceback" not in printed and "Job stats" not in printed
    return re.sub(r"\s+", " ", printed)


@pytest.mark.parametrize("target", ["crate", "dj_synth --forceall", "results/baseline/filter/filtered.jsonl"])
def test_another_datasets_results_are_not_replaced(fresh, target):
    leave_results(fresh, "shapes")
    printed = refusal(fresh, *target.split())
    assert "results/baseline: these results were made with the dataset shapes, and this command would" in printed
    assert "`--config dataset=shapes`" in printed
    remedies = "`--config results=small` to write the new ones to results/small; `--config overwrite=true`"
    assert (remedies in printed) == (target != "crate"), "a crate makes no results"


def test_all_three_remedies_work(fresh):
    leave_results(fresh, "shapes")
    printed = fresh.run("baseline", "--dry-run", config=("results=small",))
    assert "--output-dir results/small/baseline/finetune" in printed and "results/small/baseline/report/" in printed
    assert "results/baseline/" not in printed
    for setting in ("overwrite=true", "dataset=shapes"):
        assert "--output-dir results/baseline/finetune" in fresh.run("baseline", "--dry-run", config=(setting,))


def test_every_target_writes_below_the_results_setting(fresh):
    targets = ("ablation", "lora_sweep", "lora_vs_full", "finetune_minimal", "attention_benchmark", "analyze")
    printed = fresh.run(*targets, "dj_synth", "--dry-run", config=("results=apart", "seeds=[0,1]"))
    folders = set(re.findall(r"--output-dir results/([^/ \n]+)", printed))
    assert folders == {"apart", "foundation", "models", "datasets"}


def test_the_message_names_model_and_dataset_as_given(fresh):
    """Make results of an earlier version, whose label contains only a folder's name."""
    dataset_folder = fresh.folder / "photos"
    write_text(dataset_folder / "rows.jsonl", '{"id": "1"}\n')
    settings = {"pretrain": {"file": f"{dataset_folder}/rows.jsonl", "images": str(dataset_folder)}}
    write_yaml(fresh.folder / "results/datasets/photos/config.yaml", settings)
    leave_results(fresh, "photos", "tiny", stage="pretrain")
    printed = refusal(fresh, "baseline")
    assert "made with the dataset photos and the model tiny" in printed
    assert f"`--config dataset={dataset_folder} model=tiny`" in printed


def test_checkpoints_or_filter_results_alone_are_protected(fresh):
    stage = fresh.result("pretrain")
    write_yaml(stage / "config.yaml", {"labels": {"dataset": "shapes", "model": "small"}})
    assert fresh.run("baseline", "--dry-run"), "it has nothing to lose yet"
    write_text(stage / "checkpoints/checkpoint-20/trainer_state.json", "{}")
    assert "the dataset shapes" in refusal(fresh, "baseline")
    (stage / "checkpoints/checkpoint-20/trainer_state.json").rename(stage / "config.log")
    (stage / "checkpoints/checkpoint-20").rmdir()
    write_json(fresh.result("filter") / "summary.json", {"input": {"path": "results/datasets/shapes/pretrain.jsonl"}})
    assert "the dataset shapes" in refusal(fresh, "baseline")


def test_shared_stages_protect_every_run_that_uses_them(fresh):
    leave_results(fresh, "shapes", folder="other")
    write_yaml(fresh.folder / "results/dj_synth/finetune/stage.yaml", {"same_as": "results/other/finetune"})
    assert "results/dj_synth: these results were made with the dataset shapes" in refusal(fresh, "dj_synth")
    leave_results(fresh, "shapes", folder="baseline/seed-1")
    assert fresh.run("baseline", "--dry-run")
    assert "results/baseline/seed-1: these" in refusal(fresh, "baseline", config=("seeds=[0,1]",))


def test_a_folder_with_the_same_name_is_another_dataset(fresh):
    for parent_folder in ("a", "b"):
        write_text(fresh.folder / parent_folder / "photos/rows.jsonl", PAIR)
    settings = {"pretrain": {"file": "a/photos/rows.jsonl", "images": "a/photos"}}
    write_yaml(fresh.folder / "results/datasets/photos/config.yaml", settings)
    write_json(fresh.folder / "results/datasets/photos/summary.json", {})
    printed = refusal(fresh, "baseline", config=("dataset=b/photos",))
    assert "results/datasets/photos: it was made from a/photos, and this command would replace it" in printed
    assert fresh.run("baseline", "--dry-run", config=("dataset=./a/photos",))
    (fresh.folder / "a").rename(fresh.folder / "moved")
    assert fresh.run("baseline", "--dry-run", config=("dataset=moved/photos",)), "it was moved"


def test_a_detected_folder_with_the_same_name_is_different(fresh):
    for parent_folder in ("a", "b"):
        write_text(fresh.folder / parent_folder / "photos/data/rows.csv", "image,caption\nx.png,words\n")
    fresh.run("baseline", "--until", "configure_dataset", config=("dataset=a/photos",))
    write_json(fresh.folder / "results/datasets/photos/summary.json", {})
    printed = refusal(fresh, "baseline", config=("dataset=b/photos",))
    assert "results/datasets/photos: it was made from a/photos, and this command would replace it" in printed


def test_other_settings_and_targets_without_results_run(fresh):
    leave_results(fresh, "small")
    assert fresh.run("baseline", "--dry-run", config=("finetune={learning_rate: 1.0e-3}", "recipe=baseline"))
    assert fresh.run("doctor", "--dry-run", config=("dataset=shapes", "model=tiny"))


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("crate", "baseline"),
        ("export", "dj_synth"),
        ("results/report/crate/run.crate.zip", "dj_synth"),
        ("results/published/baseline/model/README.md", "baseline"),
    ],
)
def test_targets_of_finished_results_start_no_training(fresh, target, command):
    for kind in ("datasets", "models"):
        file = fresh.folder / f"config/{kind}/small.yaml"
        text = file.read_text(encoding="utf-8")
        write_text(file, text if "license" in text else f"{text}\nlicense: mit\n")
    printed = refusal(fresh, target)
    assert f"{command} has not finished, and " in printed
    assert "starts no training. Run `snakemake --cores 1 " + command + "` with the same --config first" in printed


def test_crate_trains_with_baseline_and_export_filters(fresh):
    assert "rule write_crate:" in fresh.run("baseline", "crate", "--dry-run")
    counts = fresh.job_counts("export", config=("export={experiment: baseline}",))
    assert set(counts) == {"make_dataset", "filter_data"}
