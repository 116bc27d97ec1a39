"""Which commands take over from a Snakemake that was killed; what they then do is in tests/workflow."""

import pytest

from settings.killed_runs import runs_jobs


@pytest.mark.parametrize(
    "flags", ["", "--cores 4", "-j 4 -k", "--profile profiles/slurm", "--config note=-n", "--unlock"]
)
def test_a_run_takes_over(flags):
    assert runs_jobs(["snakemake", "baseline", *flags.split()])


@pytest.mark.parametrize("flags", ["-n", "-np", "--dry-run", "--dryrun --quiet", "--summary", "--lint", "-c 4 -n"])
def test_a_look_at_what_there_is_to_do_ends_nobodys_training(flags):
    assert not runs_jobs(["snakemake", "baseline", *flags.split()])
