"""The workflow from another folder: as a module of another workflow, and with --directory."""

import subprocess

import pytest
from small_project import Project, copy_project

MODULE = """\
module dj2mgm:
    snakefile:
        {snakefile!r}
    config:
        config

use rule * from dj2mgm
"""
STAGES = ("make_dataset", "train_clip", "filter_data", "write_jsonl", "pretrain", "finetune", "compare_experiments")


def dry_run(project: Project, folder, *arguments: str) -> str:
    """What a dry run of `baseline` prints that is started in `folder`, which has no file of the workflow."""
    command = project.command("baseline", "--dry-run", *arguments)
    done = subprocess.run(command, cwd=folder, env=project.environment(), capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


def assert_whole(printed: str) -> None:
    table = printed.split("Job stats:")[1]
    assert all(f"\n{stage} " in table for stage in STAGES)


@pytest.fixture
def elsewhere(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def test_another_workflow_uses_it_as_a_module(tmp_path, elsewhere):
    project = copy_project(tmp_path / "project")
    snakefile = str(project.folder / "Snakefile")
    (elsewhere / "Snakefile").write_text(MODULE.format(snakefile=snakefile), encoding="utf-8")
    assert_whole(dry_run(project, elsewhere))


def test_it_runs_with_results_in_another_folder(tmp_path, elsewhere):
    project = copy_project(tmp_path / "project")
    snakefile = str(project.folder / "Snakefile")
    assert_whole(dry_run(project, elsewhere, "--snakefile", snakefile, "--directory", str(elsewhere)))
