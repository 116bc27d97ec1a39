"""Tiny LLaVA that always writes the same answer, and `transformers serve` in a separate process."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tiny_families import save_tiny_family

SMALL_LOSS = 0.01  # loss per token, below which the most likely answer is the learned answer
MAX_STEPS = 400
START_S = 120


def save_llava_that_answers(folder: Path, question: str, answer: str) -> None:
    """Save a LLaVA that has memorized one answer to a question, independent of the image."""
    save_tiny_family("llava", folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image", "image": Image.new("RGB", (40, 32))}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    prompt = inputs["input_ids"]  # (1, P)
    answer_tokens = processor.tokenizer(answer + "</s>", add_special_tokens=False, return_tensors="pt")["input_ids"]
    tokens = torch.cat([prompt, answer_tokens], dim=1)  # (1, T)
    labels = torch.cat([torch.full_like(prompt, -100), answer_tokens], dim=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(MAX_STEPS):
        pixels = torch.randn_like(inputs["pixel_values"])
        loss = model(input_ids=tokens, pixel_values=pixels, labels=labels).loss
        if loss < SMALL_LOSS:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        raise AssertionError(f"the answer is not learned after {MAX_STEPS} steps (loss {loss:.3f})")
    model.save_pretrained(folder)


class TransformersServe:
    """`transformers serve` on a port of this machine, with an empty model cache."""

    def __init__(self, model: Path):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.model = model
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> "TransformersServe":
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        cache = self.model.parent / "cache"
        (cache / "hub").mkdir(parents=True, exist_ok=True)
        arguments = ["-m", "transformers.cli.transformers", "serve", self.model, "--host", "127.0.0.1"]
        environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with open(self.model.parent / "serve.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, arguments), "--port", str(self.port), "--device", "cpu"],
                env=environment,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            assert self.process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()[-2000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def _is_ready(self) -> bool:
        try:
            return httpx2.get(f"http://127.0.0.1:{self.port}/health").is_success
        except httpx2.TransportError:
            return False
