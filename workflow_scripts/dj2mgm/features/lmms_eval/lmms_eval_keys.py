"""Keys of the configuration for `evaluate`, settings of its stages, and the places of tasks' data and of lmms-eval."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from dj2mgm.errors import InputError
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.settings.base import Section, SeedSettings, StageSettings, Template, UniqueItems, setting
from dj2mgm.settings.evaluation import Decoding
from dj2mgm.settings.string_formats import FilePath, Name

TARGETS_BY_KEY = {}  # the report shows the tasks, so every target uses their keys
# suffixes of a task's files that are inputs of rules; the header of a README.md may list a dataset's files
DATA_SUFFIXES = (".parquet", ".arrow", ".json", ".jsonl", ".csv", ".tsv", ".md")
LMMS_EVAL = SCRIPTS.parent / ".lmms_eval"  # folder into which `make lmms_eval` installs packages, outside .venv


class LmmsEvalKeys(Section):
    """Keys for several experiments."""

    evaluations: Annotated[list[Name], UniqueItems()] = setting(
        [],
        "tasks of lmms-eval for `snakemake evaluate`, such as [mmstar, ai2d, ocrbench, pope]; the report shows them",
    )
    evaluation_data: FilePath | None = setting(
        None, "folder with a folder of data for each task (docs/features/lmms_eval.md)"
    )


KEYS = LmmsEvalKeys


class AnswerSettings(SeedSettings):
    """The answers to the questions of a task of lmms-eval."""

    template: Template = setting()
    decoding: Decoding = setting()
    gpus: int = setting(ge=1)


class TaskSettings(StageSettings):
    """A task of lmms-eval, which all runs share."""

    task: str = setting(..., "lmms-eval's name")
    data: str = setting(..., "folder of its data")


def find_evaluation_data(task: str, folder: str | None) -> Path:
    """Return the folder of a task's data, which has the name of the task.

    Raises:
        InputError: evaluation_data is not stated, or there is no such folder.
    """
    if folder is None:
        raise InputError(
            f"evaluations: the data of {task} are missing. Set evaluation_data to the folder that contains {task}/ "
            "(docs/features/lmms_eval.md says how to get them)"
        )
    data = Path(folder, task)
    if not data.is_dir():
        raise InputError(
            f"evaluations: there is no folder {data} with the data of {task}; docs/features/lmms_eval.md says how to "
            "get it"
        )
    return data


def check_lmms_eval() -> None:
    """Raise InputError unless lmms-eval is installed in this environment or in .lmms_eval."""
    if not (LMMS_EVAL / "lmms_eval").is_dir() and find_spec("lmms_eval") is None:
        raise InputError("evaluations: lmms-eval is not installed: run `make lmms_eval`, or Snakemake with --sdm conda")
