"""Which commands take over from a killed Snakemake, and from which jobs; what they then do is in tests/workflow."""

import socket

import pytest

from errors import InputError
from settings.killed_runs import LOCKS, OWNER, at_work, jobs_in, note_owner, runs_jobs, take_over


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


def test_jobs_are_recognized_in_a_folder_whose_name_has_a_bar(squeue, tmp_path):
    folder = tmp_path / "a|b"
    squeue(f"printf '%s\\n' '17|{folder}|rule_pretrain'")
    assert jobs_in(folder) == ["17 (rule_pretrain)"]


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


BROKEN_NOTES = [
    "",
    "null",
    "[]",
    "7",
    "{}",
    '{"host": ',
    '{"host": 1, "pid": 1, "started": 1.0}',
    "\udcff",
    "[" * 100_000,
]
BROKEN_NOTES += [f'{{"host": "{socket.gethostname()}", {rest}}}' for rest in ('"pid": 1', '"pid": -1, "started": 1.0')]
BROKEN_NOTES += [f'{{"host": "{socket.gethostname()}", "pid": "1", "started": 1.0}}']


@pytest.mark.parametrize("note", BROKEN_NOTES, ids=lambda note: note[:40])
def test_a_broken_note_of_who_ran_here_is_no_note_and_a_lock_is_left_to_snakemake(tmp_path, monkeypatch, note):
    monkeypatch.chdir(tmp_path)
    (tmp_path / LOCKS).mkdir(parents=True)
    (tmp_path / OWNER).write_bytes(note.encode("utf-8", "surrogateescape"))
    take_over()
    assert not at_work()
    (tmp_path / LOCKS / "0.input.lock").touch()
    take_over()
    assert at_work() and (tmp_path / LOCKS / "0.input.lock").exists()


def test_the_note_of_who_runs_here_is_written_whole_and_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    note_owner(on_cluster=False)
    assert at_work() and [path.name for path in (tmp_path / OWNER).parent.iterdir()] == [OWNER.name]
    monkeypatch.setattr("json.dump", lambda *arguments, **options: arguments[1].write("{") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        note_owner(on_cluster=True)
    assert at_work(), "the note that was there"
