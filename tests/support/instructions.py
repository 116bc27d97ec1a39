"""The synthesize stage on six instructions about three images, with random models."""

import json
from pathlib import Path

import torch

from dj2mgm.data.formats import build_conversation
from dj2mgm.data.instruction_rows import convert_instructions
from dj2mgm.juicer.recipe_settings import CaptionerModel
from dj2mgm.juicer.run_recipe import SYNTHESIZED, run_recipe
from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.records import INSTRUCTIONS_FILE
from dj2mgm.settings.models import read_chat_template
from dj2mgm.storage.files import write_jsonl, write_yaml
from synthesis import build_synthesis_settings, read_synthesize_settings
from tiny_captioners import save_project

COUNT = 6
QUESTIONS = ["What is it?", "Is it a cat?"]
ANSWERS = ["a cat", "yes", "a dog", "no", "the sea", "no"]


def save_instructions(folder: Path) -> Path:
    """Write a project of random models, with two questions about each of three images."""
    save_project(folder, ["a picture"] * COUNT)
    rows = [
        build_conversation(f"i{number}", f"images/{number // 2}.png", QUESTIONS[number % 2], answer)
        for number, answer in enumerate(ANSWERS)
    ]
    (folder / "data/finetune.json").write_text(json.dumps(rows))
    return folder


def select(project: Path, folder: Path, process: list[dict], **changes) -> dict:
    """Run the stage on the instructions like synthesize_captions.py, and return its summary."""
    captioner = {"name": "mgm", "template": read_chat_template("gemma"), "question": "", "num_beams": 2}
    settings = build_synthesis_settings(project, folder, process, captioner | {"batch_size": 4, "max_new_tokens": 5})
    settings["recipe"]["rows"] = "instructions"
    folder.mkdir(exist_ok=True)
    (folder / "out").mkdir(exist_ok=True)
    write_yaml(folder / "out/config.yaml", settings | changes)
    rows = convert_instructions(json.loads((project / "data/finetune.json").read_text()))
    write_jsonl(folder / "out" / INSTRUCTIONS_FILE, rows)
    model = CaptionerModel(project / "base", project / "pretrain")
    recipe = read_synthesize_settings(folder / "out/config.yaml", folder / "out", model)
    return run_recipe(recipe, folder / "out" / INSTRUCTIONS_FILE, folder / "out", SYNTHESIZED).as_dict()


def loss(family: MGMFamily, model, image, question: str, answer: str) -> float:
    """Return the training loss of an answer, summed over its tokens, without the code of likelihoods."""
    encoder = family.make_encoder("gemma", 512)
    item = encoder.encode_row(build_conversation("1", str(image), question, answer))
    batch = family.prepare_inputs(encoder.batch([item], len(item["input_ids"])), torch.device("cpu"))
    return model(**batch).loss.item() * sum(label != -100 for label in item["labels"])
