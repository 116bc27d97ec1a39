"""The console output and the log of a failed stage end with a diagnosis."""

import pytest


def replace_stage(project, script, lines):
    (project.folder / "workflow_scripts" / script).write_text(lines, encoding="utf-8")


@pytest.mark.parametrize(
    ("lines", "title"),
    [
        ("import os; os.kill(os.getpid(), 9)", "Killed with signal 9"),
        ("open('images/1.png')", "A relative path leads nowhere"),
        pytest.param("raise KeyError('lm_head.weight')", "not known", marks=pytest.mark.slow),
    ],
    ids=["killed", "known", "unknown"],
)
def test_failed_stage_is_diagnosed_on_console_and_in_log(fresh, lines, title):
    replace_stage(fresh, "make_dataset.py", lines)
    printed = fresh.run("baseline", "--until", "make_dataset", ok=False)
    log = (fresh.folder / "results/datasets/small/make_dataset.log").read_text(encoding="utf-8")
    assert f"\ndiagnosis: {title}\n" in printed and f"\ndiagnosis: {title}\n" in log
    last = log.split("diagnosis: ")[1]
    assert last.index("cause:") < last.index("evidence:") < last.index("remedy:")


def test_a_command_prints_its_note_once(fresh):
    printed = fresh.run("leaderboard")
    assert printed.count("no experiment has finished yet") == 1 and "wrote results/leaderboard/leaderboard" in printed


def test_a_stage_inherits_the_openmp_wait_policy(fresh, monkeypatch):
    """The variable must be set before torch is imported."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    replace_stage(
        fresh, "make_dataset.py", "import os; print('turns:', os.getenv('GOMP_SPINCOUNT')); raise SystemExit(2)"
    )
    assert "turns: 300\n" in fresh.run("baseline", "--until", "make_dataset", ok=False)
