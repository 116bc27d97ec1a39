"""Files in config/studies, and files that studies write: searches, their batches, mixtures, and settings of pages."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from dj2mgm.features.studies.axes import Interval, MixtureSpace
from dj2mgm.features.studies.designs import (
    AblationDesign,
    CurveDesign,
    GridDesign,
    ListDesign,
    SampleDesign,
    Sampler,
    SearchDesign,
)
from dj2mgm.records import PageSettings, ShownExperiment
from dj2mgm.settings.base import (
    Number,
    Section,
    Seed,
    UniqueItems,
    build_schema,
    refuse_contradiction,
    section,
    setting,
)
from dj2mgm.settings.config_files import list_config_names, read_config
from dj2mgm.settings.string_formats import Name
from dj2mgm.settings.validation import validate_settings

STUDIES_FOLDER = "studies"
AnyDesign = Annotated[
    AblationDesign | CurveDesign | GridDesign | ListDesign | SampleDesign | SearchDesign, Field(discriminator="kind")
]


class StudyPage(Section):
    """The page that compares the variants."""

    title: str = setting("", "heading; empty: the study's name")
    reference: Name | None = setting(
        None, "variant that all others are compared with; null: the experiment without changes"
    )
    keeps: Annotated[Number, Field(gt=0, lt=1)] | None = setting(
        None, "share of the reference's scores; the page states which variants keep at least this share"
    )


class StudyFile(Section):
    """config/studies/<name>.yaml."""

    description: str = setting("", "purpose of the study, in a sentence")
    experiment: Name = setting("baseline", "experiment that the variants change")
    design: AnyDesign = setting(..., "the variants")
    proportional: dict[str, str] = setting(
        {},
        "keys that stay proportional to another at the experiment's ratio, as {finetune.lora.alpha: finetune.lora.r}",
    )
    controls: Annotated[list[Literal["random"]], UniqueItems()] = setting(
        [], "further variants, as in an experiment's `controls`; random is skipped if the recipes drop no rows"
    )
    page: StudyPage = section(StudyPage, "the page that compares the variants")

    @model_validator(mode="after")
    def _check_proportional(self) -> Self:
        varied = self.design.varied_keys
        for key, other_key in self.proportional.items():
            if key in varied or other_key not in varied:
                problem = f"the variants set {key}" if key in varied else f"no variant sets {other_key}"
                refuse_contradiction(f"{problem}; remove this entry", "proportional", key)
        return self


def list_study_names() -> list[str]:
    """Return the names of the files in config/studies; each is a target of `snakemake`."""
    return list_config_names(STUDIES_FOLDER)


def read_study_file(path: Path) -> StudyFile:
    """Return the content of a study's file.

    Raises:
        InputError: a key is unknown or of the wrong type, or two parts of the file contradict each other.
    """
    return validate_settings(StudyFile, read_config(path, build_schema(StudyFile)), str(path))


class SearchSettings(Section):
    """Space of a search (search.yaml), without the budget, so that a larger budget continues the search."""

    experiment: str = setting(..., "experiment that the trials change")
    seeds: list[Seed] = setting(..., "seeds of the experiment")
    folder: str = setting(..., "folder of the search's files")
    axes: dict[str, list | Interval] = setting(..., "values of each key")
    mixture: MixtureSpace | None = setting(None, "mixture of sources; its shares are among the axes")
    sampler: Sampler = setting()
    seed: Seed = setting()

    @property
    def key(self) -> str:
        """Last part of `folder`: a hash of the settings that decide the trials."""
        return self.folder.rpartition("/")[2]


class TrialRecord(Section):
    """A variant that a search tries. Its runs are stored like those of any experiment."""

    name: Name = setting(..., "name of the experiment and of its folder of results")
    changes: dict[str, Any] = setting(..., "values by dotted key, as in a study's file")


class BatchRecord(Section):
    """The trainings of a batch (trials.yaml)."""

    step: Literal["explore", "promote"] = setting(..., "explore: new trials; promote: more rows for the best")
    fraction: Number = setting(..., "share of the experiment's rows and samples")
    seeds: list[Seed] = setting(..., "seeds that are trained")
    trials: list[TrialRecord] = setting()
    trainings: int = setting(..., "budget of trainings when the batch was planned")
    price: float | None = setting(None, "expected GPU seconds of a training with one seed; null: not known")

    @property
    def names(self) -> list[str]:
        """Names of the experiments that are trained."""
        return [format_run_name(trial.name, self.fraction) for trial in self.trials]


class BatchResult(Section):
    """The results of a batch (scores.yaml). Batch 0 has those of the experiment that the trials change."""

    scores: dict[str, float | None] = setting(..., "score by trial (`find_trial_score`); null: its training diverged")
    runs: int = setting(..., "number of its trainings, one for each seed")
    seconds: float | None = setting(..., "GPU seconds of stages that ran for these trainings only; null: not measured")
    fixed_seconds: float = setting(0.0, "part of `seconds` outside training stages, which does not grow with the rows")
    fewer_rows: list[str] = setting([], "trials that train on fewer different rows than the baseline")


def format_run_name(trial: str, fraction: Number) -> str:
    """Return the name of the experiment in which a trial is trained on a share of the rows."""
    return trial if fraction == 1 else f"{trial}-{fraction:g}"


class MergedMixture(Section):
    """Shares of sources, for which LoRAs of the single sources are merged."""

    shares: dict[str, Number] = setting(..., "share of each source")
    variant: Name | None = setting(None, "variant of the study that is trained on this mixture; null: not trained")


class MergeSettings(Section):
    """Settings of the script that merges and scores (config.yaml)."""

    sources: dict[str, str] = setting(..., "by source: folder of the stage 2 that was trained on it alone")
    mixtures: Annotated[list[MergedMixture], Field(min_length=1)] = setting(...)


class ScoredMixture(MergedMixture):
    """A mixture with the score of its merged model."""

    score: Number = setting(..., "mean probability of the right answers to the held-out questions")


class MixtureScores(Section):
    """Scores of merged models (scores.yaml)."""

    sources: int = setting(..., "number of sources, each of which was trained alone")
    mixtures: list[ScoredMixture] = setting(...)


class ShownTrial(Section):
    """Changed keys of a trial, and its headline scores."""

    model_config = ConfigDict(extra="ignore")  # pages of earlier versions have more keys

    name: str = setting()
    changes: dict[str, Any] = setting(..., "by dotted key")
    scores: list[float | None] = setting(..., "headline score in each rung; null: not trained, or diverged")
    fewer_rows: bool = setting(False, "whether its recipes keep fewer different rows than the baseline's")


class ShownBatch(Section):
    """The trainings of a batch, with their expected and measured cost."""

    step: str = setting()
    fraction: Number = setting(..., "share of the rows")
    runs: int = setting(..., "number of trainings, one for each seed")
    price: float | None = setting(..., "expected GPU seconds of a training; null: not known")
    seconds: float | None = setting(..., "measured GPU seconds of all trainings; null: not measured")


class ShownSearch(Section):
    """Plan, state and results of a search."""

    model_config = ConfigDict(extra="ignore")  # pages of earlier versions have more keys

    progress: str = setting(..., "its state in a sentence")
    rungs: list[Number] = setting(..., "shares of the rows")
    goals: dict[str, Number] = setting({}, "weights of the scores that rank trials; none: the headline ranks them")
    axes: dict[str, list | Interval] = setting({}, "values of each key")
    batches: list[ShownBatch] = setting([])
    trials: list[ShownTrial] = setting()

    def rank_trials(self) -> list[ShownTrial]:
        """Return the trials that were trained on all rows, best first."""
        trained = [trial for trial in self.trials if trial.scores[-1] is not None]
        return sorted(trained, key=lambda trial: -trial.scores[-1])

    def has_fewer_rows(self, name: str) -> bool:
        """Return whether a trial trains on fewer different rows than the baseline."""
        return any(trial.fewer_rows for trial in self.trials if trial.name == name)


class ShownStudy(Section):
    """Values of a study's page, in addition to those of its experiments."""

    experiment: str = setting(..., "name of the experiment that the variants change")
    description: str = setting()
    page: StudyPage = setting()
    search: ShownSearch | None = setting(None, "null: the design is not adaptive")
    merged: str | None = setting(None, "file with the scores of merged models; null: the design merges none")


class StudyPageSettings(PageSettings):
    """The experiments of a study's page."""

    study: ShownStudy | None = setting(None, "null: this is not a study's page")


class BatchSettings(PageSettings):
    """The finished trials of a batch; none if every training diverged."""

    experiments: list[ShownExperiment] = setting()
    goals: dict[str, Number] = setting({}, "weights of the scores that rank the trials; none: the headline")
