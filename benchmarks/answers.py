"""Measure answers and captions per second at the shape of MGM-2B or of another family, and the time of their parts.

    python benchmarks/answers.py                                  # on one GPU with 22 GiB left free
    python benchmarks/answers.py --shape qwen3-vl-2b-instruct     # a model of transformers, at several batch sizes
    python benchmarks/answers.py --shape tiny                     # without a GPU, to try the script

Weights are random, images have 640×480 pixels, settings are the defaults. A random model does not end its answers, so
all answers have the greatest length. Images are decoded at the same time, as in every stage. Loading the model does not
count. For the last rows, layers are compiled. The workflow does not compile them, because this takes longer than it
saves unless there are many images.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "tests/support")]

from dj2mgm.torch_environment import set_torch_environment  # noqa: E402

set_torch_environment()  # as stages do, before PyTorch is imported

import numpy as np  # noqa: E402
import random_vlm  # noqa: E402
import torch  # noqa: E402
from loop import limit_gpu_memory  # noqa: E402
from torch import nn  # noqa: E402

from dj2mgm.models.generators import load_generator  # noqa: E402
from dj2mgm.models.mgm.mgm_family import MGMFamily  # noqa: E402
from dj2mgm.models.mgm.mgm_generator import MGMGenerator  # noqa: E402
from dj2mgm.models.mgm.modeling_mgm import MGMForConditionalGeneration  # noqa: E402
from random_mgm import IMAGES, WORDS, make_random_mgm, write_conversations  # noqa: E402

ANSWER_TOKENS, CAPTION_TOKENS = 8, 64
QUESTION_WORDS = (5, 16)
COUNTS = {"mgm-2b": 8 * IMAGES, "tiny": 12}  # questions of each measurement
FAMILY_SHAPES = [f"{shape}-vlm" if shape in COUNTS else shape for shape in random_vlm.SHAPES]
FAMILY_COUNT = 768  # questions of each measurement of another family


def print_speed(name: str, count: int, run: Callable[[], object]) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.monotonic() - start
    row = {"measured": name, "count": count, "seconds": round(seconds, 2), "a_second": round(count / seconds, 1)}
    if torch.cuda.is_available():
        row["peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    print(json.dumps(row), flush=True)


def compile_layers(model: MGMForConditionalGeneration) -> None:
    """Compile, in place, the towers' layers and the parts of the decoder's layers except attention.

    Attention reads the cache, which differs from layer to layer; its code would be compiled for each layer.
    """
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)  # ConvNeXt has four widths
    parts = MGMFamily.find_parts(model)
    for layer in parts.towers:
        _compile(layer, dimensions=1)
    for layer in parts.decoder:
        for part in layer.children():
            if part is not layer.self_attn:
                _compile(part, dimensions=2)


def _compile(module: nn.Module, dimensions: int) -> None:
    """Compile the module's forward; the first `dimensions` dimensions of its input differ from call to call."""
    forward = type(module).forward
    compiled = torch.compile(getattr(forward, "__wrapped__", forward).__get__(module))  # without checkpointing

    def run_compiled(values: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        for dimension in range(dimensions):
            torch._dynamo.maybe_mark_dynamic(values, dimension)
        return compiled(values, *args, **kwargs)

    module.forward = run_compiled


def measure(folder: Path, count: int) -> None:
    random, generator = np.random.default_rng(0), MGMGenerator(folder / "mgm", None)
    image_files = []  # of each question
    for number in range(count):
        path = folder / "images" / f"copy-{number}.jpg"
        path.hardlink_to(folder / "images" / f"{number % IMAGES}.jpg")
        image_files.append(path)
    questions = [" ".join(random.choice(WORDS, random.integers(*QUESTION_WORDS))) for _ in range(count)]

    def answer(images: list[Path], batch_questions: list[str], tokens: int) -> None:
        generator._cache.clear()
        for _ in generator.answer(images, batch_questions, "gemma", tokens, "auto"):
            pass

    sizes = {tokens: generator.choose_batch_size(tokens) for tokens in (ANSWER_TOKENS, CAPTION_TOKENS)}
    print(json.dumps({"batch_sizes": sizes}))
    few_images = image_files[: min(count, 112)]
    answer(few_images, questions[: len(few_images)], ANSWER_TOKENS)  # kernels are loaded
    batches = list(generator._iterate_batches(few_images, 28))
    pixels = torch.cat(batches).numpy()
    print_speed("images decoded by one thread", len(few_images), lambda: generator._decode(few_images, pixels))
    with torch.inference_mode():
        print_speed("images encoded", len(few_images), lambda: [generator._encode(batch) for batch in batches])
    print_speed("answers, an image each", count, lambda: answer(image_files, questions, ANSWER_TOKENS))
    shared_images = [image_files[number // 6] for number in range(count)]
    print_speed("answers, six to an image", count, lambda: answer(shared_images, questions, ANSWER_TOKENS))
    requests = ["Describe the image."] * count
    print_speed("captions", count, lambda: answer(image_files, requests, CAPTION_TOKENS))
    if torch.cuda.is_available():
        compile_layers(generator.model)
        short_count = min(count, 2 * sizes[ANSWER_TOKENS])
        print_speed(
            "answers, first with compiled layers",
            short_count,
            lambda: answer(image_files[:short_count], questions[:short_count], ANSWER_TOKENS),
        )
        print_speed("answers, compiled layers", count, lambda: answer(image_files, questions, ANSWER_TOKENS))
        print_speed("captions, compiled layers", count, lambda: answer(image_files, requests, CAPTION_TOKENS))


def measure_family(shape: str, folder: Path, sizes: list[int]) -> None:
    """Measure a model of transformers with batches of these sizes, or with its generator's own."""
    random_vlm.save_random_vlm(shape.removesuffix("-vlm"), folder / "model")
    count = FAMILY_COUNT if torch.cuda.is_available() else 12
    random, generator = np.random.default_rng(0), load_generator(folder / "model", None)
    images = []
    for number in range(count):
        path = folder / "images" / f"copy-{number}.jpg"
        path.hardlink_to(folder / "images" / f"{number % IMAGES}.jpg")
        images.append(path)
    questions = [" ".join(random.choice(WORDS, random.integers(*QUESTION_WORDS))) for _ in range(count)]
    shared = [images[number // 6] for number in range(count)]
    captions = ["Describe the image."] * count

    def answer(about: list[Path], texts: list[str], tokens: int, batch_size: int) -> None:
        generator._cache.clear()
        for _ in generator.answer(about, texts, {}, tokens, batch_size):
            pass

    answer(images[:32], questions[:32], ANSWER_TOKENS, 32)  # kernels are loaded
    for size in sizes or [generator.choose_batch_size()]:
        rows = {
            "answers, an image each": (images, questions, ANSWER_TOKENS),
            "answers, six to an image": (shared, questions, ANSWER_TOKENS),
            "captions": (images, captions, CAPTION_TOKENS),
        }
        for name, row in rows.items():
            print_speed(f"{shape}: {name}, batches of {size}", count, lambda row=row, size=size: answer(*row, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*COUNTS, *FAMILY_SHAPES], default="mgm-2b")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[], help="of a model of transformers")
    parser.add_argument("--gpu-gib", type=float, default=22.0, help="usable GiB of GPU memory (default: 22)")
    parser.add_argument("--folder", type=Path, help="folder that may contain a random model already")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        write_conversations(folder / "conversations.jsonl", [])
        if arguments.shape in COUNTS and not (folder / "mgm").exists():
            make_random_mgm(arguments.shape, folder)
        with limit_gpu_memory(arguments.gpu_gib):
            if arguments.shape in COUNTS:
                measure(folder, COUNTS[arguments.shape])
            else:
                measure_family(arguments.shape, folder, arguments.batch_sizes)


if __name__ == "__main__":
    main()
