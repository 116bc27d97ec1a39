"""Settings of pages that compare experiments, the files that they read, and the scores of finished runs."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from csv import DictReader
from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER, Dataset
from dj2mgm.errors import InputError
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.stages import BASE, LEAK_FILES, Run
from dj2mgm.settings.configuration import TARGETS_BY_KEY
from dj2mgm.settings.dataset_files import MAX_HELD_OUT
from dj2mgm.settings.evaluation import LeakSettings
from dj2mgm.settings.targets import ReportSection
from dj2mgm.storage.files import find_files, read_json, read_jsonl, read_yaml
from dj2mgm.storage.image_files import IMAGE_SUFFIXES


def locate_leaks_folder(dataset: Dataset) -> str | None:
    """Return the folder with the leaks of a dataset.

    None for the embedded dataset, which is not searched: rendered scenes are similar without being leaks.
    """
    return None if dataset.settings.is_rendered else f"{DATASETS_FOLDER}/{dataset.name}/leaks"


def list_decontamination_images(runs: Runs) -> list[str]:
    """Return the images in `decontaminate.folders`, which training data is compared with."""
    return [str(file) for folder in runs.shared.decontaminate.folders for file in find_files(folder, IMAGE_SUFFIXES)]


def build_leak_settings(runs: Runs, dataset: str, benchmarks: dict[str, dict[str, str]]) -> LeakSettings:
    """Return the settings of the search for leaks: image folders of a dataset, files of benchmarks, further images."""
    run = next(run for run in runs if run.dataset.name == dataset)
    roots = {f"{split}_images": folder for split, folder in run.dataset.images.items()}
    return LeakSettings.from_sections(run.config, runs.shared.decontaminate, benchmarks=benchmarks, **roots)


DATASET_FILES = ("summary.json", "pretrain.jsonl", "evaluation.jsonl")  # files of a dataset that pages read
# keys that do not affect the results of an experiment; pages are not written again if one of them changes
NOT_SHOWN = {"seed", "description", "controls", *TARGETS_BY_KEY}


def locate_page_folder(runs: Runs, experiment: str) -> str:
    """Return the folder of an experiment's page, below results/.

    Compared experiments share results/<dataset>/<model>/report/. Each other experiment has a page with itself and the
    reference.
    """
    compared = experiment in runs.shared.report.experiments and experiment != REFERENCE
    return f"{runs.results_prefix}report" if compared else f"{runs.results_prefix}{experiment}/report"


def list_page_experiments(runs: Runs, page: str) -> list[str]:
    """Return the experiments of a page with their controls, beginning with the one that others are compared with."""
    page_name = page.removeprefix(runs.results_prefix)
    compared = runs.shared.report.experiments if page_name == "report" else [REFERENCE, str(Path(page_name).parent)]
    variant_names = runs.experiments.variant_names
    return list(dict.fromkeys(experiment for name in compared for experiment in (name, *variant_names.get(name, ()))))


def build_page_settings(runs: Runs, experiments: list[str], seeds: list[int] | None = None) -> dict:
    """Return the settings of a page that compares experiments.

    References also have the seeds of all other experiments. If `seeds` is given, every experiment has these instead.

    Raises:
        InputError: one of them is not valid.
    """
    runs.experiments.require(*experiments)
    configured_seeds = {name: runs.experiments.configs[name].seeds for name in experiments}
    all_seeds = list(dict.fromkeys(seed for own_seeds in configured_seeds.values() for seed in own_seeds))
    variants = [runs.experiments.variants[name] for name in experiments if name in runs.experiments.variants]
    references = {experiments[0], *(variant.compared[1] for variant in variants if variant.compared)}
    described = []
    for name in experiments:
        page_seeds = seeds or (all_seeds if name in references else configured_seeds[name])
        own_runs = [runs.get(name, seed) for seed in page_seeds]
        config = own_runs[0].config.model_dump(exclude=NOT_SHOWN)
        described.append(
            {
                "name": name,
                "description": runs.experiments.configs[name].description,
                "dataset": f"{DATASETS_FOLDER}/{own_runs[0].dataset.name}",
                "leaks": locate_leaks_folder(own_runs[0].dataset),
                "licenses": own_runs[0].dataset.settings.licenses,
                "config": config,
                "recipes": read_recipes(runs.experiments.configs[name]),
                "runs": [{"seed": run.seed, "stages": locate_stage_folders(runs, run)} for run in own_runs],
            }
            | _describe_control(runs, name)
        )
    return {"experiments": described}


def _describe_control(runs: Runs, name: str) -> dict:
    """Return the kind of a control, its experiment and its comparison; nothing for other experiments."""
    variant = runs.experiments.variants.get(name)
    if variant is None or variant.control is None:
        return {}
    compared = list(variant.compared) if variant.compared else None
    return {"control": {"kind": variant.control, "experiment": variant.parent, "compared": compared}}


def list_page_files(runs: Runs, experiments: list[str], seeds: list[int] | None = None) -> list[str]:
    """Return all files that a page of these experiments reads, with the arguments of `build_page_settings`."""
    files = set()
    for experiment in build_page_settings(runs, experiments, seeds)["experiments"]:
        files |= {f"{experiment['dataset']}/{name}" for name in DATASET_FILES}
        files |= {f"{experiment['leaks']}/{name}" for name in LEAK_FILES if experiment["leaks"]}
        for run in experiment["runs"]:
            for stage, folder in run["stages"].items():
                files |= {f"{folder}/{name}" for name in runs.stages[stage].outputs}
    return sorted(files)


def locate_stage_folders(runs: Runs, run: Run) -> dict[str, str]:
    """Return the folders of the stages that a page shows."""
    return {
        name: runs.find_stage_folder(run, name)
        for name, stage in runs.stages.items()
        if stage.in_report and name in run.settings
    }


SCORED_STAGES = ("evaluate_clip", "evaluate_vqa")


def build_power_settings(runs: Runs) -> dict:
    """Return the settings of the power analysis.

    It is about the experiment in the key `experiment`, or else about the first one on the report.
    """
    other_names = [name for name in runs.shared.report.experiments if name != REFERENCE]
    experiment = runs.experiments.get_requested("plan", next(iter(other_names), REFERENCE))
    images = _count_held_out_images(runs.first_seed(REFERENCE))
    finished = {name: _list_finished_runs(runs, name) for name in dict.fromkeys([REFERENCE, *runs.experiments.names])}
    return {
        "headline": runs.shared.report.headline,
        "experiment": experiment,
        "images": images or MAX_HELD_OUT,
        "images_are_known": images is not None,
        "seeds": len(runs.experiments.configs.get(experiment, runs.experiments.configs[REFERENCE]).seeds),
        "finished": {name: finished_runs for name, finished_runs in finished.items() if finished_runs},
    }


def _count_held_out_images(run: Run) -> int | None:
    """Return the number of held-out images; None if the dataset is not made yet and does not state it."""
    summary = Path(DATASETS_FOLDER, run.dataset.name, "summary.json")
    if summary.is_file():
        return read_json(summary).get("evaluation")
    return run.dataset.settings.evaluation_images if run.dataset.settings.is_rendered else None


def _list_finished_runs(runs: Runs, experiment: str) -> list[dict]:
    """Return the runs of an experiment that are scored on the reference's dataset, with any seed."""
    first_run, dataset = runs.first_seed(experiment), runs.first_seed(REFERENCE).dataset.name
    if first_run.dataset.name != dataset:
        return []
    folders = Path("results", first_run.folder).glob("seed-*")
    other_seeds = (int(match[1]) for folder in folders if (match := re.fullmatch(r"seed-([0-9]+)", folder.name)))
    scored_runs = []
    for seed in sorted({*runs.experiments.configs[experiment].seeds, *other_seeds}):
        run = runs.get(experiment, seed)
        stages = {stage: runs.find_stage_folder(run, stage) for stage in run.settings}
        scores = [Path(stages[stage], "scores.jsonl") for stage in SCORED_STAGES]
        if all(file.is_file() for file in scores):
            scored_runs.append({"seed": seed, "stages": stages, "time": max(file.stat().st_mtime for file in scores)})
    return scored_runs


def find_decisive_score(runs: Runs) -> str:
    """Return the score that decides with the held-out data of the reference, or the headline if they are not made."""
    file = Path(DATASETS_FOLDER, runs.first_seed(REFERENCE).dataset.name, "evaluation.jsonl")
    has_questions = not file.is_file() or any(row.get("questions") for row in read_jsonl(file))
    return runs.shared.report.locate_headline(has_questions).key


def check_headline(runs: Runs, experiment: str) -> None:
    """Refuse a headline that neither the experiment's finished run nor, without one, its held-out data can report."""
    check_reported(runs, experiment, None, "report.headline")


def check_reported(runs: Runs, experiment: str, score: str | None, setting: str) -> None:
    """Refuse a score that an experiment's finished run or, without one, its held-out data cannot report.

    Args:
        runs: all runs.
        experiment: name of the experiment.
        score: key of the score; None for the headline, which has a fallback for data without questions.
        setting: name of the setting, which begins the message.
    """
    run = runs.first_seed(experiment)
    report = ReportSection(headline=score) if score else run.config.report
    folders = {
        stage: Path(runs.find_stage_folder(run, stage)) for stage in ("generate", "evaluate_clip", "evaluate_vqa")
    }
    files = [folders[stage] / "metrics.json" for stage in ("evaluate_clip", "evaluate_vqa")]
    if all(file.is_file() for file in (*files, folders["generate"] / "likelihoods.jsonl")):
        clip, vqa = map(read_json, files)
        headline = report.locate_headline(bool(score or vqa["questions"]))
        key = headline.key
        reported = any(headline.metric in metrics["groups"].get(headline.group, {}) for metrics in (clip, vqa))
    else:  # it has not run, or runs again
        key = report.headline
        reported = key != "attribute_accuracy" or _has_objects(run)
    if not reported:
        raise InputError(
            f"{setting}: {key} is not reported by {experiment}, whose held-out data do not support it; choose "
            "another score, such as caption_log_likelihood"
        )


def _has_objects(run: Run) -> bool:
    """Return whether the objects in held-out images are known."""
    settings, generated_file = run.dataset.settings, Path(DATASETS_FOLDER, run.dataset.name, "evaluation.jsonl")
    if settings.is_rendered:
        return True
    evaluation = getattr(settings, "evaluation", None)
    file = generated_file if generated_file.is_file() else evaluation and evaluation.file
    return bool(file) and any(row.get("objects") for row in read_jsonl(file))


def choose_unused_seeds(seeds: Collection[int], number: int) -> list[int]:
    """Return the numbers after the largest seed.

    Smaller numbers may have chosen the winner of a search, whose experiment begins with larger ones.
    """
    first = max(seeds, default=-1) + 1
    return list(range(first, first + number))


def sum_measured_seconds(runs: Iterable[Mapping[str, str | Path]]) -> float | None:
    """Return the time that these runs took, without stages that all seeds share; None if nothing was measured.

    Args:
        runs: folders of the stages of each run. A folder of several runs counts once.
    """
    return sum_seconds(Path(folder) for stages in runs for folder in _list_seed_folders(stages))


def sum_seconds(folders: Iterable[Path]) -> float | None:
    """Return the time of the stages in these folders, each counted once; None if nothing was measured."""
    seconds = [
        read_benchmark_seconds(file) for folder in dict.fromkeys(folders) for file in folder.glob("*.benchmark.tsv")
    ]
    return sum(seconds) if seconds else None


def format_hours(hours: float) -> str:
    """Return hours with at least two digits, rounded up, so that a budget of them is enough."""
    digits = max(0, 1 - math.floor(math.log10(hours))) if hours > 0 else 0
    return f"{math.ceil(round(hours * 10**digits, 6)) / 10**digits:.{digits}f}"


def _list_seed_folders(stages: Mapping[str, str | Path]) -> Iterable[str | Path]:
    for stage, folder in stages.items():
        config = Path(folder, "config.yaml")
        without_captioner = stage == "synthesize" and config.is_file() and read_yaml(config).get("captioner") is None
        if stage != "filter" and not stage.startswith(BASE) and not without_captioner:
            yield folder


def read_benchmark_seconds(file: Path) -> float:
    """Return the time of Snakemake's benchmark file; 0 if it has none."""
    with open(file, encoding="utf-8") as lines:
        row = next(DictReader(lines, delimiter="\t"), {})
    try:
        return float(row.get("s", 0))
    except (TypeError, ValueError):
        return 0.0
