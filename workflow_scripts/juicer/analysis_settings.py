"""The resolved settings of the analysis."""

from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from juicer.settings import FILTER_KEYS, StageSettings, clip_arguments, read_values, stage_settings


@dataclass(frozen=True)
class AnalysisSettings:
    recipe: StageSettings
    clip: str | None  # folder or hub id
    cpu_threads: int | None  # of PyTorch; None means every core


def read_analysis_settings(path: str | Path) -> AnalysisSettings:
    """Read `{image_root, processes, recipe: {process}, clip, cpu_threads}`.

    Raises:
        InputError: names the file, the key and what belongs there.
    """
    values = read_values(path, FILTER_KEYS | {"clip", "cpu_threads"}, set())
    clip, threads = values["clip"], values["cpu_threads"]
    if clip is not None and (not isinstance(clip, str) or not clip):
        raise InputError(f"{path}: 'clip' must be a folder or hub id of a CLIP, or null; found {clip!r}")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise InputError(
            f"{path}: 'cpu_threads' must be a whole number from 1, or null for every core; found {threads!r}"
        )
    return AnalysisSettings(stage_settings(path, values, clip_arguments(clip) if clip else {}), clip, threads)
