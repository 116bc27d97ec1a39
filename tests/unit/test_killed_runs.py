"""Which commands take over from a killed Snakemake, and from which jobs; what they then do is in tests/workflow."""

import pytest

from errors import InputError
from settings.killed_runs import jobs_in, runs_jobs


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Puts a stand-in for `squeue` on the PATH."""

    def write(script: str) -> None:
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return write


def test_jobs_of_other_folders_and_programs_are_left_alone(squeue, tmp_path):
    ours = f"17|{tmp_path}|rule_pretrain_wildcards_a"
    squeue(f"printf '%s\\n' '{ours}' '18|{tmp_path}|note | mine' 'second line' '19|/else|rule_x' '20|{tmp_path}|'")
    assert jobs_in(tmp_path) == ["17 (rule_pretrain_wildcards_a)"]


def test_a_slurm_that_does_not_answer_is_one_sentence(squeue, tmp_path):
    squeue("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(InputError, match="Unable to contact.*try again when squeue answers"):
        jobs_in(tmp_path)


@pytest.mark.parametrize(
    "flags", ["", "--cores 4", "-j 4 -k", "--profile profiles/slurm", "--config note=-n", "--unlock"]
)
def test_a_run_takes_over(flags):
    assert runs_jobs(["snakemake", "baseline", *flags.split()])


@pytest.mark.parametrize("flags", ["-n", "-np", "--dry-run", "--dryrun --quiet", "--summary", "--lint", "-c 4 -n"])
def test_a_look_at_what_there_is_to_do_ends_nobodys_training(flags):
    assert not runs_jobs(["snakemake", "baseline", *flags.split()])
