"""Settings of both training stages, and answers of both, at any shape of MGM."""

import subprocess
import sys
from pathlib import Path

from dj2mgm.settings.training_stages import read_deepspeed
from dj2mgm.storage.files import read_yaml, write_jsonl, write_yaml
from paths import PROJECT
from random_mgm import WORDS

TEXT_TOKENS = 64
SMALL = {"global_batch_size": 16, "micro_batch_size": 2, "gradient_accumulation_steps": 8, "save_steps": 2}
DEEPSPEED = {"pretrain": "zero2_offload", "finetune": "zero3_offload"}


def build_training_settings(stage: str, template: str, image_tokens: int) -> dict:
    settings = read_yaml(PROJECT / "config" / "config.yaml")[stage] | SMALL
    settings |= {"seed": 0, "gpus": 1, "cpu_threads": None, "template": template}
    settings["max_length"] = image_tokens + TEXT_TOKENS
    settings |= {"deepspeed": read_deepspeed(DEEPSPEED[stage], stage), "activation_checkpointing": True}
    return settings


def answer(folder: Path, stages: Path, output: Path, gpus: int = 1) -> None:
    """Generate captions and answers for a few images with both stages; write them into the folder `output`."""
    output.mkdir(exist_ok=True)
    rows = [
        {
            "id": str(index),
            "image": f"{index}.jpg",
            "captions": [" ".join(WORDS[:3])],
            "objects": [],
            "questions": [{"type": "word", "question": WORDS[0], "answer": WORDS[1]}],
        }
        for index in range(8)
    ]
    write_jsonl(output / "evaluation.jsonl", rows)
    templates = {"pretrain": {"template": "plain", "question": ""}, "finetune": {"template": "gemma", "question": "?"}}
    settings = {
        "seed": 0,
        "cpu_threads": None,
        "gpus": gpus,
        "image_root": str(folder / "images"),
        "template": "gemma",
        "question_prompt": "{question}",
        "captions": templates,
        "decoding": {"batch_size": 8, "max_new_tokens": 16},
    }
    write_yaml(output / "config.yaml", settings)
    flags = ["--config", output / "config.yaml", "--model", folder / "mgm", "--output-dir", output]
    flags += ["--evaluation", output / "evaluation.jsonl"]
    flags += ["--pretrained", stages / "pretrain", "--finetuned", stages / "finetune"]
    subprocess.run([sys.executable, PROJECT / "workflow_scripts/generate_answers.py", *flags], check=True)
