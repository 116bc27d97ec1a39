"""Measure samples per second, memory and losses of training steps at the shape of MGM-2B, on one GPU.

    python benchmarks/train_step.py                          # every configuration, one after the other
    python benchmarks/train_step.py lora_zero3 plain         # some of them
    python benchmarks/train_step.py --shape tiny golden      # without a GPU, to try the script

Random weights, JPEG images and conversations are made in a temporary folder. Each configuration then runs the training
stage of the workflow (launcher, data loader, DeepSpeed, optimizer) with limited GPU memory. Medians over the steps
after the first three are printed, as a table and as JSON.

`plain` is tests/support/plain_mgm.py under ZeRO-3 with offload, with batch 1. `golden_plain` trains 20 steps with it,
and `golden` with the workflow's model, on the same samples and from the same weights. Their losses are compared. The
losses of `golden_full`, whose optimizer has 8-bit states, are compared with those of AdamW in float32.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "tests/support")]

WARM_UP_STEPS = 3
# the setting of training stages, set before this script uses the GPU
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# for each stage: tokens of a sample, including its image, and tokens of its question
SEQUENCES = {"pretrain": (640, 0), "finetune": (1024, 215)}


@dataclass(frozen=True)
class TrainingCase:
    """Settings of one measured training."""

    stage: str = "finetune"
    tuning: str = "lora"  # lora, full or stage1
    deepspeed: str = "zero2"
    real_lengths: bool = False  # lengths distributed as in instructions, instead of one length
    plain: bool = False
    micro_batch_size: int = 8
    gradient_accumulation_steps: int = 16
    activation_checkpointing: bool | int = False
    compile: bool = True
    precision: str = "bf16"
    dropout: float = 0.1
    learning_rate: float = 2e-4
    steps: int = 7
    gpu_gib: float = 22.0  # usable memory of each GPU
    gpus: int = 1
    loader_workers: int = 8

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.gpus

    @property
    def samples(self) -> int:
        return self.steps * self.global_batch_size

    @property
    def data(self) -> str:
        """Path of the data in the folder of all inputs."""
        return f"{self.stage}/{'real_lengths_' * self.real_lengths}{self.samples}.jsonl"


PLAIN = TrainingCase(
    deepspeed="zero3_offload",
    plain=True,
    micro_batch_size=1,
    gradient_accumulation_steps=4,
    activation_checkpointing=True,
    compile=False,
)
GOLDEN = TrainingCase(gradient_accumulation_steps=1, activation_checkpointing=True, dropout=0.0, steps=20, gpu_gib=60)
FULL = TrainingCase(
    tuning="full",
    deepspeed="adamw_8bit",
    activation_checkpointing=True,
    learning_rate=2e-5,
    gpu_gib=24.0,
)
CONFIGURATIONS = {
    "plain": PLAIN,
    "lora_zero3": TrainingCase(
        deepspeed="zero3_offload_resident",
        micro_batch_size=16,
        gradient_accumulation_steps=8,
        activation_checkpointing=True,
    ),
    "lora_zero2": TrainingCase(),
    "lora_lengths": TrainingCase(real_lengths=True, steps=12),
    "lora_lengths_zero3": TrainingCase(
        real_lengths=True,
        deepspeed="zero3_offload_resident",
        micro_batch_size=16,
        gradient_accumulation_steps=8,
        activation_checkpointing=True,
    ),
    "stage_1": TrainingCase(
        stage="pretrain", tuning="stage1", micro_batch_size=16, activation_checkpointing=18, learning_rate=1e-3
    ),
    "lora_lengths_fp8": TrainingCase(real_lengths=True, steps=12, precision="fp8"),
    "lora_zero2_fp8": TrainingCase(precision="fp8"),
    "stage_1_fp8": TrainingCase(
        stage="pretrain",
        tuning="stage1",
        micro_batch_size=16,
        activation_checkpointing=18,
        learning_rate=1e-3,
        precision="fp8",
    ),
    "full": FULL,
    "golden": GOLDEN,
    "golden_plain": replace(
        GOLDEN, plain=True, micro_batch_size=1, gradient_accumulation_steps=8, compile=False, deepspeed="zero2"
    ),
    "golden_fp8": replace(GOLDEN, precision="fp8", steps=50),
    "golden_bf16": replace(GOLDEN, steps=50),
    "golden_full": replace(FULL, gradient_accumulation_steps=1, steps=50, dropout=0.0),
    "golden_full_fp32": replace(
        FULL, precision="fp32", gradient_accumulation_steps=1, steps=50, deepspeed="zero0", gpu_gib=120, dropout=0.0
    ),
}
COMPARED = [("golden_plain", "golden"), ("golden_bf16", "golden_fp8"), ("golden_full_fp32", "golden_full")]


def list_configurations(shape: str) -> dict[str, TrainingCase]:
    if shape != "tiny":
        return CONFIGURATIONS
    small = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "steps": 5, "loader_workers": 1}
    return {name: replace(configuration, **small) for name, configuration in CONFIGURATIONS.items()}


def train(configuration: TrainingCase, folder: Path, output: Path) -> None:
    """Run this process's part of one training stage of the workflow."""
    import torch

    import dj2mgm.models.mgm.mgm_family
    import dj2mgm.training.checkpoints
    import dj2mgm.training.stage
    import finetune
    import pretrain
    from dj2mgm.settings.training_stages import LoraSettings
    from dj2mgm.storage.files import read_json
    from dj2mgm.training.library_patches import apply_library_patches
    from dj2mgm.training.settings import TrainingSettings

    apply_library_patches()

    if torch.cuda.is_available():
        device = int(os.environ["LOCAL_RANK"])
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, configuration.gpu_gib * 2**30 / total), device)
        torch.set_float32_matmul_precision("high")  # for precision fp32
    deepspeed = read_json(PROJECT / "config" / "deepspeed" / f"{configuration.deepspeed}.json")
    if configuration.plain:
        from plain_mgm import PlainMGM

        dj2mgm.models.mgm.mgm_family.MGMForConditionalGeneration = PlainMGM
        dj2mgm.training.stage.gather_whole_layers = lambda model, parts: None
    dj2mgm.training.checkpoints.compute_sha256 = lambda *paths: ""  # hashing six gigabytes takes longer than the steps
    dj2mgm.training.stage.StageTrainer._save_checkpoint = lambda *_: None
    length = read_json(folder / "lengths.json")[configuration.stage]
    settings = TrainingSettings(
        seed=0,
        gpus=configuration.gpus,
        cpu_threads=None if torch.cuda.is_available() else 1,
        template={"pretrain": "plain", "finetune": "gemma"}[configuration.stage],
        global_batch_size=configuration.global_batch_size,
        micro_batch_size=configuration.micro_batch_size,
        gradient_accumulation_steps=configuration.gradient_accumulation_steps,
        epochs=1,
        min_steps=0,
        max_steps=None,
        learning_rate=configuration.learning_rate,
        lr_scheduler="constant",
        warmup_ratio=0.0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=length,
        precision=configuration.precision if torch.cuda.is_available() else "fp32",
        activation_checkpointing=configuration.activation_checkpointing,
        attn_implementation="auto",
        compile=configuration.compile,
        save_steps=1_000_000,
        log_steps=1,
        loader_workers=min(configuration.loader_workers, len(os.sched_getaffinity(0)) // configuration.gpus),
        check_memory=False,  # to measure configurations that run out of memory
        deepspeed=deepspeed,
        lora=LoraSettings(r=16, alpha=32, dropout=configuration.dropout, targets=["q_proj", "v_proj", "o_proj"]),
    )
    projector = folder / "projector.safetensors"
    lora = settings.lora if configuration.tuning == "lora" else None
    prepare = partial(finetune.prepare_stage_2, lora=lora, projector=projector)
    if configuration.tuning == "stage1":
        prepare = pretrain.train_projector_only
    inputs = {"data": folder / configuration.data, "model": folder / "mgm"}
    stage = dj2mgm.training.stage.StageRun(configuration.tuning, settings, inputs, output, prepare, lambda *_: None)
    stage.run()


def make_inputs(shape: str, folder: Path, cases: list[TrainingCase]) -> None:
    from dj2mgm.storage.files import write_json
    from random_mgm import make_random_mgm, measure_instruction_lengths, write_conversations

    image_tokens = make_random_mgm(shape, folder)
    text_lengths = {stage: (length - 576, question_words) for stage, (length, question_words) in SEQUENCES.items()}
    write_json(folder / "lengths.json", {s: image_tokens + n for s, (n, _) in text_lengths.items()})
    for configuration in cases:
        answer_words, question_words = text_lengths[configuration.stage]  # truncated at the sequence's end
        lengths = [(question_words, answer_words)] * configuration.samples
        if configuration.real_lengths:
            lengths = measure_instruction_lengths(configuration.samples)
        write_conversations(folder / configuration.data, lengths)


def launch(script: str, name: str, configuration: TrainingCase, folder: Path) -> int:
    """Launch `script --child` like a training stage, with a process for each GPU; return its exit status.

    The log is `<name>.log` in the folder.
    """
    command = ["bash", PROJECT / "workflow_scripts/launch.sh", str(configuration.gpus), "1", script]
    command += ["--child", json.dumps(asdict(configuration)), "--folder", folder, name]
    with open(folder / f"{name}.log", "w", encoding="utf-8") as log:
        return subprocess.run(command, env=os.environ | ALLOCATOR, stdout=log, stderr=subprocess.STDOUT).returncode


def measure(name: str, configuration: TrainingCase, folder: Path) -> dict:
    """Run a configuration in its own processes and return its row."""
    output = folder / "output" / name
    if status := launch(__file__, name, configuration, folder):
        lines = (folder / f"{name}.log").read_text(encoding="utf-8").splitlines()
        return {"configuration": name, "failed": status, "log": lines[-25:]}
    metrics = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    times = [after["seconds"] - before["seconds"] for before, after in zip(steps, steps[1:], strict=False)]
    seconds = statistics.median(times[WARM_UP_STEPS - 1 :])
    return {
        "configuration": name,
        "samples_per_second": round(configuration.global_batch_size / seconds, 2),
        "step_seconds": [round(time, 3) for time in times],
        "peak_allocated_gib": metrics["peak_gpu_gib"],
        "peak_reserved_gib": metrics["peak_gpu_reserved_gib"],
        "host_rss_gib": metrics["peak_host_rss_gib"],
        "losses": [step["loss"] for step in steps],
        "engine": metrics["engine"],
    }


def print_table(rows: list[dict]) -> None:
    print(f"\n{'configuration':<18}{'samples/s':>10}{'allocated':>11}{'reserved':>10}{'host RSS':>10}   (GiB)")
    for row in rows:
        if "failed" in row:
            print(f"{row['configuration']:<18} failed with {row['failed']}", *row["log"], sep="\n    ")
            continue
        print(
            f"{row['configuration']:<18}{row['samples_per_second']:>10}{row['peak_allocated_gib']:>11}"
            f"{row['peak_reserved_gib']:>10}{row['host_rss_gib']:>10}"
        )
    losses = {row["configuration"]: row.get("losses") for row in rows}
    for reference, other in COMPARED:
        if losses.get(reference) and losses.get(other):
            pairs = zip(losses[reference], losses[other], strict=True)
            largest_difference = max(abs(a - b) / a for a, b in pairs)
            print(f"{other} against {reference}: losses differ by at most {largest_difference:.2e} of their value")


def run_benchmark(
    description: str,
    list_cases: Callable[[str], dict[str, TrainingCase]],
    run_case: Callable[[TrainingCase, Path, Path], None],
    measure_case: Callable[[str, TrainingCase, Path], dict],
    print_rows: Callable[[list[dict]], None],
) -> None:
    """Measure the configurations that the command line names, and print and write their rows.

    Args:
        description: text of --help.
        list_cases: function (shape) → configurations by name.
        run_case: function (configuration, folder of inputs, folder of outputs), which runs in processes of its own.
        measure_case: function (name, configuration, folder) → row; it starts these processes by `launch`.
        print_rows: function that prints the table of all rows.
    """
    names = list(list_cases("mgm-2b"))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--shape", choices=["mgm-2b", "tiny"], default="mgm-2b")
    parser.add_argument("--output", type=Path, help="JSON file for the rows")
    parser.add_argument("--folder", type=Path, help="keep all files in this folder, and use existing ones")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # from DeepSpeed's launcher
    arguments = parser.parse_args()
    if arguments.child:
        [name] = arguments.names
        run_case(TrainingCase(**json.loads(arguments.child)), arguments.folder, arguments.folder / "output" / name)
        return
    if unknown := sorted(set(arguments.names) - set(names)):
        parser.error(f"there is no configuration {unknown[0]}; known are {', '.join(names)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        cases = list_cases(arguments.shape)
        if not (folder / "lengths.json").exists():
            make_inputs(arguments.shape, folder, list(cases.values()))
        rows = []
        for name in arguments.names or cases:
            rows.append(measure_case(name, cases[name], folder))
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "log"}), flush=True)
        print_rows(rows)
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_benchmark(__doc__, list_configurations, train, measure, print_table)
