"""Checks of the user's configuration, data, models and memory plans, before any stage runs."""

import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from dj2mgm.data.formats import list_images, read_evaluation, read_llava, read_pairs
from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.errors import InputError, pluralize
from dj2mgm.health.findings import Finding
from dj2mgm.model_files.missing_models import (
    compute_download_gb,
    describe_downloads,
    describe_missing,
    find_downloads,
    find_missing_models,
)
from dj2mgm.models.tuning import choose_tuning
from dj2mgm.monitoring.memory_csv import GIB
from dj2mgm.planning.architecture import DEFAULT_IMAGE_SIZE, PlanningError, VLMArchitecture, find_architecture
from dj2mgm.planning.prediction import Machine, predict
from dj2mgm.planning.search import MICRO_BATCHES, describe_plan, find_fastest, list_candidates
from dj2mgm.planning.stage_times import predict_disk, shorten_workload
from dj2mgm.planning.step import Workload
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import REFERENCE, find_variant_sources
from dj2mgm.runs.run import Run
from dj2mgm.settings.dataset_files import ReadableSources, Split
from dj2mgm.settings.deepspeed_files import list_deepspeed_names, read_deepspeed
from dj2mgm.storage.files import write_json
from dj2mgm.training.deepspeed_config import complete_deepspeed_config, with_batch
from dj2mgm.training.memory_plan import build_workload_at, choose_plan, plan_from_settings
from dj2mgm.training.settings import TrainingSettings

NAMED_PATHS = 3  # bad paths named in a message; the others are only counted
READERS = {
    "pretrain": lambda file: (row["images"][0] for row in read_pairs(file)),
    "finetune": lambda file: chain.from_iterable(map(list_images, read_llava(file, number_ids=True))),
    "evaluation": lambda file: (row["image"] for row in read_evaluation(file)),
}


def read_runs(command_line: dict) -> tuple[Runs | None, Finding]:
    """Return the configuration (None if it is invalid) and a finding about it."""
    name = "configuration"
    try:
        runs = Runs(command_line, find_variant_sources())
    except InputError as error:
        return None, Finding(name, "fail", str(error), "correct that file or key")
    if warnings := runs.experiments.list_warnings():
        return runs, Finding(name, "warn", "; ".join(warnings), "correct these files")
    names = runs.experiments.names
    return runs, Finding(name, "pass", f"{pluralize(len(names), 'experiment')}: {', '.join(names)}")


def list_fp8_stages(runs: Runs | None) -> set[str]:
    all_runs = runs or ()
    return {stage for run in all_runs for stage in run.training_stages if run.settings[stage].precision == "fp8"}


def count_loader_workers(runs: Runs | None) -> int:
    """Return the largest number of data loader processes of any stage."""
    if runs is None:
        return 0
    return max(run.settings[stage].workers for run in runs for stage in run.training_stages)


def trains_fully(runs: Runs | None) -> bool:
    """Return whether the reference trains the whole language model, or may do so."""
    return runs is None or runs.first_seed(REFERENCE).config.finetune.lora is None


def predict_needed_disk(runs: Runs | None) -> float | None:
    """Return the bytes that the reference needs, with weights that are still to be fetched; None if unknown."""
    if runs is None:
        return None
    run = runs.first_seed(REFERENCE)
    try:
        workloads = {
            stage: build_largest_workload(run, stage, TrainingSettings.from_sections(run.settings[stage]))
            for stage in run.training_stages
        }
    except InputError:
        return None
    model = run.config.model
    sizes = predict_disk(workloads, compute_download_gb(model))
    if model.trained_by_workflow or not find_missing_models(model):
        del sizes["downloaded weights"]
    return sum(sizes.values()) * GIB


def check_data(runs: Runs) -> Iterator[Finding]:
    """Yield a finding for each dataset, after reading every row and locating every image."""
    for dataset in runs.datasets.values():
        name, settings = f"dataset {dataset.name}", dataset.settings
        if settings.is_rendered:
            yield Finding(name, "skip", "the workflow generates it")
        elif isinstance(settings, ReadableSources):
            yield Finding(
                name, "pass", f"{pluralize(len(settings.sources), 'source')}; make_dataset reads and checks them"
            )
        else:
            yield check_dataset(name, settings.splits)


def check_dataset(name: str, splits: dict[str, Split]) -> Finding:
    """Read every row of a dataset and locate every image."""
    counts, bad = [], {}
    for split, files in splits.items():
        images, bad[split] = 0, []
        try:
            for image in READERS[split](files.file):
                images += 1
                bad[split] += _find_bad_image(files.images, image)
        except (InputError, OSError) as error:
            return Finding(name, "fail", str(error), "correct the file")
        counts.append(f"{pluralize(images, 'image')} in {split}")
    if bad_images := list(chain.from_iterable(bad.values())):
        reason = f"{len(bad_images)} of {', '.join(counts)} cannot be used: {'; '.join(bad_images[:NAMED_PATHS])}"
        if len(bad_images) > len(bad["pretrain"]):
            return Finding(name, "fail", reason, "correct the paths, or delete the rows")
        return Finding(name, "warn", reason, "correct the paths; the filter stage drops such rows and counts them")
    return Finding(name, "pass", f"{', '.join(counts)}; all exist")


def check_models(runs: Runs) -> Iterator[Finding]:
    """Yield a finding for each model: its folders exist, or its parts come with the workflow, or are trained by it."""
    for model in {run.config.model.name: run.config.model for run in runs}.values():
        name = f"model {model.name}"
        if model.trained_by_workflow:
            is_shipped = model.trained_parts.name in runs.shipped_foundations
            yield Finding(name, "skip", "its parts come with the workflow" if is_shipped else "the workflow trains it")
            continue
        missing = find_missing_models(model)
        if missing:
            reason = "; ".join(dict.fromkeys(describe_missing(key, part) for key, part in missing.items()))
            argument = shlex.quote(f"model={model.name}")
            remedy = f"run snakemake fetch --config {argument}" if find_downloads(model, missing) else ""
            if remedy and (facts := describe_downloads(model, missing)):
                remedy += f", which downloads {facts}"
            yield Finding(name, "fail", reason, remedy or "correct the model's file; see docs/models.md")
        else:
            yield Finding(name, "pass", "all its folders and weights exist")


def _find_bad_image(root: str, image: str) -> list[str]:
    try:
        locate_image(root, image)
    except BadImageError as error:
        return [str(error)]
    return []


DOCTOR_FOLDER = Path("results/doctor")
MEMORY_REMEDY = (
    "`snakemake plan` lists what fits; `auto` in deepspeed, micro_batch_size and activation_checkpointing selects it"
)


NO_PLAN_REMEDY = "change one of these, or name a smaller model; `snakemake plan` lists all training plans"


def check_plans(runs: Runs, machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each training stage of the reference, with rows of usual length, as `plan` has them."""
    run = runs.first_seed(REFERENCE)
    for stage in run.training_stages:
        yield check_plan(run, stage, machine)


def check_plan(run: Run, stage: str, machine: Machine) -> Finding:
    """Predict the stage's memory with the longest rows of usual data, and compare it with the machine's."""
    name, settings = f"memory of {stage}", TrainingSettings.from_sections(run.settings[stage])
    try:
        workload = shorten_workload(build_largest_workload(run, stage, settings))
    except PlanningError as error:
        return Finding(name, "skip", str(error))
    except InputError as error:
        return Finding(name, "fail", str(error), "correct that setting")
    try:
        settings = choose_plan(settings, workload, machine)
        prediction = predict(workload, plan_from_settings(settings, workload), machine)
    except InputError as error:
        unknown = isinstance(error, PlanningError) and not settings.has_auto
        return Finding(name, "skip", str(error)) if unknown else Finding(name, "fail", str(error), NO_PLAN_REMEDY)
    if shortage := prediction.describe_shortage(machine):
        return Finding(name, "fail" if settings.check_memory else "warn", shortage, MEMORY_REMEDY)
    gpu = f"{prediction.gpu_gib:.1f} GiB of the GPU and " if machine.gpus else ""
    width, height = DEFAULT_IMAGE_SIZE
    reason = f"{gpu}{prediction.host_gib:.1f} GiB of main memory by {workload.tuning}, with rows of usual length"
    if isinstance(workload.architecture, VLMArchitecture):
        reason += f" and images of {width}×{height} pixels; `snakemake plan` takes the sizes of your images"
    return Finding(name, "pass", reason)


def write_configs_that_fit(runs: Runs, machine: Machine, folder: Path = DOCTOR_FOLDER) -> Iterator[str]:
    """Write the fastest DeepSpeed configuration that fits for each training stage of the reference.

    The global batch size stays. Yield a sentence about each file written, or the reason why none was.
    """
    run = runs.first_seed(REFERENCE)
    for stage in run.training_stages:
        settings = TrainingSettings.from_sections(run.settings[stage])
        try:
            workload = build_largest_workload(run, stage, settings)
        except InputError as error:
            yield f"no DeepSpeed configuration for {stage}: {error}"
            continue
        hidden_size = workload.architecture.hidden_size
        configs = {
            name: complete_deepspeed_config(read_deepspeed(name, stage), hidden_size) for name in list_deepspeed_names()
        }
        # fixed sizes are checked: their product is the global batch
        batch_sizes = [size for size in MICRO_BATCHES if settings.global_batch_size % (size * machine.processes) == 0]
        candidates = list_candidates(workload, machine, configs, settings.global_batch_size, batch_sizes)
        best = find_fastest(candidates)
        if best is None:
            yield f"no DeepSpeed configuration fits {stage}: `snakemake plan` shows what would help"
            continue
        plan, interval = best.plan, best.plan.checkpointing_interval
        sizes = {
            "global_batch_size": settings.global_batch_size,
            "micro_batch_size": plan.micro_batch,
            "gradient_accumulation_steps": plan.accumulation,
        }
        path = folder / f"deepspeed_{stage}.json"
        write_json(path, with_batch(configs[plan.deepspeed], sizes))
        yield (
            f"wrote {path}: {describe_plan(plan)}; to use it, set {stage}'s deepspeed: {plan.deepspeed}, "
            f"micro_batch_size: {plan.micro_batch}, gradient_accumulation_steps: {plan.accumulation} and "
            f"activation_checkpointing: {interval if interval > 1 else str(bool(interval)).lower()}"
        )


def build_largest_workload(run: Run, stage: str, settings: TrainingSettings) -> Workload:
    """Return the stage's workload on the longest conversations that its settings accept.

    Raises:
        PlanningError: the model's architecture is not known yet, or `max_length` leaves no room for text.
    """
    architecture = find_architecture(run.config.model.name)
    tuning = choose_tuning(stage, settings.lora)
    length = settings.max_length
    answers = length - architecture.image_tokens
    if answers <= 0:
        raise PlanningError(
            f"{stage}.max_length {length} leaves no room for text after the {architecture.image_tokens} tokens of an "
            f"image of {DEFAULT_IMAGE_SIZE[0]}×{DEFAULT_IMAGE_SIZE[1]} pixels; raise it, unless all images are smaller"
        )
    has_pretraining = "pretrain" in run.training_stages
    return build_workload_at(tuning, settings, architecture, length, answers, projector=has_pretraining)
