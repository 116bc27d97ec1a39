"""Predict the minutes of a run on other GPUs, and renew the rows of README's table.

    python benchmarks/predicted_times.py            # print the rows; needs no GPU, takes a minute
    python benchmarks/predicted_times.py --write    # replace them in README.md and README.zh-CN.md

A cell is what `snakemake plan --config model=… gpu=…` prints before the data are counted.
"""

import argparse
import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "workflow_scripts"))

import torch  # noqa: E402

from dj2mgm.model_files.missing_models import compute_download_gb  # noqa: E402
from dj2mgm.planning.architecture import MGMArchitecture, find_architecture  # noqa: E402
from dj2mgm.planning.plan_table import (  # noqa: E402
    ASSUMED_HELD_OUT,
    ASSUMED_ROWS,
    HOST_GIB,
    Amounts,
    PlannedTraining,
    predict_disk,
    predict_times,
    shorten_workload,
)
from dj2mgm.planning.prediction import Machine  # noqa: E402
from dj2mgm.planning.search import find_fastest, list_candidates  # noqa: E402
from dj2mgm.planning.step import Workload  # noqa: E402
from dj2mgm.runs.experiments import REFERENCE  # noqa: E402
from dj2mgm.runs.layers import merge_experiment  # noqa: E402
from dj2mgm.settings.targets import CARDS  # noqa: E402
from dj2mgm.settings.training_stages import (  # noqa: E402
    FinetuneSection,
    PretrainSection,
    list_deepspeed_names,
)
from plan_memory import read_deepspeed_config  # noqa: E402

MODELS = ("mgm-2b", "qwen3-vl-2b", "smolvlm2-2.2b")
SHOWN_CARDS = ("rtx-3090", "rtx-4090", "h100")
PAGES = ("README.md", "README.zh-CN.md")


def build_row(model: str) -> str:
    """Return the row of a model: micro batch, GPU memory and minutes on each card, then main memory and disk."""
    architecture = find_architecture(model)
    has_stage_1 = isinstance(architecture, MGMArchitecture)
    sections = {"pretrain": PretrainSection(), "finetune": FinetuneSection()}
    workloads, batches = {}, {}
    for stage, section in sections.items() if has_stage_1 else [("finetune", sections["finetune"])]:
        text, lora = section.max_length - architecture.image_tokens, getattr(section, "lora", None)
        tuning = "lora" if lora else "stage1"
        workload = Workload(
            architecture, tuning, section.max_length, text, torch.bfloat16, fused=True, lora=lora, projector=has_stage_1
        )
        workloads[stage], batches[stage] = shorten_workload(workload), section.global_batch_size
    samples = ASSUMED_ROWS if has_stage_1 else {"finetune": sum(ASSUMED_ROWS.values())}
    configs = {name: read_deepspeed_config(name, architecture.hidden_size) for name in list_deepspeed_names()}
    weights_gb = compute_download_gb(merge_experiment(REFERENCE, {"model": model}).model)
    cells, hosts = [], []
    for card in map(CARDS.get, SHOWN_CARDS):
        machine = Machine(1, card.free_gib, HOST_GIB)
        trainings = {}
        for stage, workload in workloads.items():
            candidate = find_fastest(list_candidates(workload, machine, configs, batches[stage]))
            trainings[stage] = PlannedTraining(workload, candidate, batches[stage], architecture)
        times = predict_times(trainings, 1, card, Amounts(samples, ASSUMED_HELD_OUT))
        candidate = trainings["finetune"].candidate
        minutes = sum(time.seconds for time in times) / 60
        cells.append(f"{minutes:.0f} min ({candidate.plan.micro_batch}, {candidate.prediction.gpu_gib:.1f} GiB)")
        hosts += [training.candidate.prediction.host_gib for training in trainings.values()]
    disk = predict_disk(workloads, weights_gb)
    return f"| `{model}` | {' | '.join(cells)} | {max(hosts):.0f} GiB | {sum(disk.values()):.0f} GiB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the rows in the README files")
    args = parser.parse_args()
    for model in MODELS:
        row = build_row(model)
        print(row, flush=True)
        for page in (PROJECT / name for name in PAGES if args.write):
            text = page.read_text(encoding="utf-8")
            pattern = rf"^\| `{re.escape(model)}` \|.*$"
            page.write_text(re.sub(pattern, lambda _, row=row: row, text, flags=re.MULTILINE), encoding="utf-8")


if __name__ == "__main__":
    main()
