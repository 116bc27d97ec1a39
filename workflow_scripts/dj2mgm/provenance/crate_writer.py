"""Writes the record of a finished run (run.json) and its RO-Crate."""

import tempfile
from pathlib import Path

from dj2mgm.files import replace_file, write_json
from dj2mgm.provenance.crate_files import describe_inputs, digest_images
from dj2mgm.provenance.crate_reader import RECORD
from dj2mgm.provenance.finished_jobs import FinishedJob, find_jobs
from dj2mgm.provenance.machine import describe_machine, find_commit
from dj2mgm.provenance.run_crate import RunCrate


def write_crate(settings: dict, target: Path) -> int:
    """Write the crate of a page's experiments as a zip file; return the number of its jobs.

    Args:
        settings: see `Runs.crate_settings`.
    """
    jobs = find_jobs(settings)
    record = {
        "format": 1,
        "page": settings["page"],
        "experiments": [experiment["name"] for experiment in settings["experiments"]],
        "command_line": settings["command_line"],
        "commit": find_commit(),
        "snakemake": settings["snakemake"],
        "versions": _versions(jobs),
        "machine": describe_machine(),
        "inputs": describe_inputs(settings["experiments"], settings["datasets"], settings["foundations"]),
        "images": [_images(name, dataset) for name, dataset in settings["datasets"].items()],
    }
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder, RECORD), record)
        crate = RunCrate(record, Path(folder, RECORD), jobs)
        with replace_file(target, "wb") as file:
            for chunk in crate.crate.stream_zip():
                file.write(chunk)
    return len(jobs)


def _images(name: str, dataset: dict) -> dict:
    drawn = "generator" in dataset["settings"]
    return {"dataset": name, "drawn": drawn} | digest_images(Path("results/datasets", name), dataset["images"])


def _versions(jobs: list[FinishedJob]) -> dict[str, list[str]]:
    """Return the versions of each package; jobs may differ in them."""
    found: dict[str, set[str]] = {}
    for job in jobs:
        for name, version in job.versions.items():
            found.setdefault(name, set()).add(version)
    return {name: sorted(versions) for name, versions in sorted(found.items())}
