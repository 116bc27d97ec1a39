"""Settings of the analysis of a dataset."""

from dj2mgm.settings.base import Processes, setting
from dj2mgm.settings.data import FilterSettings


class AnalysisSettings(FilterSettings):
    """The analysis of a dataset."""

    clip: str | None = setting(..., "folder or hub id of the CLIP that rates captions")
    cpu_threads: Processes | None = setting(..., "null: one for each core of this process")
    chosen: dict[str, str] = setting(
        {}, "dataset, model and recipe that are not the defaults, for commands on the page"
    )
