"""Results of another dataset or model are in another folder; targets such as `crate` start no training."""

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


def refusal(project, *arguments, config=()) -> str:
    printed = project.run(*arguments, "--dry-run", ok=False, config=config)
    assert "Traceback" not in printed and "Job stats" not in printed
    return re.sub(r"\s+", " ", printed)


def list_outputs(printed: str) -> set[str]:
    """Return the folders that stages of a dry run would write, below results/."""
    return set(re.findall(r"--output-dir results/(\S+)", printed))


def test_each_dataset_and_model_has_its_own_results(fresh):
    """Only the dataset is in the same folder for another model."""
    first = list_outputs(fresh.run("baseline", "--dry-run"))
    other_model = list_outputs(fresh.run("baseline", "--dry-run", config=("model=tiny",)))
    other_dataset = list_outputs(fresh.run("baseline", "--dry-run", config=("dataset=shapes",)))
    assert first & other_model == {"datasets/small"}
    assert {"small/small/baseline/finetune", "small/small/baseline/report"} <= first
    assert not any(folder.startswith(("small/", "datasets/small")) for folder in other_dataset)


def test_every_target_writes_below_its_dataset_and_model(fresh):
    targets = ("ablation", "lora_sweep", "lora_vs_full", "finetune_minimal", "analyze")
    printed = fresh.run(*targets, "dj_synth", "--dry-run", config=("seeds=[0,1]",))
    folders = {folder.split("/")[0] for folder in list_outputs(printed)}
    assert folders == {"small", "foundation", "models", "datasets"}


def test_a_dataset_with_a_reserved_name_gets_another_one(fresh):
    write_text(fresh.folder / "models/rows.jsonl", PAIR)
    printed = fresh.run("baseline", "--dry-run", config=("dataset=models/rows.jsonl",))
    assert "--output-dir results/rows/small/baseline/finetune" in printed
    printed = fresh.run("baseline", "--dry-run", config=("dataset=models",))
    assert "--output-dir results/models_data/small/baseline/finetune" in printed
    shutil.rmtree(fresh.folder / "models")


def test_files_of_other_settings_are_refused_with_their_folder(fresh):
    for target in (
        "results/shapes/small/baseline/finetune/metrics.json",
        "results/small/baseline/finetune/metrics.json",
    ):
        printed = refusal(fresh, target)
        assert "nothing makes this target" in printed or "this stage is in results/small/small/baseline/fine" in printed


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


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("crate", "baseline"),
        pytest.param("export", "dj_synth", marks=pytest.mark.slow),
        pytest.param("results/small/small/report/crate/run.crate.zip", "dj_synth", marks=pytest.mark.slow),
        ("results/published/small/small/baseline/model/README.md", "baseline"),
    ],
)
def test_targets_of_finished_results_start_no_training(fresh, target, command):
    for kind in ("datasets", "models"):
        file = fresh.folder / f"config/{kind}/small.yaml"
        text = file.read_text(encoding="utf-8")
        write_text(file, text if "license" in text else f"{text}\nlicense: mit\n")
    printed = refusal(fresh, target)
    assert f"{command} has not finished, and " in printed
    assert "starts no training. Run `snakemake " + command + "` with the same --config first" in printed


def test_crate_trains_with_baseline_and_export_filters(fresh):
    assert "rule write_crate:" in fresh.run("baseline", "crate", "--dry-run")
    counts = fresh.job_counts("export", config=("experiment=baseline",))
    assert set(counts) == {"make_dataset", "filter_data"}


@pytest.mark.parametrize(
    ("target", "setting", "message"),
    [
        (
            "baseline",
            "experiment=dj_synth",
            "`snakemake baseline` does not use this key, which is for plan, finetune_minimal",
        ),
        (
            "plan",
            "experiment=[baseline,dj_synth]",
            "experiment: `plan` is about one experiment, found baseline, dj_synth",
        ),
    ],
)
def test_a_key_that_the_target_does_not_use_is_refused(fresh, target, setting, message):
    assert message in refusal(fresh, target, config=(setting,))


def test_several_experiments_can_be_exported(fresh):
    printed = fresh.run("export", "--dry-run", config=("experiment=[baseline,dj_synth]", "synthesize={recipe: null}"))
    assert {"small/small/baseline/export/parquet", "small/small/dj_synth/export/parquet"} <= list_outputs(printed)
