"""Slurm for all tests in this folder, which are skipped with a reason if it cannot start."""

import os

import pytest

from one_machine_slurm import running_slurm, why_not
from small_project import REAL_PYTHON

os.environ[REAL_PYTHON] = "1"


@pytest.fixture(scope="session")
def slurm_runs(tmp_path_factory) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with running_slurm(tmp_path_factory.mktemp("slurm")):
        yield
