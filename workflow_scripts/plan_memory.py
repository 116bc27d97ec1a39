"""Predict the memory that training needs on each GPU and on the host, and print the training plans that fit.

    python workflow_scripts/plan_memory.py --model mgm-2b
    python workflow_scripts/plan_memory.py --model mgm-2b --gpus 1 --gpu-memory 23.63 --host-memory 62.6 --tuning lora
    python workflow_scripts/plan_memory.py --model 7b_mamba --gpus 6 --gpu-memory 32 --host-memory 512

Memory is in GiB. Flags that are left out take this machine's memory. The model runs without weights and data, and is
compiled on GPUs unless `--no-compile` is given. If no plan fits, remedies are printed.
"""

import argparse
import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from dj2mgm.cli.command_line import make_parser, quiet_command_line, quiet_imports

with quiet_imports():
    import torch
    from rich.console import Console

    from dj2mgm.errors import InputError
    from dj2mgm.models.tuning import TUNINGS, Tuning
    from dj2mgm.planning.architecture import DEFAULT_IMAGE_SIZE, Architecture, VLMArchitecture, find_architecture
    from dj2mgm.planning.plan_table import print_plans
    from dj2mgm.planning.prediction import Machine, read_free_memory
    from dj2mgm.planning.search import Candidate, list_candidates
    from dj2mgm.planning.step import Workload
    from dj2mgm.settings.config_files import read_json_config
    from dj2mgm.settings.deepspeed_files import list_deepspeed_names, read_deepspeed
    from dj2mgm.settings.training_stages import LoraSettings
    from dj2mgm.training.deepspeed_config import complete_deepspeed_config


@quiet_command_line
def main() -> None:
    args = parse_arguments()
    architecture = find_architecture(args.model)
    machine = find_machine_to_plan(args)
    configs = {Path(name).stem: read_deepspeed_config(name, architecture.hidden_size) for name in args.deepspeed}
    micro_batches = [args.micro_batch] if args.micro_batch else None
    tunings = args.tuning or (TUNINGS if architecture.image_tokens else ["full"])
    workloads = [build_planned_workload(architecture, tuning, args, machine) for tuning in tunings]
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(120, console.width))  # for files and pipes
    with console.status(f"Tracing a step of {architecture.name} with each tuning ({', '.join(tunings)}) …"):
        candidates = search_all(workloads, machine, configs, args.global_batch, micro_batches)
    print_plans(console, list(zip(workloads, candidates, strict=True)), machine)
    if args.power:
        print(f"\n{args.power.read_text(encoding='utf-8')}", end="")
    for note in args.note:
        print(note)


def parse_arguments() -> argparse.Namespace:
    """Parse the flags; without `--deepspeed`, all configurations of the project are compared."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="name in config/models or config/presets, folder, config.json or hub id")
    add("--tuning", action="append", choices=TUNINGS, help="kind of tuning; repeatable (default: all that apply)")
    add("--gpus", type=none_or_more, help="GPUs of the machine; 0 plans for its CPU")
    add("--nodes", type=whole_number, default=1, help="nodes with equally many GPUs; --host-memory is that of one node")
    add("--gpu-memory", type=positive, help="usable GiB of each GPU")
    add("--host-memory", type=positive, help="usable GiB of main memory")
    add("--sequence", type=whole_number, default=1024, help="tokens of a sample with its image (default 1024)")
    add("--micro-batch", type=whole_number, help="samples of a micro batch (default: powers of two are compared)")
    add("--global-batch", type=whole_number, help="samples of a step (default: 16 micro batches on every GPU)")
    add("--deepspeed", action="append", help="name in config/deepspeed or JSON file; repeatable (default: all)")
    add("--lora-rank", type=whole_number, default=16)
    add("--lora-target", action="append", help="layer, or all; repeatable (default: q_proj, v_proj, o_proj)")
    add("--no-compile", dest="compile", action="store_false", help="plan for compile: false (default: compile: true)")
    add("--fused", action="store_true", help=argparse.SUPPRESS)  # older commands have it; it is the default now
    add("--power", type=Path, help="text to print after the plans: output of plan_power.py")
    add("--note", action="append", default=[], help="sentence to print after the plans; repeatable")
    args = parser.parse_args()
    args.deepspeed = args.deepspeed or list_deepspeed_names()
    args.lora_target = args.lora_target or ["q_proj", "v_proj", "o_proj"]
    return args


def positive(text: str) -> float:
    """Parse a number above 0; argparse reports the ValueError of another text."""
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


def whole_number(text: str) -> int:
    """Parse a whole number above 0; argparse reports the ValueError of another text."""
    return int(positive(str(int(text))))


def none_or_more(text: str) -> int:
    return 0 if int(text) == 0 else whole_number(text)


def find_machine_to_plan(args: argparse.Namespace) -> Machine:
    if args.gpus and args.gpu_memory is None and not torch.cuda.is_available():
        raise InputError("--gpu-memory: there is no GPU here; give the usable GiB of each GPU")
    machine = read_free_memory(1 if args.gpus is None else args.gpus, args.nodes)
    if args.gpu_memory is not None:
        machine = replace(machine, gpus=args.gpus or 1, gpu_gib=args.gpu_memory, nodes=args.nodes)
    return machine if args.host_memory is None else replace(machine, host_gib=args.host_memory)


_inherited_arguments: tuple = ()  # forked processes inherit workloads and settings, because workloads cannot be pickled


def search_all(workloads: list[Workload], *settings) -> list[list[Candidate]]:
    """Return the plans of each workload (`list_candidates`); on several cores, each workload has its own process.

    Traces run in Python and use no GPU, so processes share the work. Forked processes need no imports.
    """
    processes = min(len(workloads), len(os.sched_getaffinity(0)))
    if processes == 1:
        return [list_candidates(workload, *settings) for workload in workloads]
    with ProcessPoolExecutor(processes, get_context("fork"), _inherit, (workloads, settings)) as pool:
        return list(pool.map(_search, range(len(workloads))))


def _inherit(*arguments) -> None:
    global _inherited_arguments
    _inherited_arguments = arguments
    torch.set_num_threads(1)


def _search(number: int) -> list[Candidate]:
    workloads, settings = _inherited_arguments
    return list_candidates(workloads[number], *settings)


def build_planned_workload(
    architecture: Architecture, tuning: Tuning, args: argparse.Namespace, machine: Machine
) -> Workload:
    """Return the workload of the flags; raise InputError if the samples have no room for text."""
    if tuning != "full" and not architecture.image_tokens:
        raise InputError(f"--tuning {tuning}: {architecture.name} is a text model, whose only tuning is full")
    text = args.sequence - architecture.image_tokens
    if text <= 0:
        width, height = DEFAULT_IMAGE_SIZE
        size_note = f" at {width}×{height} pixels" if isinstance(architecture, VLMArchitecture) else ""
        raise InputError(
            f"--sequence {args.sequence}: an image alone takes {architecture.image_tokens} tokens{size_note}; raise it"
        )
    # a CPU has no kernels
    precision, fused = (torch.bfloat16, args.compile) if machine.gpus else (torch.float32, False)
    lora = None
    if tuning == "lora":
        targets = "all" if "all" in args.lora_target else args.lora_target
        lora = LoraSettings(r=args.lora_rank, alpha=2 * args.lora_rank, dropout=0.1, targets=targets)
    return Workload(architecture, tuning, args.sequence, text, precision, fused, lora)


def read_deepspeed_config(name: str, hidden_size: int) -> dict:
    """Read a DeepSpeed configuration by its name in config/deepspeed, or from a file."""
    config = read_json_config(Path(name)) if Path(name).is_file() else read_deepspeed(name, "--deepspeed")
    return complete_deepspeed_config(config, hidden_size)


if __name__ == "__main__":
    main()
