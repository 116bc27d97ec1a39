"""Predicted minutes of each stage and the disk of a run, and sizes of a dataset's images, for a plan.

The time of a training is its samples divided by the predicted rate, plus its start. The rate is that of an H200
(search.py), scaled to another card by its FLOP/s and its bandwidth. Trainings do not import this module, so that a new
card does not run them again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dj2mgm.data.formats import choose_spread_rows, list_images
from dj2mgm.data.images import BadImageError, locate_image, read_image_size
from dj2mgm.dataset_resolution.experiment_dataset import Dataset
from dj2mgm.monitoring.memory_csv import GIB
from dj2mgm.planning.architecture import DEFAULT_IMAGE_SIZE, Architecture, MGMArchitecture, VLMArchitecture
from dj2mgm.planning.prediction import FLOAT32
from dj2mgm.planning.search import Candidate, estimate_speed
from dj2mgm.planning.step import Workload, count_parameters
from dj2mgm.settings.dataset_files import load_dataset_settings
from dj2mgm.settings.targets import CARDS, GpuCard
from dj2mgm.storage.files import read_json, read_jsonl
from dj2mgm.storage.json_rows import read_json_list

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
