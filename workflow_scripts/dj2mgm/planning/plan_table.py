"""Predicted minutes of each stage, the disk of a run and sizes of a dataset's images, and the output of `plan`.

The time of a training is its samples divided by the predicted rate, plus its start. The rate is that of an H200
(search.py), scaled to another card by its FLOP/s and its bandwidth. Trainings do not import this module, so that a new
card does not run them again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dj2mgm.data.formats import choose_spread_rows, list_images
from dj2mgm.data.images import BadImageError, locate_image, read_image_size
from dj2mgm.dataset_resolution.experiment_dataset import Dataset
from dj2mgm.errors import pluralize
from dj2mgm.monitoring.memory_files import GIB
from dj2mgm.planning.architecture import DEFAULT_IMAGE_SIZE, Architecture, MGMArchitecture, VLMArchitecture
from dj2mgm.planning.prediction import FLOAT32, Machine
from dj2mgm.planning.search import (
    Candidate,
    describe_checkpointing,
    describe_plan,
    estimate_speed,
    find_fastest,
    find_nearest,
    suggest_remedies,
)
from dj2mgm.planning.step import Workload, count_parameters
from dj2mgm.settings.dataset_files import load_dataset_settings
from dj2mgm.settings.targets import CARDS, GpuCard
from dj2mgm.storage.files import read_json, read_jsonl
from dj2mgm.storage.streaming import read_json_list

MAX_READ = 1000  # rows of a split whose images' sizes are read

Sizes = tuple[tuple[int, int], ...]  # width and height in pixels of a row's images


@dataclass(frozen=True)
class PlannedImages:
    """Architecture with the images of the longest and of a usual row, and a sentence about them."""

    largest: Architecture
    usual: Architecture
    sentence: str


def plan_images(architecture: Architecture, folder: Path | None) -> PlannedImages:
    """Return the images to plan for, from the dataset that the dataset stage has written to `folder`.

    Without a dataset, images have `DEFAULT_IMAGE_SIZE`.
    """
    if not isinstance(architecture, VLMArchitecture):
        tokens = architecture.image_tokens
        sentence = f"An image takes {tokens} tokens, whatever its size." if tokens else ""
        return PlannedImages(architecture, architecture, sentence)
    rows = sorted(_measure_rows(architecture, folder), key=lambda row: row[0]) if folder else []
    if not rows:
        sentence = (
            f"Assumed: images of {_describe(architecture, (DEFAULT_IMAGE_SIZE,))}. With `dataset=<your data>`, "
            "the plan reads the sizes of your images."
        )
        return PlannedImages(architecture, architecture, sentence)
    largest, usual = (
        replace(architecture, item=architecture.encoder.build_sample(*sizes))
        for sizes in (rows[-1][1], rows[len(rows) // 2][1])
    )
    sentence = (
        f"Images of {len(rows):,} rows of {folder.name}: the largest has {_describe(largest, rows[-1][1])}, "
        f"the median has {_describe(usual, rows[len(rows) // 2][1])}."
    )
    return PlannedImages(largest, usual, sentence)


def _describe(architecture: VLMArchitecture, sizes: Sizes) -> str:
    pixels = " and ".join(f"{width} × {height}" for width, height in sizes)
    return f"{pixels} pixels ({architecture.image_tokens:,} tokens)"


def _measure_rows(architecture: VLMArchitecture, folder: Path) -> Iterator[tuple[int, Sizes]]:
    """Yield the tokens and the sizes of each row's images, of rows spread over both splits; leave out bad images."""
    roots = Dataset(folder.name, load_dataset_settings(folder / "config.yaml")).images
    counts = read_json(folder / "summary.json")
    splits = {
        "pretrain": (row["images"] for row in read_jsonl(folder / "pretrain.jsonl")),
        "finetune": map(list_images, read_json_list(folder / "finetune.json")),
    }
    for split, rows in splits.items():
        chosen = choose_spread_rows(counts[split], MAX_READ)
        for images in (images for number, images in enumerate(rows) if number in chosen and images):
            try:
                paths = [str(locate_image(roots[split], image)) for image in images]
                tokens = architecture.encoder.count_image_tokens({"image": paths})
                yield tokens, tuple(map(read_image_size, paths))
            except (BadImageError, ValueError):  # some processors reject images with an extreme aspect ratio
                continue


FITTED_CARD = CARDS["h200"]  # to which the rates in search.py are fitted
# Share of a step's time on the H200 in which it computes matrix products (torch.profiler); in the rest, it reads and
# writes memory. On another card, the one scales with its FLOP/s, the other with its bandwidth.
PRODUCT_SHARE = 0.72
# Tokens of text of the longest and of an average sample, as in the measured runs (docs/measurements/training.md).
LONGEST_TEXT = {"stage1": 64, "lora": 448, "full": 448}
AVERAGE_TEXT = {"stage1": 30, "lora": 128, "full": 128}
AVERAGE_ANSWER = {"stage1": 26, "lora": 86, "full": 86}
# Seconds of a training stage outside of its usual steps: imports, plan, loading, compilation, checkpoints. They were 69
# to 98 s in four runs on H100s.
START_SECONDS = 80
# Held-out answers, captions and likelihoods of 500 images with three questions took 49 s on an H100, of which 20 s are
# the start: as long as this many samples of MGM-2B's LoRA for each image.
SAMPLES_PER_HELD_OUT_IMAGE = 3.1
ANSWERS_START_SECONDS = 20
ASSUMED_ROWS, ASSUMED_HELD_OUT = {"pretrain": 10_000, "finetune": 12_000}, 500  # until the data are counted
HOST_GIB = 60.0  # free main memory of a machine with 64 GB, if the card is another machine's
KEPT_CHECKPOINTS = 3  # two, and the one that is being written
COMPILED_CODE_GIB = 2.0  # most of it that is kept in .snakemake/compiled


@dataclass(frozen=True)
class Amounts:
    """Amounts of work of a run: samples by training stage, and held-out images."""

    samples: Mapping[str, int]
    held_out: int


@dataclass(frozen=True)
class PlannedTraining:
    """A training stage with its training plan, and the samples of a step.

    `usual` has the images of a usual row, and `workload` those of the longest one.
    """

    workload: Workload
    candidate: Candidate
    batch: int
    usual: Architecture


@dataclass(frozen=True)
class StageTime:
    """A stage and its predicted duration."""

    stage: str
    amount: str  # samples or images, with their number
    rate: float  # samples per second; 0 for a stage that does not train
    seconds: float


def shorten_workload(workload: Workload) -> Workload:
    """Return the workload with the longest sample of usual data, if its own is longer."""
    text = min(LONGEST_TEXT[workload.tuning], workload.sequence_length - workload.architecture.image_tokens)
    return replace(workload, sequence_length=workload.architecture.image_tokens + text, answer_tokens=text)


def compute_slowdown(card: GpuCard) -> float:
    """Return the time of a card's computation as a multiple of the H200's: 1.12 for an H100."""
    products = PRODUCT_SHARE * FITTED_CARD.bf16_tflops / card.bf16_tflops
    return products + (1 - PRODUCT_SHARE) * FITTED_CARD.memory_gb_per_s / card.memory_gb_per_s


def estimate_rate(training: PlannedTraining, gpus: int, card: GpuCard) -> float:
    """Return the samples per second of average samples.

    A micro batch holds more of them than of the longest ones, but the fitted constants count as many.
    """
    workload, image_tokens = training.workload, training.usual.image_tokens
    text = min(AVERAGE_TEXT[workload.tuning], workload.sequence_length - workload.architecture.image_tokens)
    answer_tokens = min(AVERAGE_ANSWER[workload.tuning], text)
    workload = replace(
        workload, architecture=training.usual, sequence_length=image_tokens + text, answer_tokens=answer_tokens
    )
    return estimate_speed(workload, training.candidate.plan, gpus, training.batch, slowdown=compute_slowdown(card))


def predict_times(
    trainings: Mapping[str, PlannedTraining], gpus: int, card: GpuCard, amounts: Amounts
) -> list[StageTime]:
    """Predict each training stage, in the order of the stages, and the answers of the trained model."""
    times = []
    for stage, training in trainings.items():
        samples, rate = amounts.samples[stage], estimate_rate(training, gpus, card)
        times.append(StageTime(stage, f"{samples:,} samples", rate, START_SECONDS + samples / rate))
    answers = amounts.held_out * SAMPLES_PER_HELD_OUT_IMAGE
    seconds = ANSWERS_START_SECONDS + answers / times[-1].rate
    return [*times, StageTime("generate_answers", f"{amounts.held_out:,} held-out images", 0, seconds)]


def predict_disk(workloads: Mapping[str, Workload], weights_gb: float | None) -> dict[str, float]:
    """Return the GiB that a run needs on the disk, by part, without the data.

    Args:
        workloads: workload of each stage.
        weights_gb: gigabytes of the downloaded weights, if they are known; otherwise those of the model in use.
    """
    sizes = {stage: count_parameters(workload) for stage, workload in workloads.items()}
    bytes_of_weight = next(iter(workloads.values())).precision.itemsize
    trained = {stage: sum(parameters.trained_sizes) for stage, parameters in sizes.items()}
    whole = max(sum(parameters.all_sizes) for parameters in sizes.values()) * bytes_of_weight
    # a checkpoint has the weights, and the optimizer's float32 weights and two moments; those of a finished stage go
    checkpoints = KEPT_CHECKPOINTS * max(trained.values()) * (bytes_of_weight + 3 * FLOAT32)
    is_assembled = isinstance(next(iter(workloads.values())).architecture, MGMArchitecture)
    return {
        "downloaded weights": (weights_gb * 1e9 if weights_gb else whole) / GIB,
        **({"assembled model": whole / GIB} if is_assembled else {}),
        "checkpoints": checkpoints / GIB,
        "trained weights": sum(trained.values()) * bytes_of_weight / GIB,
        "compiled code": COMPILED_CODE_GIB,
    }


MIN_WIDTH_OF_NAMES = 80  # columns from which the names of DeepSpeed configurations stand on one line
MIN_GAIN = 0.005  # of speed, as a share, that the table shows
LEGEND = "Layers: computed twice, which saves memory. Speed: 1.00 is the chosen plan's."
NARROW_COLUMNS = 110  # columns below which the table of plans has no lines between columns


def print_answer(
    console: Console,
    trainings: Mapping[str, PlannedTraining],
    machine: Machine,
    times: Sequence[StageTime],
    disk: Mapping[str, float],
    commands: Sequence[str],
) -> None:
    """Print whether the stages fit, what they need, and the next commands."""
    workloads = [training.workload for training in trainings.values()]
    tunings = " and ".join(workload.tuning for workload in workloads)
    chosen = [training.candidate for training in trainings.values() if training.candidate]
    fits = len(chosen) == len(workloads)
    fate = "It fits" if fits else "It does not fit (what would help stands below the table)"
    console.print(f"[bold]{fate}[/bold]: {escape(workloads[0].architecture.name)}, {tunings}")
    lines = []
    if times:
        minutes = pluralize(max(1, round(sum(time.seconds for time in times) / 60)), "minute")
        lines.append(("time", f"about {minutes} for one experiment with one seed"))
    needs = (("GPU memory", "gpu_gib", machine.gpu_gib), ("main memory", "host_gib", machine.host_gib))
    for name, key, available in needs:
        if fits and (name == "main memory" or machine.gpus):
            most = max(getattr(candidate.prediction, key) for candidate in chosen)
            lines.append((name, f"{most:.1f} GiB of {_format_gib(available)}"))
    if disk:
        lines.append(("disk", f"{sum(disk.values()):.1f} GiB, and the data"))
    if not fits and not machine.gpus:
        lines.append(("next", "add gpu=<name> to --config to plan for a card, such as gpu=rtx-4090"))
    lines += zip(["next", *[""] * len(commands)], commands if fits else (), strict=False)
    for name, text in lines:
        console.print(f"  {name:13}{text}", markup=False, soft_wrap=True)


def print_plans(
    console: Console, searches: Sequence[tuple[Workload, list[Candidate]]], machine: Machine, assumptions: str
) -> None:
    """Print a row for each workload and DeepSpeed configuration: the fastest plan that fits, or the nearest one.

    Configurations with equal memory and speed share a row.
    `assumptions` are sentences about the machine and the rows that the plans are for.
    """
    is_narrow = console.width < NARROW_COLUMNS
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0)) if is_narrow else Table()
    layers, units = ("layers", "\n") if is_narrow else ("checkpointed layers", " ")
    sizes = f"micro{units}× acc."
    for column in ("tuning", "DeepSpeed", layers, sizes, f"GPU{units}GiB", f"host{units}GiB", "speed", "verdict"):
        no_wrap = column == "DeepSpeed" and console.width >= MIN_WIDTH_OF_NAMES
        table.add_column(column, overflow="fold", no_wrap=no_wrap)  # fold: all is legible in a narrow terminal, too
    for workload, candidates in searches:
        best, rows = find_fastest(candidates), {}  # names and verdicts by the other cells
        for name in dict.fromkeys(candidate.plan.deepspeed for candidate in candidates):
            config_candidates = [candidate for candidate in candidates if candidate.plan.deepspeed == name]
            candidate = find_fastest(config_candidates) or find_nearest(config_candidates, machine)
            tuning, _, *cells, verdict = _build_row(workload, candidate, best, is_narrow)
            rows.setdefault((tuning, *cells), []).append((name, verdict))
        for (tuning, *cells), equal in rows.items():
            names, verdicts = zip(*equal, strict=True)
            table.add_row(tuning, _join_names(names), *cells, "chosen" if "chosen" in verdicts else verdicts[0])
        table.add_section()
    console.print(table)
    console.print(LEGEND)
    console.print(_describe_machine(machine))
    if assumptions:
        console.print(assumptions, markup=False)
    for workload, candidates in searches:
        _print_advice(console, workload, candidates, machine)


def print_times(
    console: Console,
    times: Sequence[StageTime],
    tunings: Sequence[str],
    machine: Machine,
    card: GpuCard,
    disk: Mapping[str, float],
) -> None:
    """Print a row for each stage of the tunings with its minutes, and the disk that the run needs."""
    source = "scaled from an H200, and near those measured on this card" if card.is_measured else "scaled from an H200"
    console.print(
        f"\n[bold]Minutes of {' and '.join(tunings)} on {machine.gpus} × {card.title}[/bold], by the chosen plans and "
        f"with rows of usual length (rates {source}):"
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("stage", "amount", "samples/s", "minutes"):
        table.add_column(column, justify="right" if column in ("samples/s", "minutes") else "left")
    for time in times:
        rate = f"{time.rate:.1f}" if time.rate else ""
        table.add_row(time.stage, time.amount, rate, f"{time.seconds / 60:.1f}")
    table.add_section()
    table.add_row("in all", "", "", f"{sum(time.seconds for time in times) / 60:.1f}")
    console.print(table)
    console.print(
        "These are minutes of one experiment with one seed. Each further experiment and seed takes about as long, "
        "and dj_synth also writes captions."
    )
    terms = " + ".join(f"{part} {size:.1f}" for part, size in disk.items())
    console.print(f"  disk {sum(disk.values()):.1f} GiB = {terms}, and the data")


def _join_names(names: Sequence[str]) -> str:
    """Return the names of equal configurations, as in "zero0 to zero3"."""
    plain, others = ([name for name in names if (len(name) == len("zero0")) is is_plain] for is_plain in (True, False))
    stages = [f"{plain[0]} to {plain[-1]}"] if len(plain) > 2 else plain
    return ",\n".join([*stages, *others])  # on lines of their own, because long names fill the column


def _describe_machine(machine: Machine) -> str:
    gpus = f"{machine.gpus} × {_format_gib(machine.gpu_gib)} of GPU memory" if machine.gpus else "no GPU"
    per_node = f" on each of {machine.nodes} nodes" if machine.nodes > 1 else ""
    return f"Machine: {gpus}, {_format_gib(machine.host_gib)} of host memory{per_node}"


def _build_row(workload: Workload, candidate: Candidate, best: Candidate | None, is_narrow: bool) -> list[str]:
    """Return the cells of a training plan; a narrow table has short ones."""
    plan, prediction = candidate.plan, candidate.prediction
    speed = f"{candidate.samples_per_second / best.samples_per_second:.2f}" if best and candidate.fits else ""
    verdict = "too big" if candidate.shortage else "chosen" if candidate is best else "fits"
    layers = describe_checkpointing(plan)
    return [
        workload.tuning,
        plan.deepspeed,
        layers.removesuffix(" layer") if is_narrow else layers,
        f"{plan.micro_batch} × {plan.accumulation}",
        f"{prediction.gpu_gib:.1f}" if prediction.gpu else "",
        f"{prediction.host_gib:.1f}",
        speed,
        verdict,
    ]


def _print_advice(console: Console, workload: Workload, candidates: list[Candidate], machine: Machine) -> None:
    """Print the trained parameters, the chosen plan with its reason and memory by part, or what would help."""
    best = find_fastest(candidates)
    parameters = count_parameters(workload)
    trained, total = (sum(sizes) / 1e6 for sizes in (parameters.trained_sizes, parameters.all_sizes))
    counts = f"{trained:,.1f} of {total:,.1f} million parameters trained"
    console.print(f"\n[bold]{workload.architecture.name}, {workload.tuning}[/bold]: {counts}")
    if best is None:
        console.print("Nothing fits. What would help:")
        for advice in suggest_remedies(workload, candidates, machine):
            console.print(f"  • {advice}")
        return
    console.print(explain_choice(best, candidates), markup=False)
    for name, parts in (("GPU", best.prediction.gpu), ("host", best.prediction.host)):
        if parts:
            terms = " + ".join(f"{part} {size:.2f}" for part, size in parts.items())
            console.print(f"  {name} {sum(parts.values()):.1f} GiB = {terms}")


def explain_choice(best: Candidate, candidates: list[Candidate]) -> str:
    """Return a sentence with the chosen plan and the reason for it."""
    chosen = f"Chosen: {describe_plan(best.plan)}"
    if best.plan.zero.adam_8bit:
        return f"{chosen}. No plan with exact optimizer states fits; this one rounds them to 8 bits."
    fastest = max((each for each in candidates if each.fits), key=lambda each: each.samples_per_second)
    gain = fastest.samples_per_second / best.samples_per_second - 1
    if not fastest.plan.zero.adam_8bit or gain < MIN_GAIN:
        return f"{chosen}, the fastest that fits."
    return (
        f"{chosen}, the fastest that fits with exact optimizer states. {fastest.plan.deepspeed} would be {gain:.0%} "
        "faster, but rounds them to 8 bits."
    )


def _format_gib(size: float | None) -> str:
    return "an unknown amount" if size is None else f"{size:.2f} GiB"
