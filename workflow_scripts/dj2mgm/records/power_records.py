"""Settings of the power analysis of a planned comparison."""

from dj2mgm.settings.base import Section, Seed, setting
from dj2mgm.settings.targets import Headline


class FinishedRun(Section):
    """A finished run, which shows how much scores vary."""

    seed: Seed = setting()
    stages: dict[str, str] = setting(..., "folder of each stage")
    time: float = setting(..., "time stamp of its scores; with a newer one, the analysis runs again")


class PowerSettings(Section):
    """Settings of a power analysis."""

    headline: Headline = setting()
    experiment: str = setting(..., "experiment that is compared with the reference")
    images: int = setting(..., "number of held-out images")
    images_are_known: bool = setting(..., "false: the dataset is not made yet, and `images` is an assumption")
    seeds: int = setting()
    finished: dict[str, list[FinishedRun]] = setting(..., "finished runs by experiment, the reference first")
