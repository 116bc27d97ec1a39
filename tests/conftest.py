"""Hypothesis profile, bytecode, and groups of tests for pytest-xdist."""

import compileall
import os
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

import forked_python
import fuzzing
from dj2mgm.torch_environment import set_torch_environment
from forked_training import Forks
from paths import PROJECT

# Tests start hundreds of processes, which would all compile the project's modules
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

set_torch_environment()  # before a test imports torch

# Hypothesis draws the same examples in every run; HYPOTHESIS_PROFILE=default draws new ones
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

FINISHED = {"finished", "synthesized"}  # fixtures of tests/workflow: finished runs of the small project
# groups that take at least 20 s of CPU time, the longest first, so that no process starts one of them last
LONG = (
    *("test_resume", "test_decide", "test_several_processes", "test_bad_input", "test_vlm", "test_fetching"),
    *("test_formats_fuzz", "test_generators", "test_console", "test_older_files", "test_targets", "test_engine"),
)


def patch_data_juicer() -> None:
    """Change Data-Juicer as the entry points do, if the engine is imported."""
    if module := sys.modules.get("dj2mgm.juicer.patched_data_juicer"):
        module.patch_data_juicer()


# twice: before the fixtures of a module, and again for engines that a test imports
module_changes = pytest.fixture(patch_data_juicer, autouse=True, scope="module")
function_changes = pytest.fixture(patch_data_juicer, autouse=True)


@pytest.fixture(scope="session")
def forks(tmp_path_factory) -> Iterator[Forks]:
    """Run trainings in forks of one process, for all tests of this process."""
    with Forks(tmp_path_factory.mktemp("trainings")) as forks:
        yield forks


def pytest_configure(config: pytest.Config) -> None:
    fuzzing.thorough = config.option.markexpr != "not slow"
    if not hasattr(config, "workerinput"):  # before the workers start, which share the bytecode
        compileall.compile_dir(PROJECT / "workflow_scripts", quiet=2)  # copies of the project include the bytecode
        config.forks = tempfile.TemporaryDirectory(prefix="python-")
        forked_python.share(config.forks.name)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.forks.cleanup()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers, and before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group tests for `--dist loadgroup`: all tests on a finished run, or else the tests of one file.

    Slow runs also select the fuzzers, with more examples.
    """
    for item in items:
        if fuzzing.thorough and item.get_closest_marker("fuzz"):
            item.add_marker("slow")
        item.add_marker(pytest.mark.xdist_group("finished" if uses_finished_run(item) else item.path.stem))
    items.sort(key=sort_key)


def sort_key(item: pytest.Item) -> tuple[bool, int, bool]:
    """Return the sort key: the longest groups first, and tests that kill a finished run last in their group."""
    rank = LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG)
    return not uses_finished_run(item), rank, item.path.stem == "test_kill_and_resume"


def uses_finished_run(item: pytest.Item) -> bool:
    return bool(FINISHED & set(getattr(item, "fixturenames", ())))
