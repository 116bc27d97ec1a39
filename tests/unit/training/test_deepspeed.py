"""DeepSpeed configurations: generated files, completed sizes, and the choice of AdamW."""

import copy
import os
import shutil
import sys

import deepspeed
import pytest
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
from deepspeed.runtime.config import DeepSpeedConfig
from torch.utils import cpp_extension
from torch.utils._cpp_extension_versioner import ExtensionVersioner

import write_deepspeed_configs
from dj2mgm.storage.files import read_json
from dj2mgm.training.arguments import use_available_extensions
from dj2mgm.training.deepspeed_config import complete_deepspeed_config
from paths import PROJECT
from run_main import run_main
from tiny_models import mgm_config

CONFIGS = sorted((PROJECT / "config" / "deepspeed").glob("*.json"))
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


STATED = {1: (1, 32, 32, 2), 2: (1, 16, 32, 2), 4: (1, 8, 32, 2), 6: (1, 8, 48, 3), 8: (1, 4, 32, 3)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the files of write_deepspeed_configs.py for the shape of MGM-2B, without a download."""
    folder = tmp_path_factory.mktemp("written") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(PROJECT)
        patch.setattr(sys, "argv", ["", "--model=google/gemma-2b-it", f"--output-dir={folder}"])
        write_deepspeed_configs.main()
    return {path.stem: read_json(path) for path in folder.iterdir()}


def test_sizes_of_an_assembled_model_come_from_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mgm_config().save_pretrained("mgm")
    done = run_main(write_deepspeed_configs, "--model", "mgm", "--output-dir", "out", capture=capsys)
    assert done.status == 0, done.stderr
    assert read_json("out/zero3.json")["zero_optimization"]["reduce_bucket_size"] == 32**2


def parse_in_world(gpus, monkeypatch):
    """Parse with DeepSpeed's configuration class, which reads the number of processes from a process group."""
    monkeypatch.setattr("deepspeed.runtime.config.dist.get_rank", lambda: 0)
    monkeypatch.setattr("deepspeed.runtime.config.dist.get_world_size", lambda: gpus)


@pytest.mark.parametrize("gpus", STATED)
def test_each_configuration_is_valid_for_its_gpu_count(gpus, written, monkeypatch):
    parse_in_world(gpus, monkeypatch)
    micro, accumulation, batch, stage = STATED[gpus]
    accepted = DeepSpeedConfig(complete_like_transformers(written[f"deepspeed_{gpus}gpu"]))
    sizes = (accepted.train_micro_batch_size_per_gpu, accepted.gradient_accumulation_steps, accepted.train_batch_size)
    assert (accepted.world_size, *sizes) == (gpus, micro, accumulation, batch)
    zero = accepted.zero_config
    assert (zero.stage, zero.offload_optimizer.device) == (stage, "cpu")


@pytest.mark.parametrize("gpus", [2])
def test_a_configuration_for_another_gpu_count_is_refused(gpus, written, monkeypatch):
    parse_in_world(gpus + 1, monkeypatch)
    with pytest.raises(AssertionError, match="train_batch_size"):
        DeepSpeedConfig(complete_like_transformers(written[f"deepspeed_{gpus}gpu"]))


def test_zero_3_has_sizes_and_cpu_activation_checkpoints(written):
    stage_3 = [config for config in written.values() if config["zero_optimization"]["stage"] == 3]
    assert len(stage_3) == 4
    for config in stage_3:
        zero = config["zero_optimization"]
        assert zero["stage3_prefetch_bucket_size"] == 3774873
        assert all(type(value) is int for key, value in zero.items() if key.startswith("stage3_"))
        assert {"stage3_param_persistence_threshold", "stage3_max_live_parameters"} < set(zero)
        accepted = DeepSpeedActivationCheckpointingConfig(config)
        assert accepted.partition_activations and accepted.cpu_checkpointing and accepted.number_checkpoints == 16


def complete_like_transformers(value):
    """Replace the remaining "auto" values by training arguments, like transformers."""
    arguments = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "enabled": True,
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    if not isinstance(value, dict):
        return value
    return {k: arguments.get(k, v) if v == "auto" else complete_like_transformers(v) for k, v in value.items()}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_deepspeed_file_is_completed_with_integers(path):
    completed = complete_deepspeed_config(read_json(path), hidden_size=2048)
    zero = completed["zero_optimization"]
    assert "auto" not in zero.values()
    assert all(type(zero[key]) is int for key in SIZES if key in zero)
    accepted = DeepSpeedConfig(complete_like_transformers(completed))
    assert accepted.zero_config.stage == zero["stage"]
    if zero["stage"] > 0:
        assert accepted.zero_config.reduce_bucket_size == 2048**2
    assert (accepted.train_batch_size, accepted.gradient_accumulation_steps) == (8, 2)
    assert not accepted.timers_config.enabled  # the setting would wait for the GPU at every micro batch


def test_sizes_at_hidden_2048():
    zero = complete_deepspeed_config({"zero_optimization": dict.fromkeys(SIZES, "auto")}, 2048)["zero_optimization"]
    assert zero == {
        "reduce_bucket_size": 4194304,
        "stage3_prefetch_bucket_size": 3774873,
        "stage3_param_persistence_threshold": 20480,
    }


def test_deepspeed_refuses_the_float_that_replaces_auto():
    """Therefore, the workflow writes the sizes itself."""
    config = complete_like_transformers(read_json(PROJECT / "config" / "deepspeed" / "zero3_offload.json"))
    config["zero_optimization"] |= {key: 1000 for key in SIZES} | {"stage3_prefetch_bucket_size": 0.9 * 2048**2}
    with pytest.raises(ValueError, match="stage3_prefetch_bucket_size|prefetch_bucket_size"):
        DeepSpeedConfig(config)


def test_stated_sizes_stay_and_the_file_is_not_changed():
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5, "stage3_prefetch_bucket_size": "auto"}}
    before = copy.deepcopy(config)
    completed = complete_deepspeed_config(config, 100)
    assert completed["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 5,
        "stage3_prefetch_bucket_size": 9000,
    }
    assert config == before


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS if path.stem.startswith("zero3")])
def test_zero3_does_not_replace_linear_layers(name):
    """DeepSpeed's linear layers store inputs of frozen layers, which torch 2.11 does not recompute if compiled."""
    config = read_json(PROJECT / "config" / "deepspeed" / f"{name}.json")
    assert config["zero_optimization"]["memory_efficient_linear"] is False


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        pytest.param(None, "there is no C++ compiler, so PyTorch's AdamW", marks=pytest.mark.slow),
        pytest.param(
            "exit 1",
            "c++ cannot compile DeepSpeed's cpu_adam (Command '['c++', '--version']' returned non-zero exit status",
            marks=pytest.mark.slow,
        ),
        ("case $* in *-c*) echo a.cpp:1: error: no omp.h; exit 1;; esac", "cpu_adam (a.cpp:1: error: no omp.h), so"),
    ],
)
def test_pytorchs_adamw_replaces_an_uncompilable_one(compiler, reason, tmp_path, monkeypatch, capsys):
    (tmp_path / "c++").write_text(f"#!/bin/sh\n{compiler}\n")
    (tmp_path / "c++").chmod(0o755 if compiler else 0o644)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}" if compiler else str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", ExtensionVersioner())
    for operation in ("deepspeed_shm_comm", "deepspeed_cpu_adam"):
        monkeypatch.setitem(deepspeed.ops.__compatible_ops__, operation, True)
    configs = {path.stem: complete_deepspeed_config(read_json(path), 64) for path in CONFIGS}
    replaced = {name: use_available_extensions(config) for name, config in configs.items()}
    changed = {name for name in configs if replaced[name] != configs[name]}
    assert changed == {name for name in configs if "offload" in name}
    printed = "".join(capsys.readouterr())
    assert reason in printed and "install g++" in printed
    assert "progress: compiling cpu_adam (once, a minute or two) …\n" in printed
    assert not deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]
    assert replaced["zero3_offload"]["optimizer"]["params"]["torch_adam"]


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_deepspeeds_adamw_is_used_if_it_can_be_compiled():
    config = complete_deepspeed_config(read_json(PROJECT / "config" / "deepspeed" / "zero3_offload.json"), 64)
    assert use_available_extensions(config) == config
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]
