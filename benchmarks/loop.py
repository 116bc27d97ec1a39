"""Measure the seconds of each phase from pairs to scores at the shape of MGM-2B, with default settings.

    python benchmarks/loop.py                    # on one GPU with 22 GiB left free
    python benchmarks/loop.py --shape tiny       # without a GPU, to try the script
    python benchmarks/loop.py --gpus 2           # on two GPUs
    python benchmarks/loop.py --folder FOLDER    # keep the results; the same command runs the missing phases
    python benchmarks/loop.py --max-steps 2      # train two steps only, to measure start, compilation and answers

Compiled code stays in FOLDER, so a loop after `--max-steps 2` in the same folder starts warm (delete rows.jsonl first).

Weights are random. There are 10 000 pairs, 12 000 instructions of realistic lengths, 500 held-out images with three
questions each, 5000 questions in TextVQA's files and 4000 in MMBench's. Each phase is Snakemake's command, including
loading and compiling. `training` are the seconds from the loaded model to the last step. A random model does not end
its answers, so all answers have eight tokens, the usual length of TextVQA's longest answers.
"""

import argparse
import base64
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
SCRIPTS = PROJECT / "workflow_scripts"
sys.path[:0] = [str(SCRIPTS), str(PROJECT / "tests/support")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from dj2mgm.runs.all_runs import Runs  # noqa: E402
from dj2mgm.runs.experiments import REFERENCE  # noqa: E402
from dj2mgm.runs.stages import Run  # noqa: E402
from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_json, write_jsonl, write_yaml  # noqa: E402
from dj2mgm.torch_environment import COMPILED_CODE  # noqa: E402
from random_mgm import IMAGES, WORDS, make_random_mgm, measure_instruction_lengths, write_conversations  # noqa: E402

COUNTS = {  # number of rows or questions of each kind
    "mgm-2b": {"pairs": 10_000, "instructions": 12_000, "held_out": 500, "textvqa": 5000, "mmbench": 4000},
    "tiny": {"pairs": 1024, "instructions": 512, "held_out": 6, "textvqa": 12, "mmbench": 12},
}
CAPTION_WORDS = (5, 31)
ANSWER_TOKENS = 8
ROWS = "rows.jsonl"  # file of measurements in the folder
QUESTIONS_PER_IMAGE = 3166 / 5000  # TextVQA's validation images and questions


def parse_count(text: str, minimum: int = 1) -> int:
    """Parse a whole number that is not below the minimum; argparse reports the error of another text."""
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {minimum}, found {text}")
    return int(text)


def parse_max_steps(text: str) -> int:
    """Parse the steps of a training, whose first and last step are measured."""
    return parse_count(text, 2)


@contextmanager
def limit_gpu_memory(gib: float | None) -> Iterator[None]:
    """Leave only this much of each GPU's memory free, as on smaller cards; this process holds the rest."""
    reserved = []
    for device in range(torch.cuda.device_count() if gib is not None else 0):
        free, _ = torch.cuda.mem_get_info(device)
        reserved.append(torch.empty(max(0, free - int(gib * 2**30)), dtype=torch.uint8, device=f"cuda:{device}"))
    yield
    reserved.clear()


def make_inputs(shape: str, folder: Path, gpus: int) -> Run:
    """Make models, data and benchmarks in a folder, and return a run with the workflow's default settings."""
    counts, random = COUNTS[shape], np.random.default_rng(2)
    make_random_mgm(shape, folder)
    captions = [(0, int(words)) for words in random.integers(*CAPTION_WORDS, counts["pairs"])]
    write_conversations(folder / "pairs.jsonl", captions)
    write_conversations(folder / "instructions.jsonl", measure_instruction_lengths(counts["instructions"]))
    words = iter(lambda: " ".join(random.choice(WORDS, 6)), None)
    question = {"type": "word", "question": next(words), "answer": WORDS[0]}
    held_out = [
        {
            "id": str(n),
            "image": f"{n % IMAGES}.jpg",
            "captions": [next(words)],
            "objects": [],
            "questions": [question] * 3,
        }
        for n in range(counts["held_out"])
    ]
    write_jsonl(folder / "evaluation.jsonl", held_out)
    benchmarks = {
        "textvqa": make_textvqa_files(folder, counts["textvqa"], words),
        "mmbench": make_mmbench_files(folder, counts["mmbench"], words),
    }
    shutil.copytree(PROJECT / "config", folder / "config")
    templates = {"pretrain_template": "gemma", "template": "gemma"}
    write_yaml(folder / "config/models/random.yaml", {"assembled": "mgm", "clip": "mgm"} | templates)
    split = {"file": "captions.jsonl", "images": "images"}
    write_yaml(folder / "config/datasets/random.yaml", {"pretrain": split, "finetune": split, "evaluation": split})
    decoding = {"max_new_tokens": ANSWER_TOKENS}
    write_yaml(folder / "command_line.yaml", {"gpus": gpus, "evaluate": decoding, "benchmarks": benchmarks})
    return load_run(folder)


def load_run(folder: Path) -> Run:
    """Change to the folder, to which its configuration's paths are relative, and return its run."""
    os.chdir(folder)
    return Runs({"model": "random", "dataset": "random"} | read_yaml("command_line.yaml")).first_seed(REFERENCE)


def make_textvqa_files(folder: Path, count: int, words: Iterator[str]) -> dict[str, str]:
    """Write questions in LLaVA's and TextVQA's formats, with TextVQA's number of questions per image."""
    names = [f"textvqa-{n}" for n in range(max(1, int(count * QUESTIONS_PER_IMAGE)))]
    for number, name in enumerate(names):
        os.link(folder / "images" / f"{number % IMAGES}.jpg", folder / "images" / f"{name}.jpg")
    questions = [(names[n % len(names)], f"{next(words)} {n}?") for n in range(count)]
    instruction = "Answer the question using a single word or phrase."
    write_jsonl(
        folder / "textvqa.jsonl",
        (
            {
                "question_id": image,
                "image": f"{image}.jpg",
                "text": f"{question}\nReference OCR token: {next(words)}\n{instruction}",
            }
            for image, question in questions
        ),
    )
    answers = [
        {"question_id": n, "image_id": image, "question": question, "answers": [WORDS[0]] * 10}
        for n, (image, question) in enumerate(questions)
    ]
    write_json(folder / "textvqa.json", {"data": answers})
    return {"questions": "textvqa.jsonl", "answers": "textvqa.json", "images": "images"}


def make_mmbench_files(folder: Path, count: int, words: Iterator[str]) -> dict[str, str]:
    """Write questions in MMBench's format, each with an image of its own."""
    images = [base64.b64encode((folder / f"images/{n}.jpg").read_bytes()).decode() for n in range(IMAGES)]
    columns = ["index", "question", "A", "B", "C", "D", "answer", "category", "image"]
    with open(folder / "mmbench.tsv", "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, dialect="excel-tab", lineterminator="\n")
        table.writerow(columns)
        for n in range(count):
            table.writerow([n, *(next(words) for _ in "?ABCD"), "A", "category", images[n % IMAGES]])
    return {"questions": "mmbench.tsv"}


@dataclass(frozen=True)
class Phase:
    """A stage of the workflow or a benchmark, run by its script.

    Attributes:
        name: name of the phase's settings and of its folder.
        script: name of the script in workflow_scripts.
        inputs: input files by flag.
    """

    name: str
    script: str
    inputs: dict[str, Path]

    @property
    def is_training(self) -> bool:
        return self.script in ("pretrain.py", "finetune.py")


def list_phases(folder: Path) -> list[Phase]:
    """Return the phases in their order."""
    model, projector = {"--model": folder / "mgm"}, folder / "pretrain/projector.safetensors"
    stages = {"--pretrained": folder / "pretrain", "--finetuned": folder / "finetune"}
    finetuned = model | {"--finetuned": folder / "finetune"}
    return [
        Phase("pretrain", "pretrain.py", model | {"--data": folder / "pairs.jsonl"}),
        Phase("finetune", "finetune.py", model | {"--data": folder / "instructions.jsonl", "--projector": projector}),
        Phase("generate", "generate_answers.py", model | stages | {"--evaluation": folder / "evaluation.jsonl"}),
        Phase("benchmarks/textvqa", "answer_benchmark.py", finetuned),
        Phase("benchmarks/mmbench", "answer_benchmark.py", finetuned),
    ]


def measure(phase: Phase, run: Run, folder: Path, gpus: int, max_steps: int | None) -> dict:
    """Run a phase and return its row; exit with its log if it fails. Trainings end after `max_steps`, if set."""
    output = folder / phase.name
    shutil.rmtree(output, ignore_errors=True)  # left by an interrupted phase
    output.mkdir(parents=True)
    limit = {"max_steps": max_steps, "min_steps": 0} if phase.is_training and max_steps else {}
    write_yaml(output / "config.yaml", run.settings[phase.name].file_content() | limit)
    flags = {"--config": output / "config.yaml"} | phase.inputs | {"--output-dir": output}
    launcher = ["bash", SCRIPTS / "launch.sh", str(gpus), "1"] if phase.is_training else [sys.executable]
    start = time.monotonic()
    with open(output / "log", "w", encoding="utf-8") as log:
        command = [*launcher, SCRIPTS / phase.script, *(word for flag in flags.items() for word in flag)]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / COMPILED_CODE)}  # as in a run of Snakemake
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
    row: dict = {"phase": phase.name, "seconds": round(time.monotonic() - start, 1)}
    if status:
        log_end = (output / "log").read_text(encoding="utf-8")[-5000:]
        raise SystemExit(f"{log_end}\n{phase.name} ended with status {status}")
    if phase.is_training:
        metrics = read_json(output / "metrics.json")
        first, *_, last = read_jsonl(output / "metrics.jsonl")
        row |= {"training": last["seconds"], "first_step": first["seconds"], "engine": metrics["engine"]}
        row |= {"gpu_gib": metrics["peak_gpu_reserved_gib"], "host_gib": metrics["peak_host_rss_gib"]}
        row["planned_gpu_gib"] = (metrics["memory_plan"] or {}).get("gpu_gib")
        row["samples_per_second"] = round(metrics["samples"] / last["seconds"], 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=COUNTS, default="mgm-2b")
    parser.add_argument("--gpus", type=parse_count, default=1, help="number of GPUs (default: 1)")
    parser.add_argument("--gpu-gib", type=float, default=22.0, help="GiB of GPU memory left free (default: 22)")
    parser.add_argument("--folder", type=Path, help="keep all files in this folder, and use existing ones")
    parser.add_argument("--max-steps", type=parse_max_steps, help="steps of each training (default: one epoch)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        has_inputs = (folder / "command_line.yaml").exists()
        run = load_run(folder) if has_inputs else make_inputs(arguments.shape, folder, arguments.gpus)
        rows = {row["phase"]: row for row in read_jsonl(folder / ROWS)} if (folder / ROWS).exists() else {}
        with limit_gpu_memory(arguments.gpu_gib):
            for phase in list_phases(folder):
                if phase.name not in rows:
                    rows[phase.name] = measure(phase, run, folder, arguments.gpus, arguments.max_steps)
                    write_jsonl(folder / ROWS, rows.values())
                print(json.dumps(rows[phase.name]), flush=True)
        print(json.dumps({"phase": "all", "seconds": round(sum(row["seconds"] for row in rows.values()), 1)}))
        os.chdir(PROJECT)


if __name__ == "__main__":
    main()
