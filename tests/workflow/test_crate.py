"""A finished run is packed into a crate, which reproduces the same scores in another folder."""

import csv
import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from small_project import copy_project


@pytest.fixture
def crate(finished) -> Iterator[Path]:
    """Write a crate of the finished run without changing it."""
    assert finished.job_counts("crate") == {"write_crate": 1}
    finished.run("crate")
    yield finished.result("report/crate/run.crate.zip")
    shutil.rmtree(finished.result("report/crate"))


def test_a_crate_of_a_finished_run_needs_no_other_stage(crate):
    with zipfile.ZipFile(crate) as archive:
        record = json.loads(archive.read("run.json"))
        graph = json.loads(archive.read("ro-crate-metadata.json"))["@graph"]
    assert record["experiments"] == ["baseline"] and record["command_line"]["dataset"] == "small"
    assert {"torch", "transformers", "py-data-juicer"} <= record["versions"].keys()
    assert [(images["drawn"], images["count"] > 100) for images in record["images"]] == [(True, True)]
    rules = {entity["@id"].rpartition("/")[2] for entity in graph if entity["@type"] == "CreateAction"}
    stages = {"filter_data", "write_jsonl", "pretrain", "finetune", "generate_answers", "evaluate_clip", "evaluate_vqa"}
    assert stages | {"make_dataset", "assemble_model", "train_clip", "compare_experiments"} <= rules


def test_reproduce_without_a_crate_has_a_remedy(fresh):
    assert "crate=path/to/run.crate.zip" in fresh.run("reproduce", ok=False)


@pytest.mark.slow
def test_a_crate_gives_the_same_scores_in_another_folder(crate, tmp_path):
    moved = shutil.copy(crate, tmp_path / "moved.zip")
    elsewhere = copy_project(tmp_path / "another folder")
    (elsewhere.folder / "config/datasets/small.yaml").unlink()  # the crate contains it
    printed = elsewhere.run("reproduce", config=("dataset=shapes", f"crate={moved}"))
    [table] = elsewhere.folder.glob("results/reproduced/*/reproduction.csv")
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert len(rows) > 50 and {float(row["difference"]) for row in rows} == {0.0}
    assert f"{len(rows)} of {len(rows)} scores agree to 3 digits" in printed
    assert not (elsewhere.folder / "results/small/small/baseline").exists()
