"""Killed and resumed, every DeepSpeed configuration ends with the weights of an undisturbed run, bit for bit."""

import sys
from pathlib import Path

import pytest
import torch
from forked_training import Forks
from places import PROJECT
from safetensors.torch import load_file, save_file
from tiny_models import mgm_config, randomize, save_image, tiny_processor

from files import read_json, read_jsonl, write_jsonl, write_yaml
from mgm import MGMForConditionalGeneration
from mgm.projector_weights import projector_parameters
from settings.deepspeed import read_deepspeed

sys.path.append(str(PROJECT / "benchmarks"))
from chain import training_settings  # noqa: E402

STEPS, SAVED_AT, KILLED_AT, SAMPLES = 4, 2, 3, 5
CONFIGURATIONS = sorted(path.stem for path in (PROJECT / "config/deepspeed").glob("*.json"))
TUNINGS = {"stage 1": "pretrain", "LoRA": "finetune", "full": "finetune"}
WORDS = "What color is the circle? a red circle at the top left".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model wide enough for 8-bit states, a projector, and conversations with and without an image."""
    folder = tmp_path_factory.mktemp("inputs")
    config = mgm_config()
    config.text_config.hidden_size = 64
    torch.manual_seed(0)
    model = MGMForConditionalGeneration(config)
    randomize(model, scale=0.1)
    model.save_pretrained(folder / "mgm")
    tiny_processor().save_pretrained(folder / "mgm")
    projector = {name: parameter.detach().contiguous() for name, parameter in projector_parameters(model).items()}
    save_file(projector, folder / "projector.safetensors")
    rows = []
    for index in range(SAMPLES):
        image = save_image(folder / f"{index}.png", (40 * index, 30, 200 - 40 * index), (16, 16))
        turns = [("human", "<image>\n" + WORDS[index]), ("gpt", " ".join(WORDS[index : 2 * index + 2]))]
        conversations = [{"from": speaker, "value": said} for speaker, said in turns]
        rows.append({"id": str(index), "image": str(image), "conversations": conversations})
    write_jsonl(folder / "conversations.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    with Forks(tmp_path_factory.mktemp("logs")) as forks:
        yield forks


def flags(folder: Path, output: Path, tuning: str, **changed) -> dict:
    """The command line of a stage, whose settings are written beside its output."""
    stage = TUNINGS[tuning]
    settings = training_settings(stage, "plain", 16) | {
        "deepspeed": read_deepspeed("zero2", stage),
        "global_batch_size": 2,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "epochs": 2,
        "max_steps": STEPS,
        "save_steps": SAVED_AT,
        "max_length": 64,
        "cpu_threads": 1,
        "loader_workers": 0,
    }
    if stage == "finetune":
        settings["lora"] = settings["lora"] | {"r": 64} if tuning == "LoRA" else None
    settings |= changed
    output.mkdir(parents=True, exist_ok=True)
    write_yaml(output / "config.yaml", settings)
    given = {"--config": output / "config.yaml", "--data": folder / "conversations.jsonl", "--model": folder / "mgm"}
    given |= {"--output-dir": output}
    return given | ({"--projector": folder / "projector.safetensors"} if stage == "finetune" else {})


def outcome(output: Path) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """All trained tensors, and what was logged at every step."""
    files = sorted([*output.glob("*.safetensors"), *output.glob("adapter/*.safetensors")])
    weights = {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}
    kept = ("step", "epoch", "loss", "learning_rate", "grad_norm")
    return weights, [{key: row[key] for key in kept if key in row} for row in read_jsonl(output / "metrics.jsonl")]


def assert_equal_outcomes(one: Path, other: Path) -> None:
    (weights, rows), (wanted, wanted_rows) = outcome(one), outcome(other)
    assert rows == wanted_rows
    assert weights.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(weights[name], wanted[name])] == []


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_killed_run_resumes_and_ends_as_an_undisturbed_one_does(folder, forks, tmp_path, configuration, tuning):
    stage = TUNINGS[tuning]
    changed = {"deepspeed": read_deepspeed(configuration, stage), "precision": "bf16"}
    ended = forks.run(f"{stage}.py", flags(folder, tmp_path / "undisturbed", tuning, **changed))
    assert ended.ok, ended.printed[-3000:]
    killed = flags(folder, tmp_path / "killed", tuning, **changed)
    ended = forks.run(f"{stage}.py", killed, kill_at=KILLED_AT)
    assert ended.statuses == [-9], ended.printed[-3000:]
    ended = forks.run(f"{stage}.py", killed)
    assert ended.ok and f"resuming from step {SAVED_AT}" in ended.printed, ended.printed[-3000:]
    assert read_json(tmp_path / "killed/metrics.json")["resumed_from"] == f"checkpoint-{SAVED_AT}"
    assert_equal_outcomes(tmp_path / "killed", tmp_path / "undisturbed")
