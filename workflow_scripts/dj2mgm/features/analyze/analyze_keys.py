"""Key of the configuration for `analyze`, and the settings of its stage."""

from dj2mgm.settings.base import Processes, setting
from dj2mgm.settings.data import FilterSettings

TARGETS_BY_KEY = {"experiment": ("analyze",)}


class AnalysisSettings(FilterSettings):
    """The analysis of a dataset."""

    clip: str | None = setting(..., "folder or hub id of the CLIP that rates captions")
    cpu_threads: Processes | None = setting(..., "null: one for each core of this process")
    chosen: dict[str, str] = setting(
        {}, "dataset, model and recipe that are not the defaults, for commands on the page"
    )
