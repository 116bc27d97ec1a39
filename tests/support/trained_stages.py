"""Inputs, command lines and outcomes of tiny trainings, for tests that compare trainings."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dj2mgm.models.mgm import MGMForConditionalGeneration
from dj2mgm.models.trained_weights import find_projector_parameters
from dj2mgm.settings.training_stages import read_deepspeed
from dj2mgm.storage.files import read_jsonl, write_jsonl, write_yaml
from mgm_stages import build_training_settings
from tiny_models import mgm_config, randomize, save_image, tiny_processor

STEPS, SAVED_AT, KILLED_AT, SAMPLES, MANY = 4, 2, 3, 5, 83
TUNINGS = {"stage 1": "pretrain", "LoRA": "finetune", "full": "finetune"}
WORDS = "What color is the circle? a red circle at the top left".split()


def make_inputs(folder: Path) -> Path:
    config = mgm_config()
    config.text_config.hidden_size = 64
    torch.manual_seed(0)
    model = MGMForConditionalGeneration(config)
    randomize(model, scale=0.1)
    model.save_pretrained(folder / "mgm")
    tiny_processor().save_pretrained(folder / "mgm")
    projector = {name: parameter.detach().contiguous() for name, parameter in find_projector_parameters(model).items()}
    save_file(projector, folder / "projector.safetensors")
    images = [save_image(folder / f"{i}.png", (40 * i, 30, 200 - 40 * i), (16, 16)) for i in range(SAMPLES)]
    write_jsonl(folder / "conversations.jsonl", [make_conversation(index, images[index]) for index in range(SAMPLES)])
    write_jsonl(folder / "many.jsonl", [make_conversation(index, images[index % SAMPLES]) for index in range(MANY)])
    return folder


def make_conversation(index: int, image: Path) -> dict:
    answer = WORDS[index % len(WORDS) :] + WORDS[: index % 7]
    turns = [("human", "<image>\n" + WORDS[index % 3]), ("gpt", " ".join(answer))]
    return {
        "id": str(index),
        "image": str(image),
        "conversations": [{"from": speaker, "value": text} for speaker, text in turns],
    }


def build_flags(folder: Path, output: Path, tuning: str, **changes) -> dict:
    """Write the settings of a stage and return its command line."""
    stage = TUNINGS[tuning]
    settings = build_training_settings(stage, "plain", 16) | {
        "deepspeed": read_deepspeed("zero2", stage),
        "global_batch_size": 2,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "epochs": 2,
        "max_steps": STEPS,
        "min_steps": 0,
        "save_steps": SAVED_AT,
        "max_length": 64,
        "cpu_threads": 1,
        "loader_workers": 0,
    }
    if stage == "finetune":
        settings["lora"] = settings["lora"] | {"r": 64} if tuning == "LoRA" else None
        settings["projector_learning_rate"] = 1e-3 if tuning == "LoRA" else None  # two groups of parameters, and one
    settings |= changes
    output.mkdir(parents=True, exist_ok=True)
    write_yaml(output / "config.yaml", settings)
    arguments = {
        "--config": output / "config.yaml",
        "--data": folder / "conversations.jsonl",
        "--model": folder / "mgm",
    }
    arguments |= {"--output-dir": output}
    return arguments | ({"--projector": folder / "projector.safetensors"} if stage == "finetune" else {})


def read_outcome(output: Path) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Return all trained tensors, and the log rows of every step."""
    files = sorted([*output.glob("*.safetensors"), *output.glob("adapter/*.safetensors")])
    weights = {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}
    keys = ("step", "epoch", "loss", "learning_rate", "projector_learning_rate", "grad_norm")
    return weights, [{key: row[key] for key in keys if key in row} for row in read_jsonl(output / "metrics.jsonl")]


def assert_equal_outcomes(first: Path, second: Path) -> None:
    (weights, rows), (expected, expected_rows) = read_outcome(first), read_outcome(second)
    assert rows == expected_rows
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def shared(
    folder: Path, output: Path, processes: int, micro: int, total: int, tuning: str = "stage 1", **changed
) -> dict:
    """Return the command line of a stage on 83 samples, whose last step is incomplete."""
    sizes = {"global_batch_size": total, "micro_batch_size": micro, "gpus": processes}
    sizes["gradient_accumulation_steps"] = total // micro // processes
    settings = sizes | {"max_steps": None, "epochs": 2, "save_steps": 100} | changed
    return build_flags(folder, output, tuning, **settings) | {"--data": folder / "many.jsonl"}
