"""Settings of the check of a dataset, from the runs that use it."""

from pathlib import Path

from dj2mgm.model_files.missing_models import find_downloads, find_missing_models, find_shipped_foundation
from dj2mgm.model_files.model_folders import find_model
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.layers import read_model
from dj2mgm.runs.pages import build_power_settings
from dj2mgm.settings.configuration import drop_defaults
from dj2mgm.settings.dataset_files import MAX_HELD_OUT
from dj2mgm.settings.models import PHOTO_MODEL, ModelFile
from dj2mgm.settings.training_stages import StageSettings, StepSettings, solve_batch

TOKENIZER_FILE = "tokenizer.json"


def build_check_settings(runs: Runs, dataset: str) -> dict:
    """Return the settings of the check of a dataset."""
    run = runs.find_analyzed(dataset)
    model = run.config.model
    if is_other_advised := model.trained_by_workflow and not run.dataset.settings.is_rendered:
        model, _ = read_model(PHOTO_MODEL)
    missing = find_missing_models(model)
    power = build_power_settings(runs) | {"images": MAX_HELD_OUT, "images_are_known": False}
    return {
        "dataset": dataset,
        "keys": drop_defaults({"dataset": run.config.dataset, "model": model.name}),
        "fetches_model": bool(find_downloads(model, missing)),
        "note": run.dataset.note,
        "images": run.dataset.images,
        "model": "" if is_other_advised else model.name,
        "tokenizer": "" if is_other_advised else _find_tokenizer(model),
        "stages": {stage: _read_steps(run.settings[stage]) for stage in run.training_stages if not is_other_advised},
        "max_samples": run.config.jsonl.max_samples,
        "max_length": run.config.finetune.max_length,
        "refuses_bad_rows": run.config.jsonl.on_bad_row == "refuse",
        "report": runs.shared.report.model_dump(),
        "power": power,
    }


def _read_steps(settings: StageSettings) -> dict:
    """Return the values of `StepSettings` for a training stage."""
    batch = settings.global_batch_size or solve_batch("config.yaml", vars(settings))["global_batch_size"]
    return {key: getattr(settings, key) for key in StepSettings.model_fields} | {"global_batch_size": batch}


def _find_tokenizer(model: ModelFile) -> str:
    """Return the file of a model's tokenizer on this machine; "" if there is none."""
    trained = model.trained_parts
    shipped = trained and find_shipped_foundation(trained)
    folder = shipped / "language_model" if shipped else Path(find_model(model.language_model_source))
    file = folder / TOKENIZER_FILE
    return str(file) if file.is_file() else ""
