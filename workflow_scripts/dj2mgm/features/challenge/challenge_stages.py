"""Stages of benchmarks: the answers of the fine-tuned model, and of the model before training."""

from functools import partial

from dj2mgm.features.challenge.challenge_keys import BenchmarkSettings
from dj2mgm.runs.stage_settings import build_answer_values
from dj2mgm.runs.stages import BASE, Stage
from dj2mgm.settings.configuration import Configuration, Experiment
from dj2mgm.settings.evaluation import read_declarations


def list_stages(shared: Configuration) -> dict[str, Stage]:
    """Return the stages of every declared benchmark by name. The report does not show them."""
    return {name: stage for benchmark in read_declarations() for name, stage in _build_stages(benchmark).items()}


def _build_stages(name: str) -> dict[str, Stage]:
    common = {
        "rule": "answer_benchmark",
        "settings": partial(build_benchmark_settings, name),
        "outputs": ("answers.jsonl",),
        "in_report": False,
    }
    return {
        f"benchmarks/{name}": Stage(name, upstream=("finetune",), **common),
        f"{BASE}benchmarks/{name}": Stage(f"{name}, before training", upstream=(), uses_dataset=False, **common),
    }


def build_benchmark_settings(name: str, config: Experiment, images: dict) -> BenchmarkSettings | None:
    """Return the settings of a benchmark, or None unless all its files are configured."""
    files = config.benchmarks.model_dump().get(name)
    if files is None or None in files.values():
        return None
    return BenchmarkSettings.from_sections(config, benchmark=name, files=files, **build_answer_values(config))
