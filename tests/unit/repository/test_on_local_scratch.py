"""profiles/slurm/on_local_scratch.sh without Slurm, with fakes of `snakemake` and `squeue` and the real rsync."""

import fcntl
import os
import shlex
import shutil
import subprocess

import pytest

from paths import PROJECT

SCRIPT = PROJECT / "profiles/slurm/on_local_scratch.sh"
pytestmark = pytest.mark.skipif(not shutil.which("rsync"), reason="needs rsync")


@pytest.fixture
def submit(tmp_path):
    """Run the script as a job; `does` is the fake Snakemake's shell code, and `queued` another job in the queue."""
    home, programs = tmp_path / "project [1]", tmp_path / "programs"
    home.mkdir()
    programs.mkdir()

    def program(name: str, text: str) -> None:
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)

    def run(does: str = "true", job: str = "7", queued: str = "") -> subprocess.CompletedProcess:
        program("snakemake", does)
        program("squeue", f'[[ "$*" == *--jobs={queued or "none"} ]] && echo {queued}')
        own = {"PATH": f"{programs}:{os.environ['PATH']}", "SCRATCH": str(tmp_path / "disk"), "SLURM_JOB_ID": job}
        own["LOCK_WAIT_S"] = "1"
        return subprocess.run(["bash", SCRIPT], cwd=home, env=os.environ | own, capture_output=True, text=True)

    run.home, run.program = home, program
    return run


def test_results_are_copied_back_and_scratch_is_removed(submit):
    done = submit("echo found > results/found; echo mine > .snakemake/owner.json")
    assert done.returncode == 0, done.stderr
    assert (submit.home / "results/found").read_text() == "found\n"
    assert sorted(path.name for path in submit.home.iterdir()) == [".snakemake", "results"]
    assert not (submit.home / ".snakemake/owner.json").exists()
    assert submit("echo half > results/half; exit 3").returncode == 3, "the status of Snakemake"
    assert (submit.home / "results/half").exists()


def test_failure_names_the_place_of_results_not_copied_back(submit):
    full = '[[ "${@: -1}" == *"/project [1]/" ]] && { echo "No space left" >&2; exit 11; }'
    submit.program("rsync", f'{full}; exec {shutil.which("rsync")} "$@"')
    done = submit("echo found > results/found")
    assert done.returncode == 1
    assert "results did not come back to" in done.stderr and "dj2mgm" in done.stderr


def test_second_job_is_refused_while_first_is_in_queue(submit):
    (submit.home / ".on_local_scratch").write_text("5\n")
    (submit.home / "results").mkdir()
    (submit.home / "results/of_the_first").touch()
    done = submit(queued="5")
    assert done.returncode == 1 and "job 5 is at work" in done.stderr
    assert (submit.home / "results/of_the_first").exists() and (submit.home / ".on_local_scratch").read_text() == "5\n"
    assert submit("rm results/of_the_first").returncode == 0  # the job was killed
    assert not (submit.home / "results/of_the_first").exists()
    (submit.home / ".on_local_scratch").write_text("7\n")
    assert submit(queued="7").returncode == 0, "Slurm has restarted this job"


def test_a_running_snakemake_in_the_project_is_respected(submit):
    lock = submit.home / ".snakemake/owner.lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = submit()
    assert done.returncode == 1 and "Snakemake is at work" in done.stderr
    assert not (submit.home / ".on_local_scratch").exists()
    assert submit().returncode == 0


def test_a_job_waits_until_a_killed_one_has_ended(submit):
    lock = submit.home / ".snakemake/owner.lock"
    lock.parent.mkdir(parents=True)
    with subprocess.Popen(["flock", lock, "sleep", "0.5"]) as killed:
        while subprocess.run(["flock", "--nonblock", lock, "true"]).returncode == 0:
            assert killed.poll() is None
        assert submit().returncode == 0


def test_a_killed_job_leaves_the_mark_of_the_next_one(submit):
    mark = submit.home / ".on_local_scratch"
    assert submit(f"echo 8 > {shlex.quote(str(mark))}").returncode == 0
    assert mark.read_text() == "8\n"


def test_another_clone_on_the_node_has_its_own_copy(submit, tmp_path):
    """Both clones run at the same time."""
    other = tmp_path / "project2"
    other.mkdir()
    second = f"cd {other} && SLURM_JOB_ID=8 bash {SCRIPT}"
    done = submit(f"[[ $SLURM_JOB_ID == 8 ]] && exec touch results/b; touch results/a; {second}")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (submit.home / "results").iterdir()] == ["a"]
    assert [path.name for path in (other / "results").iterdir()] == ["b"]
