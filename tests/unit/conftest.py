"""Fixtures of unit tests of several packages."""

import shutil

import pytest

from dj2mgm.storage.files import write_yaml
from paths import PROJECT


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes an experiment into a copy of config/ in the current folder."""
    shutil.copytree(PROJECT / "config", tmp_path / "config")
    monkeypatch.chdir(tmp_path)

    def write(name="mine", **values):
        write_yaml(tmp_path / f"config/experiments/{name}.yaml", values)

    return write
