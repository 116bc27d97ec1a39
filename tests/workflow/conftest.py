"""The small project, fresh or run to its end once."""

import pytest
from small_project import Project, copy_project


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Project:
    """`snakemake baseline`, finished. Whoever changes it must put it back. The folder's name has a space and an ä."""
    project = copy_project(tmp_path_factory.mktemp("data to model ä"))
    project.run("baseline")
    return project


@pytest.fixture(scope="session")
def synthesized(finished) -> Project:
    """The finished project, with `snakemake dj_synth` finished too."""
    finished.run("dj_synth")
    return finished


@pytest.fixture
def fresh(tmp_path) -> Project:
    """A project in which nothing has run."""
    return copy_project(tmp_path)
