"""Jobs of targets in dry runs, and the report without complaints."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save
from transformers import get_scheduler

from better_synth_kit import QUESTION, save_kit
from dj2mgm.storage.files import read_jsonl, read_yaml
from paths import PROJECT
from small_project import count_jobs

ALL = {
    "make_dataset",
    "train_clip",
    "train_language_model",
    "assemble_model",
    "filter_data",
    "write_jsonl",
    "pretrain",
    "finetune",
    "generate_answers",
    "evaluate_clip",
    "evaluate_vqa",
    "write_explorers",
    "compare_experiments",
}


EVALUATION = {"generate_answers", "evaluate_clip", "evaluate_vqa"}
PARTS = {"train_clip", "train_language_model"}
REPORT = {"write_explorers", "compare_experiments"}
SWEEP = dict.fromkeys(ALL - REPORT, 1) | dict.fromkeys({"finetune"} | EVALUATION, 3)


@pytest.mark.parametrize(
    ("target", "counts"),
    [
        ("baseline", dict.fromkeys(ALL, 1)),
        ("finetune_minimal", dict.fromkeys(ALL - EVALUATION - REPORT, 1)),
        ("lora_sweep", SWEEP | {"compare_study": 1}),  # three ranks on one stage 1
        ("plan", dict.fromkeys(PARTS, 1)),
        ("deepspeed_configs", dict.fromkeys(PARTS, 1)),
    ],
)
def test_a_target_runs_each_stage_as_often_as_needed(fresh, target, counts):
    assert fresh.job_counts(target) == counts


def test_a_stage_on_the_gpu_uses_every_core(fresh):
    printed = fresh.run("results/small/small/baseline/pretrain/metrics.json", "--dry-run", "--cores", "16")
    blocks = {block.split(":")[0]: block for block in printed.split("\nrule ")[1:]}
    assert "threads: 16" in blocks["pretrain"] and "threads: 16" not in blocks["train_clip"]


def test_filter_with_clip_operator_requests_a_gpu(fresh):
    target = ("results/small/small/baseline/filter/filtered.jsonl", "--dry-run", "--cores", "16")
    without_clip = fresh.run(*target).split("rule filter_data:")[1]
    assert "threads: 16" not in without_clip and "gpu=0" in without_clip and "mem_mb=4000" in without_clip
    with (fresh.folder / "config/recipes/baseline.yaml").open("a", encoding="utf-8") as recipe:
        recipe.write("\n  - batched_image_text_similarity_filter: {keep_fraction: 0.9}\n")
    with_clip = fresh.run(*target).split("rule filter_data:")[1]
    assert "threads: 16" in with_clip and "gpu=1" in with_clip and "mem_mb=8000" in with_clip


def test_on_a_cluster_gpu_jobs_are_not_limited_to_one(fresh):
    submit = ("--executor", "cluster-generic", "--cluster-generic-submit-cmd", "bash", "--jobs", "5", "--verbose")
    submit += ("--seconds-between-status-checks", "1")
    printed = fresh.run("results/datasets/small/config.yaml", *submit)
    assert "Provided remote nodes: 5" in printed and not re.search("Provided resources: .*gpu", printed)


def test_every_experiment_file_is_a_target(fresh):
    (fresh.folder / "config/experiments/longer.yaml").write_text("pretrain: {epochs: 2}\n", encoding="utf-8")
    printed = fresh.run("longer", "--dry-run")
    assert "results/small/small/longer/pretrain/projector.safetensors" in printed
    assert "results/small/small/longer/report/report.html" in printed
    counts = count_jobs(printed, "longer")
    assert (counts["filter_data"], counts["pretrain"], counts["evaluate_vqa"]) == (1, 2, 2), (
        "compared with the baseline"
    )


def test_finetuning_uses_zero_3_with_both_offloads(finished):
    engine = json.loads((finished.result("finetune") / "metrics.json").read_text())["engine"]
    expected = {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "world_size": 1}
    assert expected.items() <= engine.items()
    assert engine["zero_optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert engine["micro_batch_size"] * engine["gradient_accumulation_steps"] == engine["global_batch_size"] == 8


def test_the_logged_learning_rate_equals_its_steps(finished):
    folder = finished.result("pretrain")
    settings, rows = read_yaml(folder / "config.yaml"), list(read_jsonl(folder / "metrics.jsonl"))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], settings["learning_rate"])
    warm_up = math.ceil(settings["warmup_ratio"] * len(rows))
    schedule = get_scheduler(settings["lr_scheduler"], optimizer, warm_up, len(rows))
    for row in rows:
        assert row["learning_rate"] == pytest.approx(schedule.get_last_lr()[0]), row["step"]
        optimizer.step()
        schedule.step()


def test_baseline_with_default_profile_runs_without_arguments(fresh):
    printed = fresh.run("--dry-run")
    assert "results/small/small/baseline/report/report.html" in printed
    assert "Using workflow specific profile profiles/default" in printed


def test_a_listed_model_needs_no_download_for_a_dry_run(fresh):
    assert "finetune_in_one_stage" in fresh.job_counts("baseline", config=("model=qwen3-vl-2b",))


def test_the_challenges_folders_can_train_mgm_2b(fresh):
    save_kit(fresh.folder / "better_synth")
    config = ("dataset=better_synth", "model=mgm-2b")
    for name in ("gemma-2b-it", "clip-vit-large-patch14-336", "convnext-large-d-320"):
        (fresh.folder / "model_zoo" / name).mkdir(parents=True)
    assert set(fresh.job_counts("baseline", config=config)) == (
        ALL - {"train_clip", "train_language_model"} | {"find_leaks"}
    )
    for folder in (fresh.folder / "model_zoo").iterdir():
        folder.rmdir()
    fresh.run("baseline", "--until", "write_jsonl", config=config)
    file = fresh.result("jsonl/pretrain.jsonl", dataset="better_synth", model="mgm-2b")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows and {row["conversations"][0]["value"] for row in rows} == {f"<image>\n{QUESTION}"}


def test_a_complete_model_folder_is_used_unchanged(fresh):
    folder = fresh.folder / "model_zoo/mgm-2b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    config = ("model=mgm-2b-released",)
    weights = save({"weight": torch.ones(2)})
    (folder / "model.safetensors").write_bytes(weights[:-1])
    printed = fresh.run("baseline", "--dry-run", ok=False, config=config)
    assert f"/model.safetensors has {len(weights) - 1} of {len(weights)} bytes; delete {folder}" in printed
    (folder / "model.safetensors").write_bytes(weights)
    assert "there is no folder model_zoo/clip-vit-large-patch14-336; docs/models.md" in fresh.run(
        "baseline", "--dry-run", ok=False, config=config
    )
    (fresh.folder / "model_zoo/clip-vit-large-patch14-336").mkdir()
    printed = fresh.run("baseline", "--dry-run", "--printshellcmds", config=config)
    assert set(count_jobs(printed, "baseline")) == ALL - {"train_clip", "train_language_model", "assemble_model"}
    assert "--model=model_zoo/mgm-2b" in printed
    assert fresh.job_counts("deepspeed_configs", config=config) == {}


@pytest.mark.parametrize(
    ("model", "finetune", "tunings", "samples"),
    [
        ("qwen3-vl-2b", "lora: null, min_steps: 90, global_batch_size: 128", ["full"], {"finetune": 9828}),
        ("mgm-2b", "min_steps: 90, global_batch_size: 128", ["stage1", "lora"], {"pretrain": 6696, "finetune": 9828}),
    ],
)
def test_the_plan_counts_each_pair_once_for_each_stage_and_epoch(fresh, model, finetune, tunings, samples):
    folder = fresh.folder / "results/datasets/shapes"
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"pretrain": 216, "finetune": 0, "evaluation": 24}
    (folder / "summary.json").write_text(json.dumps(counts), encoding="utf-8")
    stages = ["pretrain={min_steps: 30, global_batch_size: 256}", f"finetune={{{finetune}}}"]
    config = (f"model={model}", "dataset=shapes", "gpu=rtx-4090", "plan={host_gib: 30}", *stages)
    fresh.run("results/plan/config.yaml", config=config)
    settings = read_yaml(fresh.folder / "results/plan/config.yaml")
    assert (settings["gpu"], settings["host_gib"], settings["held_out"]) == ("rtx-4090", 30, 24)
    assert "at most 216 rows, each used about 45.5 times" in " ".join(settings["notes"])
    assert settings["samples"] == samples
    assert settings["tunings"] == tunings, "a model of one stage has no plan of stage 1"


def test_tiny_model_is_trained_only_if_requested_or_changed(fresh):
    targets = [f"results/foundation/tiny/{part}/model.safetensors" for part in ("clip", "language_model")]

    def jobs(*config: str) -> set[str]:
        return set(count_jobs(fresh.run(*targets, "--dry-run", config=("model=tiny", *config)), "baseline"))

    assert jobs() == {"unpack_foundation"}
    assert jobs("foundation=train") == PARTS
    path = fresh.folder / "config/models/tiny.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("steps: 260", "steps: 250"), encoding="utf-8")
    assert jobs() == PARTS


def test_unpacked_models_equal_the_shipped_ones_in_float32(fresh):
    fresh.run("results/foundation/tiny/clip/model.safetensors", config=("model=tiny",))
    for part in ("clip", "convnext", "language_model"):
        shipped = load_file(PROJECT / f"config/foundation/tiny/{part}/model.safetensors")
        unpacked = load_file(fresh.folder / f"results/foundation/tiny/{part}/model.safetensors")
        assert shipped.keys() == unpacked.keys()
        for name, tensor in unpacked.items():
            assert tensor.dtype in (torch.float32, torch.int64)
            assert torch.equal(tensor.to(shipped[name].dtype), shipped[name])
