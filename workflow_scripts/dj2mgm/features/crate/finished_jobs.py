"""Jobs of a finished run, found by the logs that their rules left in the folders of results.

A rule's log is named after its script, as is Snakemake's `benchmark:` file, which is written at the end of the job with
its time and resources.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dj2mgm.data.instruction_rows import INSTRUCTIONS_FILE
from dj2mgm.errors import InputError
from dj2mgm.features.crate.crate_record import CrateSettings
from dj2mgm.runs.stages import InputKind
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.storage.files import check_plain, read_json
from dj2mgm.storage.image_files import IMAGE_SUFFIXES

NOT_RESULTS = ("config.yaml", "stage.yaml", ".log", ".benchmark.tsv", *IMAGE_SUFFIXES)
# scripts that share a folder, with their subfolders of results; other files there are results of other scripts
SHARED_FOLDERS = {
    "train_clip": ("clip", "convnext"),
    "train_language_model": ("language_model",),
    "write_explorers": ("explorer",),
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
