"""Puts the workflow's library on the path, as running a script does, and shares tests out among processes."""

import sys

import pytest
from places import PROJECT

sys.path.insert(0, str(PROJECT / "workflow_scripts"))

import dj2mgm  # noqa: E402, F401  (before a test imports torch)

FINISHED = {"finished", "synthesized"}  # fixtures of tests/workflow: finished runs of the small project


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `--dist loadgroup`: tests on a finished run, which comes first; otherwise those of a file."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("finished" if on_finished_run(item) else item.path.stem))
    items.sort(key=lambda item: (not on_finished_run(item), item.path.stem == "test_kill_and_resume"))


def on_finished_run(item: pytest.Item) -> bool:
    return bool(FINISHED & set(getattr(item, "fixturenames", ())))
