"""Comparison of this machine with the machine of a crate's run: code, packages, processor and GPUs, inputs, scores."""

import csv
import importlib.metadata
import math
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from dj2mgm.cli.messages import Progress
from dj2mgm.dataset_resolution.experiment_dataset import Dataset, list_dataset_files
from dj2mgm.errors import InputError
from dj2mgm.provenance.allowed_folders import AllowedFolders
from dj2mgm.provenance.crate_files import (
    CODE_FILES,
    describe_this_machine,
    find_commit,
    find_input,
    list_code_files,
)
from dj2mgm.provenance.crate_reader import Crate
from dj2mgm.records.crate_records import CrateInput, CrateRecord
from dj2mgm.storage.files import compute_sha256, replace_file

NAMED_FILES = 5  # files listed in a sentence


def describe_differences(crate: Crate) -> Iterator[str]:
    """Yield a sentence for each kind of difference. No difference prevents the run."""
    yield from _compare_code(crate)
    yield from _compare_versions(crate.record.versions)
    for (fact, crate_value), (_, own_value) in zip(crate.record.machine, describe_this_machine(), strict=True):
        if crate_value != own_value:
            name = fact.replace("_gib", " in GiB")
            yield f"{name}: {_format_value(crate_value)} there, {_format_value(own_value)} here"


def _compare_code(crate: Crate) -> Iterator[str]:
    """Yield a sentence for each kind of difference of the code; no commit is compared if all files are equal."""
    crate_files = crate.select_digests(*CODE_FILES)
    own_files = {name: compute_sha256(path) for name, path in list_code_files().items()}
    kinds = {
        "differ": [name for name in crate_files if name in own_files and own_files[name] != crate_files[name]],
        "are missing here": [name for name in crate_files if name not in own_files],
        "are new here": [name for name in own_files if name not in crate_files],
    }
    for kind, names in kinds.items():
        if names:
            more = f" and {len(names) - NAMED_FILES} more" if len(names) > NAMED_FILES else ""
            yield f"code: {len(names)} of {len(crate_files)} files {kind}: {', '.join(names[:NAMED_FILES])}{more}"
    commit = crate.record.commit
    if any(kinds.values()):
        own_revision, revision = find_commit() or "not in git", f"commit {commit}" if commit else "not in git"
        yield f"code: the run uses this clone ({own_revision}); the crate contains its own code ({revision})"


def _compare_versions(versions: dict[str, list[str]]) -> Iterator[str]:
    for package, crate_versions in versions.items():
        own_version = _find_version(package)
        if own_version not in crate_versions:
            yield f"{package}: {' and '.join(crate_versions)} there, {own_version or 'none'} here"


def _find_version(package: str) -> str | None:
    if package == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _format_value(value: object) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def check_recorded(record: CrateRecord, datasets: dict[str, Dataset], allowed_folders: AllowedFolders) -> None:
    """Check that the crate has a digest of every input of its datasets; without a digest, nothing can be compared."""
    images = {entry.dataset for entry in record.images}
    files = {str(allowed_folders.resolve(entry.configured_path)) for entry in record.inputs if entry.kind == "dataset"}
    for name, dataset in datasets.items():
        missing = [] if name in images else [f"the images of the dataset {name}"]
        missing += [file for file in list_dataset_files(dataset.settings) if file not in files]
        if missing:
            raise InputError(
                f"the crate has no digest of {missing[0]}, so it cannot be compared with the input of the crate's run; "
                "take another crate"
            )


def check_inputs(inputs: list[CrateInput], allowed_folders: AllowedFolders) -> None:
    """Check that the user's files on this machine equal the files of the crate's run."""
    keys = set()
    for entry in inputs:
        allowed_folders.check_input(entry.configured_path, entry.file)
        if (key := (entry.kind, entry.configured_path, entry.file)) in keys:
            raise InputError(f"the crate's record names the input {find_input(*key[1:])} twice; take another crate")
        keys.add(key)
    progress = Progress("files of inputs", len(inputs))
    for entry in progress.follow(inputs):
        path = find_input(entry.configured_path, entry.file)
        if not path.is_file():
            raise InputError(
                f"{path} is missing; the crate's run read it ({entry.bytes} bytes, then {entry.found_at}). Put "
                "it there, or run this in the folder that the path is relative to"
            )
        if path.stat().st_size != entry.bytes or compute_sha256(path) != entry.sha256:
            raise InputError(
                f"{path} differs from the file that the crate's run read (then {entry.found_at}, SHA-256 "
                f"{entry.sha256[:12]}…); replace it by that file"
            )


SCORE_KEY = ("experiment", "group", "metric")
SCORE_DECIMALS = 3
Scores = dict[tuple[str, ...], dict[str, float | None]]  # value, low and high by experiment, group and metric


@dataclass(frozen=True)
class Comparison:
    """Score of a crate's run and of its reproduction."""

    experiment: str
    group: str
    metric: str
    there: float
    low: float | None  # the crate's 95 % interval; None: it has none
    high: float | None
    here: float

    @property
    def difference(self) -> float:
        return self.here - self.there

    @property
    def agrees(self) -> bool:
        """True if both scores are equal to three decimals."""
        return round(abs(self.difference), 6) < 0.5 * 10**-SCORE_DECIMALS

    @property
    def is_outside(self) -> bool:
        """True if the reproduced score is outside of the crate's interval."""
        return self.low is not None and self.high is not None and not self.low <= self.here <= self.high


def compare_scores(crate_scores: Scores, own_scores: Scores) -> list[Comparison]:
    """Compare the scores of the crate's run with the scores of the reproduction."""
    if missing := crate_scores.keys() ^ own_scores.keys():
        raise InputError(f"only one of the two runs has the score {' '.join(min(missing))}; use the crate's code")
    return [
        Comparison(*key, row["value"], row["low"], row["high"], own_scores[key]["value"])
        for key, row in crate_scores.items()
    ]


def parse_comparison(content: bytes, location: str) -> Scores:
    """Return the scores in the content of a comparison.csv."""
    scores: Scores = {}
    try:
        for row in csv.DictReader(StringIO(content.decode()), strict=True):
            key = tuple(row[name] for name in SCORE_KEY)
            if key in scores:
                raise ValueError(f"{' '.join(key)} is repeated")
            scores[key] = {"value": _parse_figure(row["value"])}
            scores[key] |= {name: _parse_figure(row[name]) if row[name] else None for name in ("low", "high")}
            if (scores[key]["low"] is None) != (scores[key]["high"] is None):
                raise ValueError(f"{' '.join(key)} has only one end of an interval")
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise InputError(f"{location} is not a table of scores ({error}); use an unchanged copy") from None
    if not scores:
        raise InputError(f"{location} has no scores; use an unchanged copy")
    return scores


def _parse_figure(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a score")
    return number


def write_comparisons(rows: Iterable[Comparison], path: Path) -> None:
    with replace_file(path) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*SCORE_KEY, "crate", "low", "high", "here", "difference"])
        for row in rows:
            figures = [row.there, row.low, row.high, row.here, round(row.difference, 6)]
            table.writerow([row.experiment, row.group, row.metric, *figures])


def format_comparisons(rows: list[Comparison]) -> str:
    """Return a table for a terminal and a closing sentence."""
    lines = [["experiment", "group", "metric", "crate", "95 % interval", "here", "difference"]]
    for row in rows:
        interval = "–" if row.low is None else f"{row.low:.3f} to {row.high:.3f}"
        figures = [f"{row.there:.3f}", interval, f"{row.here:.3f}", f"{row.difference:+.3f}"]
        lines.append([row.experiment, row.group, row.metric, *figures])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    agree, outside = sum(row.agrees for row in rows), sum(row.is_outside for row in rows)
    agreement = f"{agree} of {len(rows)} scores agree to {SCORE_DECIMALS} digits"
    return "\n".join([*table, f"{agreement}; {outside} lie outside the crate's intervals"])
