"""Batched greedy generation: what a trained model says about images."""

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from peft import PeftModel

from compute import default_device
from formats.images import load_image, locate_image
from formats.prompts import prompt_of, stop_tokens
from mgm import MGMForConditionalGeneration, MGMProcessor
from mgm.projector_weights import load_projector


class Generator:
    """A trained MGM: base folder, projector, and LoRA adapter where there is one (merged for speed).

    Args:
        base: folder of the assembled model.
        stage: output folder of `pretrain` or `finetune`.
    """

    def __init__(self, base: Path, stage: Path):
        self.device = default_device()
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = MGMForConditionalGeneration.from_pretrained(base, dtype=dtype, trust_remote_code=False)
        load_projector(model, stage / "projector.safetensors")
        if (stage / "adapter").is_dir():
            model = PeftModel.from_pretrained(model, stage / "adapter").merge_and_unload()
        self.model = model.eval().to(self.device)
        self.processor = MGMProcessor.from_pretrained(base)

    @torch.inference_mode()
    def answer(
        self, images: list[Path], questions: list[str], template: str, max_new_tokens: int, batch_size: int
    ) -> Iterator[str]:
        """One answer for each (image, question); an empty question asks for a plain caption."""
        tokenizer = self.processor.tokenizer
        stops = [tokenizer(token, add_special_tokens=False).input_ids[-1] for token in stop_tokens(template)]
        pairs = iter(zip(images, questions, strict=True))
        while batch := list(islice(pairs, batch_size)):
            paths, asked = zip(*batch, strict=True)
            inputs = self.processor.prompts([prompt_of(template, question) for question in asked])
            inputs["pixel_values"] = self.processor.pixels([load_image(path) for path in paths])
            inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
            output = self.model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=[tokenizer.eos_token_id, *stops],
                pad_token_id=tokenizer.pad_token_id,
            )
            answers = output[:, inputs["input_ids"].shape[1] :]
            yield from (text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True))


def other_images(count: int, seed: int) -> list[int]:
    """For each of `count` images the index of another one, each used once: a random cycle (Sattolo 1986)."""
    order = list(range(count))
    rng = random.Random(seed)
    for i in range(count - 1, 0, -1):
        j = rng.randrange(i)
        order[i], order[j] = order[j], order[i]
    return order


def image_paths(root: str | Path, rows: Iterable[dict]) -> list[Path]:
    return [locate_image(root, row["image"]) for row in rows]
