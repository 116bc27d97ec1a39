"""A finished run is packed into a crate."""

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest


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
