"""A run: an experiment with one seed."""

from dataclasses import dataclass

from dj2mgm.dataset_resolution.experiment_dataset import Dataset
from dj2mgm.runs.experiment_recipes import is_for_instructions
from dj2mgm.runs.stages import TRAINING_STAGES
from dj2mgm.settings.base import StageSettings
from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.data import TrainedCaptionerSettings


@dataclass(frozen=True)
class Run:
    """An experiment with one seed.

    Attributes:
        name: the experiment, with the folder of a seed after the first: `baseline` or `baseline/seed-1`.
        config: the merged configuration, with this run's seed.
        settings: settings of each stage by its name.
    """

    experiment: str
    seed: int
    name: str
    config: Experiment
    dataset: Dataset
    settings: dict[str, StageSettings]

    @property
    def folder(self) -> str:
        """Folder of the run's stages, below results/."""
        return f"{self.dataset.name}/{self.config.model.folder_name}/{self.name}"

    @property
    def training_stages(self) -> list[str]:
        """Names of the run's training stages, in their order."""
        return [stage for stage in TRAINING_STAGES if stage in self.settings]

    @property
    def labels(self) -> dict[str, str | int]:
        """Labels for trackers."""
        names = {"experiment": self.experiment, "seed": self.seed, "dataset": self.dataset.name}
        names |= {"model": self.config.model.name, "recipe": self.config.recipe}
        captions = self.config.synthesize.recipe
        return names | ({"captions_recipe": captions} if captions else {})

    @property
    def captioner(self) -> str | None:
        """Experiment whose trained model writes captions, or answers questions, for this run."""
        synthesize = self.settings.get("synthesize")
        is_trained = synthesize and isinstance(synthesize.captioner, TrainedCaptionerSettings)
        return self.config.synthesize.mgm.experiment if is_trained else None

    def choose_training_stage(self, captioner: "Run") -> str:
        """Return the stage of the captioner's run whose model is used: the first for captions, the last for answers."""
        return captioner.training_stages[-1 if self.selects_instructions else 0]

    @property
    def selects_instructions(self) -> bool:
        """True if the recipe of the synthesize stage is for instructions and not for pairs."""
        return "synthesize" in self.settings and is_for_instructions(self.settings["synthesize"].recipe)
