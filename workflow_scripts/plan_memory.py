"""Predict the memory that training needs on each GPU and on the host, and print the training plans that fit.

    python workflow_scripts/plan_memory.py --config results/plan/config.yaml --text results/plan/power.txt
    python workflow_scripts/plan_memory.py model=mgm-2b gpus=1 gpu_gib=23.63 host_gib=62.6 'tunings=[lora]'
    python workflow_scripts/plan_memory.py model=7b_mamba gpus=6 gpu_gib=32 host_gib=512
    python workflow_scripts/plan_memory.py model=qwen3-vl-2b gpu=rtx-4090 'samples={finetune: 12000}'

Memory is in GiB. Keys that are left out take this machine's memory; `PlanSettings` lists all of them. The model runs
without weights and data, and is compiled on GPUs unless `compile` is false. If no plan fits, remedies are printed. For
a known GPU (settings/targets.py), the minutes of each stage and the disk are predicted, too.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

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
    from dj2mgm.settings.base import Number, Section, build_schema, section, setting
    from dj2mgm.settings.config_files import read_arguments, read_config
    from dj2mgm.settings.targets import CARDS, DESKTOP_GIB, GpuCard, find_card
    from dj2mgm.settings.training_stages import (
        FROZEN,
        FinetuneSection,
        GlobalBatch,
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
    from dj2mgm.settings.validation import Layer, validate_settings
    from dj2mgm.storage.image_files import SHRINK_IMAGES
    from dj2mgm.training.deepspeed_config import complete_deepspeed_config


DEFAULT_SEQUENCE = 1024  # tokens


@quiet_command_line
def main() -> None:
    args = parse_arguments()
    settings = read_settings(args)
    architecture = find_architecture(settings.model)
    card, machine = find_card_to_plan(settings), find_machine_to_plan(settings)
    configs = {
        Path(name).stem: read_deepspeed_config(name, architecture.hidden_size)
        for name in settings.deepspeed or list_deepspeed_names()
    }
    micro_batches = [settings.micro_batch] if settings.micro_batch else None
    tunings = settings.tunings or (TUNINGS if architecture.image_tokens else ["full"])
    if settings.precision in FROZEN:
        choice = f"precision: {settings.precision}"
        configs = select_whole_weights(configs, choice, "set deepspeed: [zero2]")
        if "full" in (settings.tunings or ()) or not architecture.image_tokens:
            raise InputError(f"{choice} is for frozen layers, and the tuning full trains them all; set precision: bf16")
        tunings = [tuning for tuning in tunings if tuning != "full"]
    images = plan_images(architecture, settings.dataset and Path(settings.dataset))
    longest = [build_planned_workload(images.largest, tuning, settings, machine) for tuning in tunings]
    workloads = [shorten_workload(workload) for workload in longest] if settings.max_length else longest
    batches = choose_batches(settings, machine.processes, has_times=card is not None)
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=max(120, console.width), highlight=False)  # for files and pipes
    with console.status(f"Tracing a step of {architecture.name} with each tuning ({', '.join(tunings)}) …"):
        candidates = search_all(workloads, machine, configs, batches, micro_batches)
        rows = describe_rows(images, longest, workloads, machine, configs, batches, settings)
    searches = list(zip(workloads, candidates, strict=True))
    trainings = find_trainings(searches, images.usual, batches)
    amounts = choose_amounts(trainings, settings)
    is_timed = card and architecture.image_tokens and all(training.candidate for training in trainings.values())
    times = predict_times(trainings, machine.processes, card, amounts) if is_timed else []
    planned = {stage: training.workload for stage, training in trainings.items()}
    disk = predict_disk(planned, settings.weights_gb) if architecture.image_tokens else {}
    print_answer(console, trainings, machine, times, disk, settings.next)
    for note in settings.notes:
        console.print(note, markup=False)
    assumptions = [describe_assumptions(card, machine)] if settings.gpu else []
    print_plans(console, searches, machine, "\n".join([*assumptions, *filter(None, [rows])]))
    if architecture.image_tokens and card is None:
        print(f"\n{explain_missing_times(machine)}")
    elif architecture.image_tokens and settings.held_out is None:
        console.print(describe_assumed_amounts(amounts))
    if times:
        print_times(console, times, [workload.tuning for workload in planned.values()], machine, card, disk)
    for text in args.text:
        console.print(f"\n{text.read_text(encoding='utf-8')}", end="", markup=False)


class PlanSettings(Section):
    """Settings of a plan; GiB are the usable ones of each GPU or of each node's main memory."""

    model: str = setting(..., "name in config/models or config/presets, folder, config.json or hub id")
    tunings: list[Tuning] | None = setting(None, "null: all that apply", min_length=1)
    gpus: int | None = setting(None, "GPUs of the machine; 0: its CPU; null: one, if there is one", ge=0, le=1024)
    nodes: int = setting(1, "nodes with equally many GPUs", ge=1, le=4096)
    gpu: Literal[tuple(CARDS)] | None = setting(None, "another machine's card")
    desktop_gib: Annotated[Number, Field(ge=0)] | None = setting(
        None, f"GiB of the card that a desktop takes; null: {DESKTOP_GIB} on a card with a display"
    )
    gpu_gib: Annotated[Number, Field(gt=0)] | None = setting(None, "null: this machine's")
    host_gib: Annotated[Number, Field(gt=0)] | None = setting(None, "GiB of main memory; null: this machine's")
    dataset: str | None = setting(None, "folder below results/datasets, whose images' sizes are planned for")
    samples: dict[Literal["pretrain", "finetune"], int] = setting({}, "samples of each training stage")
    held_out: int | None = setting(None, "held-out images; null: nothing has counted the data", ge=0)
    weights_gb: Number | None = setting(None, "GB of the downloaded weights")
    sequence: int | None = setting(None, f"tokens of a sample with its image; null: {DEFAULT_SEQUENCE}", ge=1, le=2**24)
    max_length: int | None = setting(
        None,
        "most tokens of a sample, in place of sequence: the longest rows of usual data are planned",
        ge=1,
        le=2**24,
    )
    micro_batch: int | None = setting(None, "samples; null: powers of two are compared", ge=1, le=65536)
    global_batch: GlobalBatch | None = setting(None, "samples of a step; null: 16 micro batches on every GPU")
    pretrain_batch: GlobalBatch | None = setting(None, "the same, of stage 1")
    deepspeed: list[str] = setting([], "names in config/deepspeed or JSON files; []: all")
    lora: LoraSettings = section(LoraSettings)
    precision: Precision = setting("auto")
    compile: bool = setting(True)
    next: list[str] = setting([], "commands to name as the next ones")
    notes: list[str] = setting([], "sentences to print before the plans")

    @property
    def length(self) -> int:
        """Tokens of the longest planned sample."""
        return self.sequence or self.max_length or DEFAULT_SEQUENCE


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=Path, help="file of settings")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files to print after the plans")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings, which override those of the file")
    return parser.parse_args()


def read_settings(args: argparse.Namespace) -> PlanSettings:
    """Return the settings of the file and of the command line, which overrides the file."""
    schema, source = build_schema(PlanSettings), "the command line"
    layers = [Layer(str(args.config), read_config(args.config, schema))] if args.config else []
    layers.append(Layer(source, read_arguments(args.words, schema, source)))
    values = {key: value for layer in layers for key, value in layer.values.items()}
    settings = validate_settings(PlanSettings, values, source, layers)
    if settings.gpus == 0 and (settings.gpu or settings.gpu_gib is not None):
        key = "gpu" if settings.gpu else "gpu_gib"
        raise InputError(f"{key}: the plan is for the CPU (gpus: 0); leave out one of the two keys")
    if settings.max_length and settings.sequence:
        raise InputError("max_length: sequence states the planned length; leave out one of the two keys")
    return settings


def describe_assumptions(card: GpuCard, machine: Machine) -> str:
    """Return what is known and assumed about the machine of `gpu`."""
    taken = card.memory_gib - machine.gpu_gib
    desktop = f"a desktop takes {taken:.1f} GiB of it" if taken > 0 else "no desktop takes any of it"
    return (
        f"{card.title}: {card.describe()}.\nAssumed: {desktop} (plan.desktop_gib), and {machine.host_gib:g} GiB of "
        "main memory are free (plan.host_gib)."
    )


def find_card_to_plan(settings: PlanSettings) -> GpuCard | None:
    """Return the card of `gpu`, otherwise that of this machine; None if there is none or if it is not known."""
    if settings.gpu:
        return CARDS[settings.gpu]
    return find_card(torch.cuda.get_device_name(0)) if torch.cuda.is_available() and settings.gpus != 0 else None


def choose_batches(settings: PlanSettings, processes: int, has_times: bool) -> dict[Tuning, int | None]:
    """Return the samples of a step by tuning; minutes need a number, and otherwise None leaves it to the plan.

    The default is rounded up to a number that consists of the stated micro batches.
    """
    unit = (settings.micro_batch or 1) * processes
    batches = {}
    for tuning in TUNINGS:
        section, batch = (
            (PretrainSection, settings.pretrain_batch)
            if tuning == "stage1"
            else (FinetuneSection, settings.global_batch)
        )
        default = section.model_fields["global_batch_size"].default
        if settings.micro_batch:
            default = -(-default // unit) * unit
        batches[tuning] = batch or (default if has_times else settings.global_batch)
    return batches


def describe_rows(
    images: PlannedImages,
    longest: list[Workload],
    workloads: list[Workload],
    machine: Machine,
    configs: dict[str, dict],
    batches: dict[Tuning, int | None],
    settings: PlanSettings,
) -> str:
    """Return sentences about the rows that are planned for, and whether the longest rows of the settings fit, too."""
    if not settings.max_length:
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
    micro_batches = [settings.micro_batch or 1]
    too_long = [
        workload.tuning
        for workload in shortened
        if not any(
            each.fits for each in list_candidates(workload, machine, configs, batches[workload.tuning], micro_batches)
        )
    ]
    fit = "fit, too" if settings.micro_batch else "fit, too, in smaller micro batches"
    fate = f"do not fit ({', '.join(too_long)})" if too_long else fit
    return f"{sentence} Rows of max_length ({settings.max_length:,} tokens) {fate}."


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


def choose_amounts(trainings: dict[str, PlannedTraining], settings: PlanSettings) -> Amounts:
    """Return the samples and held-out images of the settings, or assumed ones."""
    samples = ASSUMED_ROWS if "pretrain" in trainings else {"finetune": sum(ASSUMED_ROWS.values())}
    return Amounts(samples | settings.samples, ASSUMED_HELD_OUT if settings.held_out is None else settings.held_out)


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


def find_machine_to_plan(settings: PlanSettings) -> Machine:
    if settings.gpu:
        card = CARDS[settings.gpu]
        free = card.free_gib if settings.desktop_gib is None else max(0.0, card.memory_gib - settings.desktop_gib)
        free = settings.gpu_gib or free
        return Machine(settings.gpus or 1, free, settings.host_gib or HOST_GIB, settings.nodes)
    if settings.gpus and settings.gpu_gib is None and not torch.cuda.is_available():
        raise InputError("gpu_gib: there is no GPU here; give the usable GiB of each GPU")
    machine = read_free_memory(1 if settings.gpus is None else settings.gpus, settings.nodes)
    if settings.gpu_gib is not None:
        machine = replace(machine, gpus=settings.gpus or 1, gpu_gib=settings.gpu_gib, nodes=settings.nodes)
    return machine if settings.host_gib is None else replace(machine, host_gib=settings.host_gib)


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
    architecture: Architecture, tuning: Tuning, settings: PlanSettings, machine: Machine
) -> Workload:
    """Return the workload of the settings; raise InputError if the samples have no room for text."""
    if tuning != "full" and not architecture.image_tokens:
        raise InputError(f"tunings: {tuning}: {architecture.name} is a text model, whose only tuning is full")
    text = settings.length - architecture.image_tokens
    if text <= 0:
        flag, remedy, image = f"sequence {settings.length}", "Raise it", "an image"
        if settings.max_length:
            flag, remedy = f"max_length {settings.max_length}", "Raise it in the stage's settings"
        if settings.dataset and isinstance(architecture, VLMArchitecture):
            image, remedy = "the largest image", f"{remedy}, or shrink your images: {SHRINK_IMAGES}"
        raise InputError(f"{flag}: {image} alone takes {architecture.image_tokens} tokens. {remedy}")
    precision = torch.bfloat16 if is_bf16(settings.precision, machine.gpus > 0) else torch.float32
    fused = settings.compile and machine.gpus > 0  # a CPU has no kernels
    lora = None
    if tuning == "lora":
        lora = settings.lora
        if lora.targets != "all":
            decoder = architecture.get_language_model(architecture.build(precision)).layers
            refuse_unknown_targets(lora.targets, find_projections(decoder), "lora.targets")
    has_stage_1 = isinstance(architecture, MGMArchitecture) or "stage1" in (settings.tunings or TUNINGS)
    return Workload(
        architecture,
        tuning,
        settings.length,
        text,
        precision,
        fused,
        lora,
        projector=has_stage_1,
        nf4=settings.precision == "nf4",
    )


def read_deepspeed_config(name: str, hidden_size: int) -> dict:
    """Read a DeepSpeed configuration by its name in config/deepspeed, or from a file."""
    config = read_deepspeed_file(Path(name)) if Path(name).is_file() else read_deepspeed(name, "deepspeed")
    return complete_deepspeed_config(config, hidden_size)


if __name__ == "__main__":
    main()
