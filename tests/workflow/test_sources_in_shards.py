"""A dataset of shards, from export to answers; every stage reads images in place."""

import shutil

import pytest

from dj2mgm.storage.files import read_json, read_jsonl, write_yaml
from dj2mgm.storage.image_files import parse_member
from small_project import Project

# identical copies are kept
MIXED = ("dataset=mixed", "without=[image_text_deduplicator]", "finetune={max_steps: 2}", "pretrain={max_steps: 2}")


@pytest.mark.slow
def test_exported_shards_train_a_model_in_requested_amounts(synthesized, tmp_path):
    for kind in ("webdataset", "parquet"):
        synthesized.run("export", config=(f"format={kind}",))
    exported = synthesized.result("export", "dj_synth")
    pairs = list(read_jsonl(synthesized.result("synthesize/synthesized.jsonl", "dj_synth")))
    assert f"{len(pairs)} image–caption pairs" in (exported / "webdataset/README.md").read_text(encoding="utf-8")

    half = len(pairs) // 2
    sources = {
        "shards": {"format": "webdataset", "path": str(exported / "webdataset"), "license": "Apache-2.0"},
        "parquet": {"format": "parquet", "path": str(exported / "parquet")},
        "again": {"format": "webdataset", "path": str(exported / "webdataset"), "split": "finetune", "amount": 0.5},
    }
    project = Project(shutil.copytree(synthesized.folder, tmp_path / "copy"))
    write_yaml(project.folder / "config/datasets/mixed.yaml", {"sources": sources})
    write_yaml(project.folder / "config/experiments/mixed.yaml", {"sources": {"shards": 2.0, "parquet": 20}})
    project.run("results/mixed/small/mixed/generate/answers.jsonl", config=MIXED)
    summary = read_json(project.result("jsonl/summary.json", "mixed", "mixed"))
    usable = {name: counts["usable"] for name, counts in summary["pretrain"]["sources"].items()}
    samples = {name: counts["rows_out"] for name, counts in summary["pretrain"]["sources"].items()}
    budget = sum(usable.values())  # training data of the baseline, each row once
    shares = 2 * usable["shards"] + 20
    assert sum(samples.values()) == budget and abs(samples["parquet"] - 20 * budget / shares) < 1
    rows = list(read_jsonl(project.result("jsonl/pretrain.jsonl", "mixed", "mixed")))
    assert len(rows) == budget and all(parse_member(row["image"]) for row in rows)
    assert {row["source"] for row in read_jsonl(project.result("jsonl/finetune.jsonl", "mixed", "mixed"))} == {"again"}
    assert half * 0.5 < summary["finetune"]["sources"]["again"]["rows_out"] < half
    assert len(list(read_jsonl(project.result("generate/captions.jsonl", "mixed", "mixed")))) > 0
