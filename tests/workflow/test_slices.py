"""Deleting a feature is deleting its folders: the rest parses, plans and keeps its layers."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forked_snakemake import run_snakemake
from paths import PROJECT
from small_project import Project, copy_project

FEATURES = sorted(path.parent.name for path in (PROJECT / "workflow_scripts/dj2mgm/features").glob("*/__init__.py"))
QUICK = 2  # features that are deleted in quick tests; the others are in slow ones
SCRIPT = re.compile(r'"(\w+\.py)"')


def list_scripts(rules: Path) -> set[str]:
    return set(SCRIPT.findall(rules.read_text(encoding="utf-8"))) if rules.is_file() else set()


def delete_feature(project: Project, name: str) -> None:
    """Delete the folders of a feature, and the scripts that only its rules name or that import it."""
    rules = project.folder / "rules"
    own, *others = [rules / f"features/{name}.smk", *(path for path in rules.rglob("*.smk") if path.stem != name)]
    scripts = project.folder / "workflow_scripts"
    imports = f"dj2mgm.features.{name}."
    importing = {path.name for path in scripts.glob("*.py") if imports in path.read_text(encoding="utf-8")}
    for script in importing | list_scripts(own).difference(*map(list_scripts, others)):
        (scripts / script).unlink()
    own.unlink(missing_ok=True)  # a feature of operators has no rules
    shutil.rmtree(project.folder / "workflow_scripts/dj2mgm/features" / name)
    (project.folder / f"docs/features/{name}.md").unlink(missing_ok=True)


def run(project: Project, *command: str | Path) -> None:
    done = subprocess.run(
        command,
        cwd=project.folder,
        env=project.environment() | {"PYTHONPATH": str(project.folder / "workflow_scripts")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if number >= QUICK else []) for number, name in enumerate(FEATURES)],
)
def test_a_feature_can_be_deleted(tmp_path, name):
    project = copy_project(tmp_path)
    shutil.copytree(PROJECT / "docs", tmp_path / "docs")
    for file in ("pyproject.toml", "Makefile", "README.md"):
        shutil.copy(PROJECT / file, tmp_path)
    delete_feature(project, name)
    run(
        project, sys.executable, "workflow_scripts/tools/write_configuration.py"
    )  # config.yaml without the feature's keys
    run(project, Path(sys.executable).with_name("lint-imports"), "--no-cache")
    planned = run_snakemake(
        project.arguments("baseline", "dj_synth", "plan", "--dry-run", "--verbose", config=("model=tiny",)),
        tmp_path,
        project.environment(),
    )
    assert planned.returncode == 0, planned.stdout[-3000:] + planned.stderr
    assert "finetune" in planned.stdout and name not in planned.stdout.split()
