"""Settings of a page's crate from the runs of its experiments, and its record, run.json."""

from typing import Literal

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER
from dj2mgm.records import PageSettings
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.pages import build_page_settings, list_page_experiments, locate_stage_folders
from dj2mgm.runs.stages import InputKind, Run
from dj2mgm.settings.base import Number, Section, setting
from dj2mgm.settings.dataset_files import ReadableDataset


class CrateDataset(Section):
    """A dataset behind a page."""

    settings: ReadableDataset = setting()
    images: dict[str, str] = setting(..., "folder that image paths are relative to, by split")


class CrateCaptioner(Section):
    """A run that trained a captioning model."""

    dataset: str = setting(..., "folder of the dataset")
    stages: dict[str, str] = setting(..., "folder of each stage up to the captioning model")


class CrateStage(Section):
    """Inputs of a stage."""

    upstream: list[str] = setting(..., "the stages before it")
    reads: list[InputKind] = setting(..., "kinds of the user's files")


class CrateSettings(PageSettings):
    """A page's settings, with the datasets and models that its crate describes."""

    page: str = setting(..., "folder of the page, below results/")
    stages: dict[str, CrateStage] = setting()
    datasets: dict[str, CrateDataset] = setting()
    models: list[str] = setting(..., "folders of models and of their parts")
    captioners: list[CrateCaptioner] = setting()
    foundations: dict[str, str] = setting(..., "folders of trained parts that come with the workflow, by model")
    command_line: dict = setting()
    snakemake: str = setting(..., "version")


class CrateMachine(Section):
    """The machine on which the crate was written."""

    system: str
    architecture: str
    processor: str
    cores: int
    memory_gib: Number
    gpus: list[str]
    python: str


class CrateInput(Section):
    """A file of the user's, or of trained parts that come with the workflow."""

    kind: InputKind = setting(alias="of")
    configured_path: str = setting(..., "the file itself, or the folder or hub id that contains `file`", alias="given")
    file: str
    found_at: str
    sha256: str
    bytes: int


class CrateImages(Section):
    """Number and joint digest of a dataset's images."""

    dataset: str
    drawn: bool = setting(..., "whether the workflow draws the images itself")
    count: int
    sha256: str


class CrateRecord(Section):
    """Inputs, software and machine of a run."""

    format: Literal[1]
    page: str = setting(..., "folder of the page, below results/")
    experiments: list[str]
    command_line: dict = setting(..., "values of --config and --configfile")
    commit: str = setting(..., "commit of the code, with -dirty if files differ from it; empty: not in git")
    snakemake: str
    versions: dict[str, list[str]] = setting(..., "versions of packages, as jobs recorded them")
    machine: CrateMachine
    inputs: list[CrateInput]
    images: list[CrateImages]


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
