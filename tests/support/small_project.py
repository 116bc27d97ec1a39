"""A copy of the project with a small dataset and a small model, and functions that run Snakemake in it."""

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from forked_python import programs
from forked_snakemake import run_snakemake
from paths import PROJECT

PARTS = ("Snakefile", "rules", "envs", "config", "profiles", "report", "workflow_scripts")
REAL_PYTHON = "DJ2MGM_TESTS_REAL_PYTHON"  # set by tests of a cluster, whose jobs must be Slurm's own processes
SMALL = ("dataset=small", "model=small", "cpu_threads=1")  # tests share few cores


@dataclass(frozen=True)
class Project:
    """A project folder and methods that run Snakemake in it."""

    folder: Path

    def command(self, *arguments: str, config: tuple[str, ...] = ()) -> list[str]:
        """Return the command line that runs Snakemake in a process of its own."""
        return [sys.executable, "-m", "snakemake", *self.arguments(*arguments, config=config)]

    def arguments(self, *arguments: str, config: tuple[str, ...] = ()) -> list[str]:
        """Return Snakemake's arguments; `config` comes after the small project's own settings."""
        keys = [value.split("=")[0] for value in config]
        defaults = [value for value in SMALL if value.split("=")[0] not in keys]
        return ["--cores", "1", *arguments, "--config", *defaults, *config]

    def environment(self, forked: bool = True) -> dict[str, str]:
        """Return the environment; if `forked`, jobs' scripts run in forks of a process that has imported torch."""
        folders = [
            *([programs()] if forked and REAL_PYTHON not in os.environ else []),
            str(Path(sys.executable).parent),
            os.environ["PATH"],
        ]
        return os.environ | {"PATH": os.pathsep.join(folders), "COLUMNS": "200"}

    def run(self, *arguments: str, ok: bool = True, config: tuple[str, ...] = ()) -> str:
        """Run Snakemake and return its output, of a dry run with all jobs; it must fail unless `ok`."""
        arguments += ("--verbose",) if ok and "--dry-run" in arguments else ()
        process = run_snakemake(self.arguments(*arguments, config=config), self.folder, self.environment())
        output = process.stdout + process.stderr
        assert (process.returncode == 0) == ok, output[-4000:]
        return output

    def job_counts(self, target: str, *arguments: str, config: tuple[str, ...] = ()) -> dict[str, int]:
        """Count the jobs of each rule in a dry run, without the target and rules of config files."""
        return count_jobs(self.run(target, "--dry-run", *arguments, config=config), target)

    def jobs(self, *arguments: str) -> set[str]:
        """Return the rules that `baseline` would run, from a dry run."""
        return set(self.job_counts("baseline", *arguments))

    def result(self, name: str, experiment: str = "baseline", dataset: str = "small", model: str = "small") -> Path:
        """Return a file or folder of an experiment's results, by its path from the experiment's folder."""
        return self.folder / "results" / dataset / model / experiment / name


def copy_project(folder: Path) -> Project:
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        source = PROJECT / part
        if source.is_dir():
            shutil.copytree(source, folder / part)
        else:
            shutil.copy(source, folder / part)
    for kind in ("models", "datasets"):
        shutil.copy(
            PROJECT / "tests" / "fixtures" / "small" / f"{kind}_small.yaml", folder / "config" / kind / "small.yaml"
        )
    return Project(folder)


def count_jobs(printed: str, target: str) -> dict[str, int]:
    """Count the jobs of each rule in the output of a dry run, without the target and rules of config files."""
    if "Nothing to be done" in printed:
        return {}
    table = printed.split("Job stats:")[1].split("\ntotal")[0]
    counts = {rule: int(count) for rule, count in re.findall(r"^(\w+)\s+(\d+)$", table, flags=re.MULTILINE)}
    omitted = (target, "configure_")
    return {rule: count for rule, count in counts.items() if not rule.startswith(omitted)}
