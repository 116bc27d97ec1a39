"""Evaluations: tasks of lmms-eval, the folders of their data, and the installation of lmms-eval."""

from importlib.util import find_spec
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.script_modules import SCRIPTS

TABLES = (
    ".parquet",
    ".arrow",
    ".json",
    ".jsonl",
    ".csv",
    ".tsv",
    ".md",
)  # suffixes of data files that are inputs of rules
BESIDE = SCRIPTS.parent / ".lmms_eval"  # packages that `make lmms_eval` installs in addition to .venv


def find_evaluation_data(task: str, folder: str | None) -> Path:
    """Return the folder of a task's data, which has the name of the task.

    Raises:
        InputError: there is no such folder.
    """
    if folder is None:
        raise InputError(
            f"evaluations: {task} needs its data: set evaluation_data to the folder in which a folder {task} holds it "
            "(docs/evaluation.md says how to get it)"
        )
    data = Path(folder, task)
    if not data.is_dir():
        raise InputError(
            f"evaluations: there is no folder {data} with the data of {task}; docs/evaluation.md says how to get it"
        )
    return data


def check_lmms_eval() -> None:
    """Raise InputError unless lmms-eval is installed here."""
    if not (BESIDE / "lmms_eval").is_dir() and find_spec("lmms_eval") is None:
        raise InputError("evaluations: lmms-eval is not installed: run `make lmms_eval`, or Snakemake with --sdm conda")
