"""Fixtures: the small project, new or with a finished run, and a browser."""

import shutil
from collections.abc import Iterator

import pytest

from browser import Page, find_browser, open_browser
from small_project import Project, copy_project


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Project:
    """Return a project with a finished `snakemake baseline`, which tests restore; its folder has a space and an ä."""
    project = copy_project(tmp_path_factory.mktemp("data to model ä"))
    project.run("baseline")
    return project


@pytest.fixture(scope="session")
def synthesized(finished) -> Project:
    """Return the finished project after `snakemake dj_synth`."""
    finished.run("dj_synth")
    return finished


@pytest.fixture
def licensed(finished):
    """Add licenses to the model and dataset of the finished project, and remove them afterwards."""
    files = [finished.folder / "config" / kind / "small.yaml" for kind in ("models", "datasets")]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content + b"\nlicense: apache-2.0\n")
    yield finished
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    for folder in (finished.folder / "results/published", finished.result("export")):
        shutil.rmtree(folder, ignore_errors=True)
    finished.run("baseline")  # its report shows licenses


@pytest.fixture
def fresh(tmp_path) -> Project:
    """Return a project without any run."""
    return copy_project(tmp_path)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Page]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium or Chrome is installed: the page is not opened in a browser")
    with open_browser(executable, tmp_path_factory.mktemp("profile")) as page:
        yield page
