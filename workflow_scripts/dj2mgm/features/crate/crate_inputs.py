"""Settings of the crate of a page, from the runs of its experiments."""

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.pages import build_page_settings, list_page_experiments, locate_stage_folders
from dj2mgm.runs.run import Run


def build_crate_settings(runs: Runs, page: str) -> dict:
    """Return the settings of the crate of a page's experiments; raises as `build_page_settings` does."""
    experiments = build_page_settings(runs, list_page_experiments(runs, page))["experiments"]
    models, datasets, captioners = [], {}, []
    for experiment in experiments:
        for seed in (run["seed"] for run in experiment["runs"]):
            run = runs.get(experiment["name"], seed)
            datasets[run.dataset.name] = {"settings": run.dataset.settings.file_content(), "images": run.dataset.images}
            model = run.config.model
            models += [(model.trained_parts or model).name, model.name]
            if run.captioner:
                captioners.append(_find_captioner_stages(runs, run))
    return {
        "page": page,
        "stages": {
            name: {"upstream": list(stage.upstream), "reads": list(stage.reads)}
            for name, stage in runs.stages.items()
            if stage.in_report
        },
        "experiments": experiments,
        "datasets": datasets,
        "models": [f"results/{kind}/{name}" for kind in ("foundation", "models") for name in dict.fromkeys(models)],
        "captioners": captioners,
        "foundations": {name: str(path) for name, path in runs.shipped_foundations.items() if name in models},
        "command_line": runs.experiments.command_line,
    }


def _find_captioner_stages(runs: Runs, run: Run) -> dict[str, str]:
    """Return the dataset of the captioner's run, and the folders of its stages up to the captioner."""
    captioner = runs.get(run.captioner, run.seed)
    stages = locate_stage_folders(runs, captioner)
    end = list(stages).index(run.choose_training_stage(captioner)) + 1
    return {
        "dataset": f"{DATASETS_FOLDER}/{captioner.dataset.name}",
        "stages": dict(list(stages.items())[:end]),
    }
