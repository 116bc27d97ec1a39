"""Measure answers and captions per second at the shape of MGM-2B or of another family, and the time of their parts.

    python benchmarks/answers.py                                  # on one GPU with 22 GiB left free
    python benchmarks/answers.py --shape qwen3-vl-2b-instruct     # a model of transformers, at several batch sizes
    python benchmarks/answers.py --shape tiny                     # without a GPU, to try the script
    python benchmarks/answers.py --compare qwen3-vl-2b-instruct paligemma2-3b-pt-224    # with transformers' generate

`--compare` answers the same questions by transformers' `generate` and by this project's search, and compares tokens.
Weights are random, so that logits are close to each other: in bf16 other kernels choose other tokens, and the gap
between the logits of both tokens is shown. In float32 all answers must be equal. A family that fails does not end the
command.

Weights are random, images have 640×480 pixels, settings are the defaults. A random model does not end its answers, so
all answers have the greatest length. Images are decoded at the same time, as in every stage. Loading the model does not
count. For the last rows, layers are compiled. The workflow does not compile them, because this takes longer than it
saves unless there are many images.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "tests/support")]

from dj2mgm.torch_environment import set_torch_environment  # noqa: E402

set_torch_environment()  # as stages do, before PyTorch is imported

import numpy as np  # noqa: E402
import random_vlm  # noqa: E402
import torch  # noqa: E402
from loop import limit_gpu_memory  # noqa: E402
from torch import nn  # noqa: E402

from dj2mgm.models import greedy_search  # noqa: E402
from dj2mgm.models.generators import load_generator  # noqa: E402
from dj2mgm.models.mgm.mgm_family import MGMFamily  # noqa: E402
from dj2mgm.models.mgm.mgm_generator import MGMGenerator  # noqa: E402
from dj2mgm.models.mgm.modeling_mgm import MGMForConditionalGeneration  # noqa: E402
from dj2mgm.models.vision_language import Generator  # noqa: E402
from random_mgm import IMAGES, WORDS, make_random_mgm, write_conversations  # noqa: E402

ANSWER_TOKENS, CAPTION_TOKENS = 8, 64
QUESTION_WORDS = (5, 16)
COUNTS = {"mgm-2b": 8 * IMAGES, "tiny": 12}  # questions of each measurement
FAMILY_SHAPES = [f"{shape}-vlm" if shape in COUNTS else shape for shape in random_vlm.SHAPES]
FAMILY_COUNT, COMPARED_COUNT = 768, 128  # questions of each measurement of another family
SHOWN_GAPS = 4
FAMILY_S = 180  # most seconds of a compared family
PATHS = ("generate", "search")


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


class Questions(NamedTuple):
    """Questions of a measurement, with the length of their answers."""

    images: list[Path]
    texts: list[str]
    tokens: int

    def answer(self, generator: Generator, batch_size: int) -> list[str]:
        generator._cache.clear()
        return list(generator.answer(self.images, self.texts, {}, self.tokens, batch_size))

    def first(self, count: int) -> "Questions":
        return Questions(self.images[:count], self.texts[:count], self.tokens)


def make_questions(folder: Path, count: int) -> dict[str, Questions]:
    """Return the questions of each measurement, by its name."""
    random, images = np.random.default_rng(0), []
    for number in range(count):
        path = folder / "images" / f"copy-{number}.jpg"
        path.hardlink_to(folder / "images" / f"{number % IMAGES}.jpg")
        images.append(path)
    texts = [" ".join(random.choice(WORDS, random.integers(*QUESTION_WORDS))) for _ in range(count)]
    return {
        "answers, an image each": Questions(images, texts, ANSWER_TOKENS),
        "answers, six to an image": Questions([images[number // 6] for number in range(count)], texts, ANSWER_TOKENS),
        "captions": Questions(images, ["Describe the image."] * count, CAPTION_TOKENS),
    }


def load_random_generator(shape: str, folder: Path) -> Generator:
    random_vlm.save_random_vlm(shape.removesuffix("-vlm"), folder / "model")
    return load_generator(folder / "model", None)


def measure_family(shape: str, folder: Path, sizes: list[int]) -> None:
    """Measure a model of transformers with batches of these sizes, or with its generator's own."""
    generator = load_random_generator(shape, folder)
    questions = make_questions(folder, FAMILY_COUNT if torch.cuda.is_available() else 12)
    questions["answers, an image each"].first(32).answer(generator, 32)  # kernels are loaded
    for size in sizes or [generator.choose_batch_size()]:
        for name, row in questions.items():
            print_speed(
                f"{shape}: {name}, batches of {size}",
                len(row.texts),
                lambda row=row, size=size: row.answer(generator, size),
            )


def compare_families(arguments: argparse.Namespace) -> None:
    """Compare each family in a new process, which cannot disturb the others, also if it fails or hangs."""
    options = ["--count", str(arguments.count), "--gpu-gib", str(arguments.gpu_gib)]
    options += ["--batch-sizes", *map(str, arguments.batch_sizes)]
    for shape in arguments.compare:
        try:
            subprocess.run([sys.executable, __file__, "--compare", shape, *options], check=True, timeout=FAMILY_S)
        except subprocess.SubprocessError as error:
            print(json.dumps({"shape": shape, "failed": str(error)}), flush=True)


def compare_family(shape: str, folder: Path, arguments: argparse.Namespace) -> None:
    generator = load_random_generator(shape, folder)
    questions = make_questions(folder, arguments.count)
    size = arguments.batch_sizes[0] if arguments.batch_sizes else generator.choose_batch_size()
    questions["captions"] = questions["captions"].first(size)
    fitting_rows = {}
    for path in PATHS:
        with choose_path(path, generator, fitting_rows):  # kernels are loaded, and the rows that fit are found
            questions["captions"].first(size)._replace(tokens=ANSWER_TOKENS).answer(generator, size)
    for name, row in questions.items():
        tokens = []
        for path in PATHS:
            title = f"{shape}: {name}, batches of {size}, {path}"
            with choose_path(path, generator, fitting_rows):
                with record_tokens() as recorded:
                    print_speed(title, len(row.texts), lambda row=row: row.answer(generator, size))
                if name != "answers, six to an image":
                    print_parts(title, generator, row.first(size // 2), size)
            tokens.append(recorded)
        print_differences(f"{shape}: {name}", generator, *tokens)
    generator.model.float()
    if tower := getattr(generator.model.base_model, "visual", None):
        tower.config._attn_implementation = "sdpa"  # the kernel for all images together takes 16-bit numbers only
    row, tokens = questions["answers, six to an image"].first(8), []
    for path in PATHS:
        with choose_path(path, generator, {}), record_tokens() as recorded:
            row.answer(generator, 8)
        tokens.append(recorded)
    print_differences(f"{shape}: answers in float32", generator, *tokens)


@contextmanager
def choose_path(path: str, generator: Generator, fitting_rows: dict[str, int]) -> Iterator[None]:
    """Let a generator answer by transformers' `generate`, or by this project's search.

    `fitting_rows` are the rows that fit in the GPU's memory on each path.
    """
    original = greedy_search.supports_static_cache
    generator._fitting_rows = fitting_rows.get(path, sys.maxsize)
    torch.cuda.empty_cache()
    if path == "generate":
        greedy_search.supports_static_cache = lambda *_: False
    try:
        yield
    finally:
        greedy_search.supports_static_cache = original
        fitting_rows[path] = generator._fitting_rows


class RecordedAnswer(NamedTuple):
    """Tokens of an answer, and the prompts in which its own has the index `row`.

    Only the first ones have prompts, because prompts keep images in the GPU's memory.
    """

    prompts: greedy_search.Prompts | None
    row: int
    tokens: list[int]


@contextmanager
def record_tokens() -> Iterator[list[RecordedAnswer]]:
    """Return a list to which the answers of all batches are added."""
    original, recorded = greedy_search.GreedySearch.__call__, []

    @wraps(original)
    def search(self, prompts: greedy_search.Prompts) -> list[list[int]]:
        answers = original(self, prompts)
        first_prompts = None if recorded else prompts
        recorded.extend(RecordedAnswer(first_prompts, row, answer) for row, answer in enumerate(answers))
        return answers

    greedy_search.GreedySearch.__call__ = search
    try:
        yield recorded
    finally:
        greedy_search.GreedySearch.__call__ = original


@torch.inference_mode()
def print_differences(
    name: str, generator: Generator, expected: list[RecordedAnswer], actual: list[RecordedAnswer]
) -> None:
    """Print how many answers differ, and the gap between the logits of both tokens where an answer first differs."""
    gaps = []
    pairs = list(zip(expected, actual, strict=True))
    for answer, other in pairs:
        if answer.tokens == other.tokens or not answer.prompts or len(gaps) == SHOWN_GAPS:
            continue
        length = min(len(answer.tokens), len(other.tokens))
        same = next((n for n in range(length) if answer.tokens[n] != other.tokens[n]), length)
        if same == length:  # one has ended
            continue
        prompts = answer.prompts
        ids = torch.tensor([prompts.tokens[answer.row] + answer.tokens[:same]])
        cache = greedy_search.make_cache(generator.model)
        inputs = ids, torch.ones_like(ids), [prompts.images[answer.row]]
        [logits], _ = greedy_search.read_tokens(generator.model, prompts.make_inputs, *inputs, cache)
        logits = logits.float()
        chosen, also = (logits[tokens[same]].item() for tokens in (answer.tokens, other.tokens))
        gap = {"gap": chosen - also, "below_best": logits.max().item() - min(chosen, also), "std": logits.std().item()}
        gaps.append({"token": same} | {name: round(value, 4) for name, value in gap.items()})
    different = sum(answer.tokens != other.tokens for answer, other in pairs)
    first = sum(answer.tokens[:1] != other.tokens[:1] for answer, other in pairs)
    row = {"compared": name, "count": len(pairs), "different": different, "different_first_token": first}
    print(json.dumps(row | {"gaps": gaps}), flush=True)


def print_parts(name: str, generator: Generator, row: Questions, size: int) -> None:
    """Print the seconds of the parts of answers, each of which waits for the GPU."""
    seconds, running = Counter(), []

    def synchronize() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic()

    def timed(function: Callable, label: Callable[..., str]) -> Callable:
        @wraps(function)
        def run(*args, **kwargs):
            if running:  # a part of another part
                return function(*args, **kwargs)
            running.append(function)
            begin = synchronize()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[label(*args, **kwargs)] += synchronize() - begin
                running.pop()

        return run

    def count_tokens(*args, input_ids: torch.Tensor, **kwargs) -> str:
        return "prefill" if input_ids.shape[1] > 1 else "decode"

    def wait(images: list) -> Iterator:
        results = process(images)
        take = timed(lambda: next(results, None), lambda: "wait for processed images")
        while (result := take()) is not None:
            yield result

    model, step, process = generator.model, greedy_search.DecodingStep.__call__, generator._process_in_order
    generator._encode = timed(generator._encode, lambda *_: "encode images")
    generator._process_in_order = wait
    model.forward = timed(model.forward, count_tokens)
    greedy_search.DecodingStep.__call__ = timed(step, lambda *_: "decode")
    try:
        begin = synchronize()
        row.answer(generator, size)
        total = synchronize() - begin
    finally:
        del generator._encode, generator._process_in_order, model.forward
        greedy_search.DecodingStep.__call__ = step
    seconds["other"] = total - seconds.total()
    print(json.dumps({"parts": name, "seconds": {part: round(s, 2) for part, s in seconds.items()}}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*COUNTS, *FAMILY_SHAPES], default="mgm-2b")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[], help="of a model of transformers")
    parser.add_argument("--gpu-gib", type=float, default=22.0, help="usable GiB of GPU memory (default: 22)")
    parser.add_argument(
        "--compare", nargs="+", choices=FAMILY_SHAPES, default=[], metavar="SHAPE", help="families to compare"
    )
    parser.add_argument("--count", type=int, default=COMPARED_COUNT, help="questions of each comparison")
    parser.add_argument("--folder", type=Path, help="folder that may contain a random model already")
    arguments = parser.parse_args()
    if len(arguments.compare) > 1:
        return compare_families(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        write_conversations(folder / "conversations.jsonl", [])
        if arguments.shape in COUNTS and not arguments.compare and not (folder / "mgm").exists():
            make_random_mgm(arguments.shape, folder)
        with limit_gpu_memory(arguments.gpu_gib):
            if arguments.compare:
                compare_family(arguments.compare[0], folder, arguments)
            elif arguments.shape in COUNTS:
                measure(folder, COUNTS[arguments.shape])
            else:
                measure_family(arguments.shape, folder, arguments.batch_sizes)


if __name__ == "__main__":
    main()
