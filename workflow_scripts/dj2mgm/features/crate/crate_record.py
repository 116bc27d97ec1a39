"""Settings of a page's crate from the runs of its experiments, its record (run.json), and its finished jobs.

Jobs are found by the logs that their rules left in the folders of results. A rule's log is named after its script, as
is Snakemake's `benchmark:` file, which is written at the end of the job with its time and resources.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER
from dj2mgm.errors import InputError
from dj2mgm.records import INSTRUCTIONS_FILE, PageSettings
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.pages import build_page_settings, list_page_experiments, locate_stage_folders
from dj2mgm.runs.stages import InputKind, Run
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.settings.base import Number, Section, setting
from dj2mgm.settings.dataset_files import ReadableDataset
from dj2mgm.storage.files import check_plain, read_json
from dj2mgm.storage.image_files import IMAGE_SUFFIXES

NOT_RESULTS = ("config.yaml", "stage.yaml", ".log", ".benchmark.tsv", *IMAGE_SUFFIXES)
# scripts that share a folder, with their subfolders of results; other files there are results of other scripts
SHARED_FOLDERS = {
    "train_clip": ("clip", "convnext"),
    "train_language_model": ("language_model",),
    "write_explorers": ("explorer",),
}


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


@dataclass(frozen=True)
class FinishedJob:
    """Job whose results exist, with its times and the folders that it read."""

    script: str  # name without .py, which is the rule's name
    folder: Path
    started: datetime | None  # None: the rule measures no time
    ended: datetime
    used: dict[str, float]
    reads: tuple[Path, ...]  # folders of other jobs
    inputs: tuple[InputKind, ...] = ()  # kinds of the user's files that it reads

    @property
    def label(self) -> str:
        return f"{self.script} in {self.folder}"

    @property
    def settings(self) -> Path | None:
        path = self.folder / "config.yaml"
        if not path.is_file():
            return None
        check_plain(path, self.folder, None)
        return path

    @property
    def results(self) -> list[Path]:
        """Files of the job without images, which may be very many. A link out of the job's folder is refused."""
        if names := SHARED_FOLDERS.get(self.script):
            files = [path for name in names for path in _list_files(self.folder / name)]
        else:
            others = {
                self.folder / name
                for script, names in SHARED_FOLDERS.items()
                for name in names
                if (self.folder / f"{script}.log").is_file()
            }
            files = [path for path in _list_files(self.folder) if others.isdisjoint(path.parents)]
        results = [path for path in files if not path.name.endswith(NOT_RESULTS)]
        for path in results:
            check_plain(path, self.folder, None)  # a crate would publish the target of a link
        return results

    @property
    def versions(self) -> dict[str, str]:
        """Versions of packages that the job recorded."""
        records = [read_json(path) for path in self.results if path.name in ("metrics.json", "summary.json")]
        versions: dict[str, str] = {}
        for record in records:
            versions |= {name: str(version) for name, version in record.get("versions", {}).items()}
            versions |= {"py-data-juicer": str(record["data_juicer"])} if "data_juicer" in record else {}
        return versions


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without folders of other jobs."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "images" and not any(path.glob("*.log")):
            yield from _list_files(path)
        elif path.is_file() and not path.name.startswith("."):
            yield path


def find_jobs(settings: CrateSettings) -> list[FinishedJob]:
    """Return the jobs of a page, in the order of data flow."""
    models = [Path(folder) for folder in settings.models if Path(folder).is_dir()]
    datasets = [Path(experiment.dataset, part) for experiment in settings.experiments for part in ("", "leaks")]
    foundations = [path for path in models if path.parent.name == "foundation"]
    jobs = [
        job
        for folder in models
        for job in _read_jobs(folder, foundations if folder not in foundations else (), ("model",))
    ]
    jobs += [job for folder in dict.fromkeys(datasets) for job in _read_jobs(folder, (), ("dataset",))]
    stages: dict[Path, FinishedJob] = {}
    for dataset, run in _list_runs(settings):
        roots = {"dataset": (dataset,), "model": tuple(models)}
        for stage, folder in run.items():
            if Path(folder) not in stages:
                upstream_folders = [Path(run[name]) for name in settings.stages[stage].upstream if name in run]
                kinds = list(settings.stages[stage].reads)
                kinds += ["dataset"] if stage == "synthesize" and Path(folder, INSTRUCTIONS_FILE).is_file() else []
                input_folders = [root for kind in kinds for root in roots.get(kind, ())]
                stage_jobs = _read_jobs(
                    Path(folder), [*upstream_folders, *input_folders], [kind for kind in kinds if not roots.get(kind)]
                )
                if not stage_jobs:
                    raise InputError(f"{folder} has no log of its stage; delete the folder and run it again")
                stages[Path(folder)] = stage_jobs[0]
    page_jobs = _read_jobs(Path("results", settings.page), stages, ())
    page_jobs.sort(key=lambda job: job.script not in SHARED_FOLDERS)  # the page itself is the last
    return [*jobs, *stages.values(), *page_jobs]


def _list_runs(settings: CrateSettings) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield dataset and stage folders of each run, and of the runs that trained captioning models."""
    for captioner in settings.captioners:
        yield Path(captioner.dataset), captioner.stages
    for experiment in settings.experiments:
        for run in experiment.runs:
            yield Path(experiment.dataset), run.stages


def _read_jobs(folder: Path, reads: Iterable[Path], inputs: Iterable[str]) -> list[FinishedJob]:
    logs = (path for path in sorted(folder.glob("*.log")) if (SCRIPTS / f"{path.stem}.py").is_file())
    return [_read_job(log, tuple(reads), tuple(inputs)) for log in logs]


def _read_job(log: Path, reads: tuple[Path, ...], inputs: tuple[str, ...]) -> FinishedJob:
    benchmark = log.with_suffix(".benchmark.tsv")
    if not benchmark.is_file():
        return FinishedJob(log.stem, log.parent, None, _read_time(log), {}, reads, inputs)
    with open(benchmark, encoding="utf-8", newline="") as file:
        *_, row = csv.DictReader(file, delimiter="\t")
    ended, used = _read_time(benchmark), {}
    for name in ("max_rss", "cpu_time"):
        try:
            used[name] = float(row[name])
        except (KeyError, TypeError, ValueError):  # `-` or NA, if the job was too short
            pass
    return FinishedJob(
        log.stem, log.parent, ended - timedelta(seconds=round(float(row["s"]))), ended, used, reads, inputs
    )


def _read_time(path: Path) -> datetime:
    return datetime.fromtimestamp(int(path.stat().st_mtime), UTC)
