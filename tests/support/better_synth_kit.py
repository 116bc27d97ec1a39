"""Folders of the Better Synth kit's 10K baseline, as its download script writes them, with a few rendered images."""

import json
from pathlib import Path

from dj2mgm.data.formats import build_conversation, build_dj_text
from tiny_models import save_image

QUESTION = "Give a card description of the image."


def save_kit(kit: Path, rows: int = 6) -> None:
    """Save seed pairs (Data-Juicer), the file with their questions, and instructions (LLaVA) with repeated ids."""
    pairs, tuning = kit / "input/pretrain_stage_1_10k", kit / "toolkit/training/data/finetuning_stage_1_12k"
    captions = {f"{number:09d}": f"photo number {number}" for number in range(rows)}
    images = {name: f"images/{name[:5]}/{name}.jpg" for name in captions}
    for number, image in enumerate(images.values()):
        save_image(pairs / image, (20 * number, 90, 200 - 20 * number), (64, 48))
    seeds = [{"id": name, "text": build_dj_text(text), "images": [images[name]]} for name, text in captions.items()]
    (pairs / "mgm_pretrain_stage_1_10k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seeds))
    original = [build_conversation(name, images[name], QUESTION, text) for name, text in captions.items()]
    (pairs / "stage_1.json").write_text(json.dumps(original))
    save_image(tuning / "coco/train2017/000000033471.jpg")
    instructions = [
        build_conversation("000000033471", "coco/train2017/000000033471.jpg", f"{n} buses?", "no") for n in range(2)
    ]
    text_only = {"id": 7, "conversations": instructions[0]["conversations"]}
    text_only["conversations"] = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello."}]
    (tuning / "mgm_instruction_stage_1_12k.json").write_text(json.dumps([*instructions, text_only]))
