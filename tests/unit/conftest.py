"""Fixtures of unit tests of several packages."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest

from dj2mgm.storage.files import write_yaml
from paths import PROJECT


@pytest.fixture(scope="session", autouse=True)
def quick_pages_and_files(tmp_path_factory) -> Iterator[None]:
    """Compile each template of a page once, which takes two thirds of its time, and wait for no disk."""
    compiled = jinja2.FileSystemBytecodeCache(str(tmp_path_factory.mktemp("templates")))
    initialize = jinja2.Environment.__init__

    def keep_templates(environment: jinja2.Environment, *arguments, **options) -> None:
        initialize(environment, *arguments, **options)
        environment.bytecode_cache = environment.bytecode_cache or compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "__init__", keep_templates)
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes an experiment into a copy of config/ in the current folder."""
    shutil.copytree(PROJECT / "config", tmp_path / "config")
    monkeypatch.chdir(tmp_path)

    def write(name="mine", **values):
        write_yaml(tmp_path / f"config/experiments/{name}.yaml", values)

    return write


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Return the folder of a project with instructions, for tests of recipes."""
    from instructions import save_instructions  # imports torch

    return save_instructions(tmp_path_factory.mktemp("project"))


@pytest.fixture
def quick_requests(monkeypatch):
    """Shorten the first wait before a request is repeated, and let no test use a key of this machine."""
    monkeypatch.setattr("dj2mgm.features.servers.chat_requests.FIRST_WAIT_S", 0.002)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
