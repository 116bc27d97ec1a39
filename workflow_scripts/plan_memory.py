"""Predict the memory that training needs on each GPU and on the host, and print the training plans that fit.

    python workflow_scripts/plan_memory.py --model mgm-2b
    python workflow_scripts/plan_memory.py --model mgm-2b --gpus 1 --gpu-memory 23.63 --host-memory 62.6 --tuning lora
    python workflow_scripts/plan_memory.py --model 7b_mamba --gpus 6 --gpu-memory 32 --host-memory 512
    python workflow_scripts/plan_memory.py --model qwen3-vl-2b --gpu rtx-4090 --samples finetune=12000

Memory is in GiB. Flags that are left out take this machine's memory. The model runs without weights and data, and is
compiled on GPUs unless `--no-compile` is given. If no plan fits, remedies are printed. For a known GPU
(settings/targets.py), the minutes of each stage and the disk are predicted, too.
"""

import argparse
import math
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

from dj2mgm.cli.command_line import make_parser, quiet_command_line, quiet_imports

with quiet_imports():
    import torch
    from rich.console import Console

    from dj2mgm.errors import InputError
    from dj2mgm.models.tuning import TUNINGS, Tuning, find_projections
    from dj2mgm.planning.architecture import Architecture, MGMArchitecture, VLMArchitecture, find_architecture
    from dj2mgm.planning.plan_table import (
        ASSUMED_HELD_OUT,
        ASSUMED_ROWS,
        HOST_GIB,
        Amounts,
        PlannedImages,
        PlannedTraining,
        plan_images,
        predict_disk,
        predict_times,
        print_answer,
        print_plans,
        print_times,
        shorten_workload,
    )
    from dj2mgm.planning.prediction import Machine, read_free_memory
    from dj2mgm.planning.search import Candidate, find_fastest, list_candidates
    from dj2mgm.planning.step import Workload
    from dj2mgm.settings.base import find_maximum
    from dj2mgm.settings.config_files import suggest_name
    from dj2mgm.settings.configuration import Configuration
    from dj2mgm.settings.targets import CARDS, DESKTOP_GIB, GpuCard, find_card
    from dj2mgm.settings.training_stages import (
        FROZEN,
        FinetuneSection,
        LoraSettings,
        Precision,
        PretrainSection,
        is_bf16,
        list_deepspeed_names,
        read_deepspeed,
        read_deepspeed_file,
        refuse_unknown_targets,
        select_whole_weights,
    )
    from dj2mgm.storage.image_files import SHRINK_IMAGES
    from dj2mgm.training.deepspeed_config import complete_deepspeed_config


DEFAULT_SEQUENCE = 1024  # tokens


@quiet_command_line
def main() -> None:
    args = parse_arguments()
    architecture = find_architecture(args.model)
    card, machine = find_card_to_plan(args), find_machine_to_plan(args)
    configs = {Path(name).stem: read_deepspeed_config(name, architecture.hidden_size) for name in args.deepspeed}
    micro_batches = [args.micro_batch] if args.micro_batch else None
    tunings = args.tuning or (TUNINGS if architecture.image_tokens else ["full"])
    if args.precision in FROZEN:
        setting = f"--precision {args.precision}"
        configs = select_whole_weights(configs, setting, "use --deepspeed zero2")
        if "full" in (args.tuning or ()) or not architecture.image_tokens:
            raise InputError(
                f"{setting} is for frozen layers, and the tuning full trains them all; use --precision bf16"
            )
        tunings = [tuning for tuning in tunings if tuning != "full"]
    images = plan_images(architecture, args.dataset)
    longest = [build_planned_workload(images.largest, tuning, args, machine) for tuning in tunings]
    workloads = [shorten_workload(workload) for workload in longest] if args.max_length else longest
    batches = choose_batches(args, machine.processes, has_times=card is not None)
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=max(120, console.width), highlight=False)  # for files and pipes
    with console.status(f"Tracing a step of {architecture.name} with each tuning ({', '.join(tunings)}) …"):
        candidates = search_all(workloads, machine, configs, batches, micro_batches)
        rows = describe_rows(images, longest, workloads, machine, configs, batches, args)
    searches = list(zip(workloads, candidates, strict=True))
    trainings = find_trainings(searches, images.usual, batches)
    amounts = choose_amounts(trainings, args)
    is_timed = card and architecture.image_tokens and all(training.candidate for training in trainings.values())
    times = predict_times(trainings, machine.processes, card, amounts) if is_timed else []
    planned = {stage: training.workload for stage, training in trainings.items()}
    disk = predict_disk(planned, args.weights_gb) if architecture.image_tokens else {}
    print_answer(console, trainings, machine, times, disk, args.next)
    for note in args.note:
        console.print(note, markup=False)
    assumptions = [describe_assumptions(card, machine)] if args.gpu else []
    print_plans(console, searches, machine, "\n".join([*assumptions, *filter(None, [rows])]))
    if architecture.image_tokens and card is None:
        print(f"\n{explain_missing_times(machine)}")
    elif architecture.image_tokens and args.held_out is None:
        console.print(describe_assumed_amounts(amounts))
    if times:
        print_times(console, times, [workload.tuning for workload in planned.values()], machine, card, disk)
    for text in args.text:
        console.print(f"\n{text.read_text(encoding='utf-8')}", end="", markup=False)


def parse_arguments() -> argparse.Namespace:
    """Parse the flags; numbers have the limits of the settings that they stand for."""
    parser = make_parser(__doc__)
    add = parser.add_argument

    def add_number(flag: str, section: type, key: str, minimum: int = 1, **options) -> None:
        add(flag, type=make_number_parser(flag, minimum, find_maximum(section, key)), **options)

    add("--model", required=True, help="name in config/models or config/presets, folder, config.json or hub id")
    add("--tuning", action="append", choices=TUNINGS, help="kind of tuning; repeatable (default: all that apply)")
    add_number("--gpus", Configuration, "gpus", 0, help="GPUs of the machine; 0 plans for its CPU")
    nodes_help = "nodes with equally many GPUs; --host-memory is that of one node"
    add_number("--nodes", Configuration, "nodes", default=1, help=nodes_help)
    add("--gpu", help=f"another machine's card: {', '.join(CARDS)}")
    desktop_help = f"GiB of the card that a desktop takes (default: {DESKTOP_GIB} on a card with a display)"
    add("--desktop-memory", type=make_memory_parser("--desktop-memory", 0), help=desktop_help)
    add("--dataset", type=Path, help="folder below results/datasets, whose images' sizes are planned for")
    add("--samples", type=parse_samples, action="append", default=[], help="STAGE=NUMBER that the stage trains on")
    add("--held-out", type=make_number_parser("--held-out", 0, 10**9), help="number of held-out images")
    add("--weights-gb", type=float, help="GB of the downloaded weights")
    add("--gpu-memory", type=make_memory_parser("--gpu-memory"), help="usable GiB of each GPU")
    add("--host-memory", type=make_memory_parser("--host-memory"), help="usable GiB of main memory")
    sequence_help = "tokens of a sample with its image (default 1024)"
    add_number("--sequence", FinetuneSection, "max_length", help=sequence_help)
    max_length_help = "instead of --sequence: plan for the longest rows of usual data, with at most so many tokens"
    add_number("--max-length", FinetuneSection, "max_length", help=max_length_help)
    micro_batch_help = "samples of a micro batch (default: powers of two are compared)"
    add_number("--micro-batch", FinetuneSection, "micro_batch_size", help=micro_batch_help)
    global_batch_help = "samples of a step (default: 16 micro batches on every GPU)"
    add_number("--global-batch", FinetuneSection, "global_batch_size", help=global_batch_help)
    add_number("--pretrain-batch", PretrainSection, "global_batch_size", help="the same, of stage 1")
    add("--deepspeed", action="append", help="name in config/deepspeed or JSON file; repeatable (default: all)")
    add_number("--lora-rank", LoraSettings, "r", default=16)
    add("--lora-target", action="append", help="layer, or all; repeatable (default: q_proj, v_proj, o_proj)")
    add("--precision", choices=get_args(Precision), default="auto", help="precision of the stage (default: auto)")
    add("--no-compile", dest="compile", action="store_false", help="plan for compile: false (default: compile: true)")
    add("--text", type=Path, nargs="*", default=[], help="files to print after the plans, such as plan_power.py's")
    add("--next", action="append", default=[], help="command to name as the next one; repeatable")
    add("--note", action="append", default=[], help="sentence to print before the plans; repeatable")
    args = parser.parse_args()
    if args.gpu and args.gpu not in CARDS:
        raise InputError(f"--gpu: {args.gpu} is unknown; {suggest_name(args.gpu, CARDS)}")
    if args.gpu and args.gpus == 0:
        raise InputError("--gpu: --gpus 0 plans for the CPU; leave out one of the two flags")
    if args.gpus == 0 and args.gpu_memory is not None:
        raise InputError("--gpu-memory: --gpus 0 plans for the CPU; leave out one of the two flags")
    if args.max_length and args.sequence:
        raise InputError("--max-length: --sequence states the planned length; leave out one of the two flags")
    args.sequence = args.sequence or args.max_length or DEFAULT_SEQUENCE
    args.deepspeed = args.deepspeed or list_deepspeed_names()
    args.lora_target = args.lora_target or ["q_proj", "v_proj", "o_proj"]
    return args


def parse_samples(text: str) -> tuple[str, int]:
    stage, _, number = text.partition("=")
    if stage not in ASSUMED_ROWS:
        raise InputError(f"--samples: expected {' or '.join(ASSUMED_ROWS)}=NUMBER, found {text}")
    return stage, make_number_parser(f"--samples {stage}", 1, 10**12)(number)


def make_memory_parser(flag: str, minimum: float = math.ulp(0.0)) -> Callable[[str], float]:
    """Return a function that parses a flag's GiB, and raises InputError for any text but a number above 0."""

    def parse(text: str) -> float:
        try:
            size = float(text)
        except ValueError:
            size = math.nan
        if not minimum <= size < math.inf:
            raise InputError(f"{flag}: expected GiB above 0, such as 23.63; found {text}")
        return size

    return parse


def make_number_parser(flag: str, minimum: int, maximum: int) -> Callable[[str], int]:
    """Return a function that parses a flag's whole number, and raises InputError for any other text."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text[:20]) < minimum:
            raise InputError(f"{flag}: expected a whole number of at least {minimum}, found {text}")
        if int(text[:20]) > maximum:
            raise InputError(f"{flag}: at most {maximum}, found {text}")
        return int(text[:20])

    return parse


def describe_assumptions(card: GpuCard, machine: Machine) -> str:
    """Return what is known and assumed about the machine of `--gpu`."""
    taken = card.memory_gib - machine.gpu_gib
    desktop = f"a desktop takes {taken:.1f} GiB of it" if taken > 0 else "no desktop takes any of it"
    return (
        f"{card.title}: {card.describe()}.\nAssumed: {desktop} (plan.desktop_gib), and {machine.host_gib:g} GiB of "
        "main memory are free (plan.host_gib)."
    )


def find_card_to_plan(args: argparse.Namespace) -> GpuCard | None:
    """Return the card of `--gpu`, otherwise that of this machine; None if there is none or if it is not known."""
    if args.gpu:
        return CARDS[args.gpu]
    return find_card(torch.cuda.get_device_name(0)) if torch.cuda.is_available() and args.gpus != 0 else None


def choose_batches(args: argparse.Namespace, processes: int, has_times: bool) -> dict[Tuning, int | None]:
    """Return the samples of a step by tuning; minutes need a number, and otherwise None leaves it to the plan.

    The default is rounded up to a number that consists of the stated micro batches.
    """
    unit = (args.micro_batch or 1) * processes
    batches = {}
    for tuning in TUNINGS:
        section, batch = (
            (PretrainSection, args.pretrain_batch) if tuning == "stage1" else (FinetuneSection, args.global_batch)
        )
        default = section.model_fields["global_batch_size"].default
        if args.micro_batch:
            default = -(-default // unit) * unit
        batches[tuning] = batch or (default if has_times else args.global_batch)
    return batches


def describe_rows(
    images: PlannedImages,
    longest: list[Workload],
    workloads: list[Workload],
    machine: Machine,
    configs: dict[str, dict],
    batches: dict[Tuning, int | None],
    args: argparse.Namespace,
) -> str:
    """Return sentences about the rows that are planned for, and whether the longest rows of the settings fit, too."""
    if not args.max_length:
        return images.sentence
    texts = " or ".join(f"{text} ({names})" for text, names in _group_texts(workloads).items())
    text = "text in addition to an image" if workloads[0].architecture.image_tokens else "text"
    sentence = (
        f"{images.sentence} Planned: rows as long as the longest of usual data, with {texts} tokens of {text}. A "
        "training reads the lengths of its rows and plans again."
    ).lstrip()
    pairs = zip(longest, workloads, strict=True)
    shortened = [workload for workload, planned in pairs if workload.sequence_length > planned.sequence_length]
    if not shortened:
        return sentence
    micro_batches = [args.micro_batch or 1]
    too_long = [
        workload.tuning
        for workload in shortened
        if not any(
            each.fits for each in list_candidates(workload, machine, configs, batches[workload.tuning], micro_batches)
        )
    ]
    fit = "fit, too" if args.micro_batch else "fit, too, in smaller micro batches"
    fate = f"do not fit ({', '.join(too_long)})" if too_long else fit
    return f"{sentence} Rows of max_length ({args.max_length:,} tokens) {fate}."


def _group_texts(workloads: list[Workload]) -> dict[int, str]:
    """Return the tunings by their tokens of text."""
    texts: dict[int, list[str]] = {}
    for workload in workloads:
        texts.setdefault(workload.answer_tokens, []).append(workload.tuning)
    return {text: ", ".join(tunings) for text, tunings in texts.items()}


def find_trainings(
    searches: list[tuple[Workload, list[Candidate]]], usual: Architecture, batches: dict[Tuning, int | None]
) -> dict[str, PlannedTraining]:
    """Return the planned training of each stage; stage 2 uses LoRA if it is planned."""
    by_tuning = {
        workload.tuning: PlannedTraining(workload, find_fastest(candidates), batches[workload.tuning], usual)
        for workload, candidates in searches
    }
    stages = {
        "pretrain": by_tuning.get("stage1"),
        "finetune": by_tuning.get("lora", by_tuning.get("full")),
    }
    return {stage: training for stage, training in stages.items() if training}


def choose_amounts(trainings: dict[str, PlannedTraining], args: argparse.Namespace) -> Amounts:
    """Return the samples and held-out images of the flags, or assumed ones."""
    samples = ASSUMED_ROWS if "pretrain" in trainings else {"finetune": sum(ASSUMED_ROWS.values())}
    return Amounts(samples | dict(args.samples), ASSUMED_HELD_OUT if args.held_out is None else args.held_out)


def explain_missing_times(machine: Machine) -> str:
    """Return why no minutes are predicted."""
    reason = "this plan is for the processor of this machine"
    if machine.gpus:
        has_gpu = torch.cuda.is_available()
        reason = f"the rates of {torch.cuda.get_device_name(0)} are unknown" if has_gpu else "no GPU is named"
    return f"No minutes are predicted, because {reason}. gpu=<name> plans for a card: {', '.join(CARDS)}."


def describe_assumed_amounts(amounts: Amounts) -> str:
    rows = " + ".join(f"{number:,}" for number in amounts.samples.values())
    return (
        f"\nNothing has counted your data yet: {rows} samples and {amounts.held_out} held-out images are assumed. "
        "`snakemake check` counts them in seconds."
    )


def find_machine_to_plan(args: argparse.Namespace) -> Machine:
    if args.gpu:
        card = CARDS[args.gpu]
        free = card.free_gib if args.desktop_memory is None else max(0.0, card.memory_gib - args.desktop_memory)
        free = args.gpu_memory or free
        return Machine(args.gpus or 1, free, args.host_memory or HOST_GIB, args.nodes)
    if args.gpus and args.gpu_memory is None and not torch.cuda.is_available():
        raise InputError("--gpu-memory: there is no GPU here; give the usable GiB of each GPU")
    machine = read_free_memory(1 if args.gpus is None else args.gpus, args.nodes)
    if args.gpu_memory is not None:
        machine = replace(machine, gpus=args.gpus or 1, gpu_gib=args.gpu_memory, nodes=args.nodes)
    return machine if args.host_memory is None else replace(machine, host_gib=args.host_memory)


_inherited_arguments: tuple = ()  # forked processes inherit searches, because workloads cannot be pickled


def search_all(
    workloads: list[Workload],
    machine: Machine,
    configs: dict[str, dict],
    batches: dict[Tuning, int | None],
    micro_batches: list[int] | None,
) -> list[list[Candidate]]:
    """Return the plans of each workload (`list_candidates`); on several cores, each workload has its own process.

    Traces run in Python and use no GPU, so processes share the work. Forked processes need no imports.
    """
    processes = min(len(workloads), len(os.sched_getaffinity(0)))
    searches = [(workload, machine, configs, batches[workload.tuning], micro_batches) for workload in workloads]
    if processes == 1:
        return [list_candidates(*search) for search in searches]
    with ProcessPoolExecutor(processes, get_context("fork"), _inherit, tuple(searches)) as pool:
        return list(pool.map(_search, range(len(workloads))))


def _inherit(*arguments) -> None:
    global _inherited_arguments
    _inherited_arguments = arguments
    torch.set_num_threads(1)


def _search(number: int) -> list[Candidate]:
    return list_candidates(*_inherited_arguments[number])


def build_planned_workload(
    architecture: Architecture, tuning: Tuning, args: argparse.Namespace, machine: Machine
) -> Workload:
    """Return the workload of the flags; raise InputError if the samples have no room for text."""
    if tuning != "full" and not architecture.image_tokens:
        raise InputError(f"--tuning {tuning}: {architecture.name} is a text model, whose only tuning is full")
    text = args.sequence - architecture.image_tokens
    if text <= 0:
        flag, remedy, image = f"--sequence {args.sequence}", "Raise it", "an image"
        if args.max_length:
            flag, remedy = f"max_length {args.max_length}", "Raise it in the stage's settings"
        if args.dataset and isinstance(architecture, VLMArchitecture):
            image, remedy = "the largest image", f"{remedy}, or shrink your images: {SHRINK_IMAGES}"
        raise InputError(f"{flag}: {image} alone takes {architecture.image_tokens} tokens. {remedy}")
    precision = torch.bfloat16 if is_bf16(args.precision, machine.gpus > 0) else torch.float32
    fused = args.compile and machine.gpus > 0  # a CPU has no kernels
    lora = None
    if tuning == "lora":
        targets = "all" if "all" in args.lora_target else args.lora_target
        if targets != "all":
            decoder = architecture.get_language_model(architecture.build(precision)).layers
            refuse_unknown_targets(targets, find_projections(decoder), "--lora-target")
        lora = LoraSettings(r=args.lora_rank, alpha=2 * args.lora_rank, dropout=0.1, targets=targets)
    has_stage_1 = isinstance(architecture, MGMArchitecture) or "stage1" in (args.tuning or TUNINGS)
    return Workload(
        architecture,
        tuning,
        args.sequence,
        text,
        precision,
        fused,
        lora,
        projector=has_stage_1,
        nf4=args.precision == "nf4",
    )


def read_deepspeed_config(name: str, hidden_size: int) -> dict:
    """Read a DeepSpeed configuration by its name in config/deepspeed, or from a file."""
    config = read_deepspeed_file(Path(name)) if Path(name).is_file() else read_deepspeed(name, "--deepspeed")
    return complete_deepspeed_config(config, hidden_size)


if __name__ == "__main__":
    main()
