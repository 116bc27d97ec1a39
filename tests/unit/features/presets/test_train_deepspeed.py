"""train_deepspeed.py: a dry run checks everything before the first step, and a tiny Mamba trains on the CPU."""

import json
import os
import shutil

import pytest
import yaml
from transformers import MambaConfig, MambaForCausalLM

import train_deepspeed
from dj2mgm.storage.files import read_json
from forked_python import programs
from paths import PROJECT
from run_main import Outcome, run_main
from tiny_models import tiny_tokenizer


@pytest.fixture
def project(tmp_path):
    """Make a folder with the project's configuration, a preset of a tiny Mamba, its weights and a corpus."""
    shutil.copytree(PROJECT / "config", tmp_path / "config")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "mamba")
    config = MambaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=2, pad_token_id=0
    )
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    rows = [json.dumps({"text": "How many objects are there? two"}) for _ in range(40)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    preset = {
        "model": "mamba",
        "data": "corpus.jsonl",
        "training": {
            "global_batch_size": None,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_length": 8,
            "max_steps": 2,
            "log_steps": 1,
            "loader_workers": 0,
        },
    }
    (tmp_path / "config/presets/tiny_mamba.yaml").write_text(yaml.safe_dump(preset), encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(project, monkeypatch, capfd):
    """Run the script in the project with these flags."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", programs(), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def main(*flags: str, preset: str = "tiny_mamba") -> Outcome:
        return run_main(train_deepspeed, "--preset", preset, *flags, capture=capfd)

    return main


def test_a_dry_run_shows_batch_memory_and_data(project, run):
    done = run("--num-gpus", "6", "--dry-run", "--gpu-memory", "32", "--host-memory", "512")
    assert done.status == 0, done.stderr
    assert "batch: micro 1 × accumulation 8 × 6 GPUs = 48 samples a step" in done.stdout
    assert "gpu memory: " in done.stdout and "host memory: process 10.80 + " in done.stdout
    assert "data: 40 texts in corpus.jsonl" in done.stdout
    assert not (project / "results").exists()


def test_only_a_real_run_needs_data(run):
    """The preset's corpus is not shipped."""
    flags = ("--num-gpus", "6", "--gpu-memory", "80", "--host-memory", "1024")
    done = run(*flags, "--dry-run", preset="7b_mamba")
    assert done.status == 0, done.stderr
    assert "data: data/corpus.jsonl does not exist and was not checked; training needs it" in done.stdout
    assert "dry run: nothing was launched" in done.stdout
    refused = run(*flags, preset="7b_mamba")
    assert refused.status == 2 and "data/corpus.jsonl" in refused.stderr


def test_the_7b_preset_is_refused_with_zero_2_on_gpus_of_32_gib(project, run):
    config = read_json(project / "config/deepspeed/zero2.json")
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 48}
    (project / "mine.json").write_text(json.dumps(config), encoding="utf-8")
    flags = ("--num-gpus", "6", "--dry-run", "--gpu-memory", "32", "--host-memory", "512")
    refused = run(*flags, "--deepspeed-config", "mine.json", preset="7b_mamba")
    assert refused.status == 2 and "GiB of GPU memory are needed, 32.0 GiB are available" in refused.stderr
    assert "batch: micro 4 × accumulation 2 × 6 GPUs = 48" in refused.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-gpus", "3"), "there are configurations for 1, 2, 4, 6, 8 only; pass --deepspeed-config"),
        (("--deepspeed-config", "none.json"), "none.json does not exist"),
    ],
)
def test_missing_files_are_refused_by_name(run, flags, message):
    done = run("--dry-run", *flags)
    assert done.status == 2 and message in done.stderr


def test_a_tiny_mamba_is_trained_under_deepspeed_on_the_cpu(project, run):
    config = read_json(project / "config/deepspeed/zero3_offload.json")
    (project / "mine.json").write_text(json.dumps(config), encoding="utf-8")
    done = run("--deepspeed-config", "mine.json")
    assert done.status == 0, done.stdout[-2000:] + done.stderr[-4000:]
    output = project / "results/presets/tiny_mamba"
    record = read_json(output / "metrics.json")
    assert record["steps"] == 2 and record["engine"]["zero_stage"] == 3
    assert record["engine"]["global_batch_size"] == 4
    trained = MambaForCausalLM.from_pretrained(output / "model").state_dict()
    before = MambaForCausalLM.from_pretrained(project / "mamba").state_dict()
    assert trained.keys() == before.keys() and all(trained[name].shape == before[name].shape for name in before)
    assert any((trained[name] != before[name]).any() for name in before)
