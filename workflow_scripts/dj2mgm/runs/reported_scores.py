"""Scores that held-out data support: the score that decides, and the refusal of scores that no run could report."""

from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER as DATASETS
from dj2mgm.errors import InputError
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.run import Run
from dj2mgm.settings.targets import ReportSection
from dj2mgm.storage.files import read_json, read_jsonl


def find_decisive_score(runs: Runs) -> str:
    """Return the score that decides with the held-out data of the reference, or the headline if they are not made."""
    file = Path(DATASETS, runs.first_seed(REFERENCE).dataset.name, "evaluation.jsonl")
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
    settings, generated_file = run.dataset.settings, Path(DATASETS, run.dataset.name, "evaluation.jsonl")
    if settings.is_rendered:
        return True
    evaluation = getattr(settings, "evaluation", None)
    file = generated_file if generated_file.is_file() else evaluation and evaluation.file
    return bool(file) and any(row.get("objects") for row in read_jsonl(file))
