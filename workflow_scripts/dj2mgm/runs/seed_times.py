"""Further seeds of an experiment: their numbers, and the measured times of the stages that another seed would run."""

import math
from collections.abc import Collection, Iterable, Mapping
from csv import DictReader
from pathlib import Path

from dj2mgm.runs.stages import BASE
from dj2mgm.storage.files import read_yaml


def choose_unused_seeds(seeds: Collection[int], number: int) -> list[int]:
    """Return the numbers after the largest seed.

    Smaller numbers may have chosen the winner of a search, whose experiment begins with larger ones.
    """
    first = max(seeds, default=-1) + 1
    return list(range(first, first + number))


def sum_measured_seconds(runs: Iterable[Mapping[str, str | Path]]) -> float | None:
    """Return the time that these runs took, without stages that all seeds share; None if nothing was measured.

    Args:
        runs: folders of the stages of each run. A folder of several runs counts once.
    """
    return sum_seconds(Path(folder) for stages in runs for folder in _list_seed_folders(stages))


def sum_seconds(folders: Iterable[Path]) -> float | None:
    """Return the time of the stages in these folders, each counted once; None if nothing was measured."""
    seconds = [_read_seconds(file) for folder in dict.fromkeys(folders) for file in folder.glob("*.benchmark.tsv")]
    return sum(seconds) if seconds else None


def format_hours(hours: float) -> str:
    """Return hours with at least two digits, rounded up, so that a budget of them is enough."""
    digits = max(0, 1 - math.floor(math.log10(hours))) if hours > 0 else 0
    return f"{math.ceil(round(hours * 10**digits, 6)) / 10**digits:.{digits}f}"


def _list_seed_folders(stages: Mapping[str, str | Path]) -> Iterable[str | Path]:
    for stage, folder in stages.items():
        config = Path(folder, "config.yaml")
        without_captioner = stage == "synthesize" and config.is_file() and read_yaml(config).get("captioner") is None
        if stage != "filter" and not stage.startswith(BASE) and not without_captioner:
            yield folder


def _read_seconds(file: Path) -> float:
    """Return the time of Snakemake's benchmark file; 0 if it has none."""
    with open(file, encoding="utf-8") as lines:
        row = next(DictReader(lines, delimiter="\t"), {})
    try:
        return float(row.get("s", 0))
    except (TypeError, ValueError):
        return 0.0
