"""Compares this machine with the one of a crate's run: code, packages, processor and GPUs, inputs."""

import importlib.metadata
import platform
from collections.abc import Iterator

from dj2mgm.config.datasets import files_of
from dj2mgm.errors import InputError
from dj2mgm.files import compute_sha256
from dj2mgm.messages import Progress
from dj2mgm.provenance.crate_files import CODE, DATASET, code_files, find_input
from dj2mgm.provenance.crate_reader import Crate
from dj2mgm.provenance.machine import describe_machine, find_commit
from dj2mgm.provenance.places import Places

NAMED = 5  # files listed in a sentence


def describe_differences(crate: Crate) -> Iterator[str]:
    """Yield a sentence for each kind of difference; none of them prevents the run."""
    yield from _compare_code(crate)
    yield from _compare_versions(crate.record["versions"])
    there, here = crate.record["machine"], describe_machine()
    for fact in there:
        if there[fact] != here[fact]:
            yield f"{fact.replace('_gib', ' in GiB')}: {_shown(there[fact])} there, {_shown(here[fact])} here"


def _compare_code(crate: Crate) -> Iterator[str]:
    there, here = crate.files(*CODE), {name: compute_sha256(path) for name, path in code_files().items()}
    kinds = {
        "differ": [name for name in there if name in here and here[name] != there[name]],
        "are missing here": [name for name in there if name not in here],
        "are new here": [name for name in here if name not in there],
    }
    for kind, names in kinds.items():
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            yield f"code: {len(names)} of {len(there)} files {kind}: {', '.join(names[:NAMED])}{more}"
    commit = crate.record["commit"]
    if any(kinds.values()):
        where = f"commit {commit}" if commit else "no commit of git's"
        yield f"code: this clone's runs, {find_commit() or 'not in git'}; the crate's is of {where}, and is in it"


def _compare_versions(versions: dict[str, list[str]]) -> Iterator[str]:
    for package, there in versions.items():
        here = _version(package)
        if here not in there:
            yield f"{package}: {' and '.join(there)} there, {here or 'none'} here"


def _version(package: str) -> str | None:
    if package == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _shown(value: object) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def check_recorded(record: dict, datasets: dict[str, dict], places: Places) -> None:
    """Check that the crate has a digest of every input of its datasets; without one, nothing can be compared.

    Args:
        record: the crate's record.
        datasets: name, settings and images of each dataset of the run (config/datasets.py).
        places: the folders that the crate may read.

    Raises:
        InputError: names the dataset or file without a digest.
    """
    images = {entry["dataset"] for entry in record["images"]}
    files = {str(places.path(entry["given"])) for entry in record["inputs"] if entry["of"] == DATASET}
    for name, dataset in datasets.items():
        lacking = [] if name in images else [f"the images of the dataset {name}"]
        lacking += [file for file in files_of(dataset["settings"]) if file not in files]
        if lacking:
            raise InputError(
                f"the crate has no digest of {lacking[0]}, so it cannot be compared with the input of the crate's run; "
                "take another crate"
            )


def check_inputs(inputs: list[dict], places: Places) -> None:
    """Check that the user's files on this machine equal those of the crate's run.

    Raises:
        InputError: a file is listed twice, outside of `places`, missing or different.
    """
    seen = set()
    for entry in inputs:
        places.check_input(entry["given"], entry["file"])
        if (key := (entry["of"], entry["given"], entry["file"])) in seen:
            raise InputError(f"the crate's record names the input {find_input(*key[1:])} twice; take another crate")
        seen.add(key)
    progress = Progress("files of inputs", len(inputs))
    for entry in progress.follow(inputs):
        path = find_input(entry["given"], entry["file"])
        if not path.is_file():
            raise InputError(
                f"{path} is missing; the crate's run read it ({entry['bytes']} bytes, then {entry['found_at']}). Put "
                "it there, or run this in the folder that the path is relative to"
            )
        if path.stat().st_size != entry["bytes"] or compute_sha256(path) != entry["sha256"]:
            raise InputError(
                f"{path} differs from the file that the crate's run read (then {entry['found_at']}, SHA-256 "
                f"{entry['sha256'][:12]}…); replace it by that file"
            )
