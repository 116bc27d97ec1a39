"""Evaluations: tasks of lmms-eval, the folders of their data, and the installation of lmms-eval."""

from importlib.util import find_spec
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.script_modules import SCRIPTS

# suffixes of a task's files that are inputs of rules; the header of a README.md may list a dataset's files
DATA_SUFFIXES = (".parquet", ".arrow", ".json", ".jsonl", ".csv", ".tsv", ".md")
LMMS_EVAL = SCRIPTS.parent / ".lmms_eval"  # folder into which `make lmms_eval` installs packages, outside .venv


def find_evaluation_data(task: str, folder: str | None) -> Path:
    """Return the folder of a task's data, which has the name of the task.

    Raises:
        InputError: evaluation_data is not stated, or there is no such folder.
    """
    if folder is None:
        raise InputError(
            f"evaluations: the data of {task} are missing. Set evaluation_data to the folder that contains {task}/ "
            "(docs/evaluation.md says how to get them)"
        )
    data = Path(folder, task)
    if not data.is_dir():
        raise InputError(
            f"evaluations: there is no folder {data} with the data of {task}; docs/evaluation.md says how to get it"
        )
    return data


def check_lmms_eval() -> None:
    """Raise InputError unless lmms-eval is installed in this environment or in .lmms_eval."""
    if not (LMMS_EVAL / "lmms_eval").is_dir() and find_spec("lmms_eval") is None:
        raise InputError("evaluations: lmms-eval is not installed: run `make lmms_eval`, or Snakemake with --sdm conda")
