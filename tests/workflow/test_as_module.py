"""The workflow as a module of another workflow, and with --directory."""

import pytest

from forked_snakemake import run_snakemake
from small_project import Project, copy_project

MODULE = """\
module dj2mgm:
    snakefile:
        {snakefile!r}
    config:
        config

use rule * from dj2mgm
"""
RENAMED = """\
configfile: {config!r}

module dj2mgm:
    snakefile:
        {snakefile!r}
    config:
        config

use rule * from dj2mgm as dj2mgm_*
"""
STAGES = ("make_dataset", "train_clip", "filter_data", "write_jsonl", "pretrain", "finetune", "compare_experiments")


def dry_run(project: Project, folder, *arguments: str, target: str = "baseline", ok: bool = True) -> str:
    """Return the output of a dry run in `folder`, which has no files of the workflow."""
    process = run_snakemake(
        project.arguments(target, "--dry-run", *arguments, *(["--verbose"] if ok else [])),
        folder,
        project.environment(),
    )
    assert (process.returncode == 0) == ok, (process.stdout + process.stderr)[-2000:]
    return process.stdout + process.stderr


def assert_complete(output: str) -> None:
    table = output.split("Job stats:")[1]
    assert all(f"\n{stage} " in table for stage in STAGES)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    return copy_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def elsewhere(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def test_another_workflow_can_use_it_as_a_module(project, elsewhere):
    snakefile = str(project.folder / "Snakefile")
    (elsewhere / "Snakefile").write_text(MODULE.format(snakefile=snakefile), encoding="utf-8")
    assert_complete(dry_run(project, elsewhere))


def test_rules_can_have_a_prefix_and_share_the_config(project, elsewhere):
    paths = {"snakefile": str(project.folder / "Snakefile"), "config": str(project.folder / "config/config.yaml")}
    (elsewhere / "Snakefile").write_text(RENAMED.format(**paths), encoding="utf-8")
    printed = dry_run(project, elsewhere, target="dj2mgm_dj_synth")
    assert "rule dj2mgm_synthesize_captions:" in printed, "the defaults do not win over the experiment"
    assert "localrules directive" not in printed
    printed = dry_run(project, elsewhere, target="dj2mgm_dj_sinth", ok=False)
    assert "did you mean dj2mgm_dj_synth?" in printed


def test_a_prefix_of_paths_is_refused(project, elsewhere):
    module = MODULE.format(snakefile=str(project.folder / "Snakefile")).replace(
        "\n\nuse", '\n    prefix:\n        "sub"\n\nuse'
    )
    (elsewhere / "Snakefile").write_text(module, encoding="utf-8")
    printed = dry_run(project, elsewhere, ok=False)
    assert "module: dj2mgm takes no `prefix` of paths" in printed and "Traceback" not in printed


def test_results_can_be_in_another_folder(project, elsewhere):
    snakefile = str(project.folder / "Snakefile")
    assert_complete(dry_run(project, elsewhere, "--snakefile", snakefile, "--directory", str(elsewhere)))
