"""Files in config/studies: variants of an experiment, and the page that compares them."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dj2mgm.features.studies.designs import (
    AblationDesign,
    CurveDesign,
    GridDesign,
    ListDesign,
    SampleDesign,
    SearchDesign,
)
from dj2mgm.settings.base import Number, Section, UniqueItems, build_schema, refuse_contradiction, section, setting
from dj2mgm.settings.config_files import list_config_names, read_config
from dj2mgm.settings.string_formats import Name
from dj2mgm.settings.validation import validate_settings

STUDIES_FOLDER = "studies"


class StudyPage(Section):
    """The page that compares the variants."""

    title: str = setting("", "heading; empty: the study's name")
    reference: Name | None = setting(
        None, "variant that all others are compared with; null: the experiment without changes"
    )
    keeps: Annotated[Number, Field(gt=0, lt=1)] | None = setting(
        None, "share of the reference's scores; the page states which variants keep at least this share"
    )


AnyDesign = Annotated[
    AblationDesign | CurveDesign | GridDesign | ListDesign | SampleDesign | SearchDesign, Field(discriminator="kind")
]


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


# JSON schemas of these files, by name
SCHEMAS = {"study": [StudyFile]}


def list_study_names() -> list[str]:
    """Return the names of the files in config/studies; each is a target of `snakemake`."""
    return list_config_names(STUDIES_FOLDER)


def read_study_file(path: Path) -> StudyFile:
    """Return the content of a study's file.

    Raises:
        InputError: a key is unknown or of the wrong type, or two parts of the file contradict each other.
    """
    return validate_settings(StudyFile, read_config(path, build_schema(StudyFile)), str(path))
