"""memory.csv of a training stage: its rows, after a kill and resume too, and the cost of sampling."""

import os
import threading
import time
from itertools import pairwise

import pytest

from dj2mgm.errors import InputError
from dj2mgm.monitoring.memory_files import GIB, LEADING_COLUMNS, CgroupMemory, read_memory_rows, start_file
from dj2mgm.monitoring.readings import (
    PAUSE_FACTOR,
    GpuMemory,
    MemorySampler,
    Reading,
    find_job_process,
    read_memory,
    warn_if_full,
)


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr("dj2mgm.monitoring.readings.INTERVAL_S", 0.01)
    monkeypatch.setattr("dj2mgm.monitoring.readings.PAUSE_FACTOR", 1)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def written(file) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def run(file, folder, resumed=False, phases=("loading", "training", "saving")) -> tuple[list[dict], dict | None]:
    sampler = MemorySampler(file, resumed)
    sampler.start()
    for phase in phases if sampler.sampling else ():
        sampler.phase = phase
        deadline = time.monotonic() + 60
        while f",{phase}," not in written(sampler.file) and time.monotonic() < deadline:
            time.sleep(0.01)
    record = sampler.finish(folder)
    path = folder / sampler.file.name
    return (read_memory_rows(path) if path.exists() else []), record


def test_a_stage_records_memory_by_phase(often, tmp_path):
    rows, record = run(tmp_path / "checkpoints/memory.csv", tmp_path)
    assert list(dict.fromkeys(row["phase"] for row in rows)) == ["loading", "training", "saving"]
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds) and seconds[-1] < 600  # seconds of the attempt, not since 1970
    assert all(0 < float(row["job_gib"]) <= float(row["host_gib"]) <= record["host_limit_gib"] for row in rows)


def test_resume_keeps_rows_of_killed_attempt(often, tmp_path):
    file = tmp_path / "checkpoints/memory.csv"
    first, _ = run(file, tmp_path)
    with open(file, "a") as cut_off:
        cut_off.write("1,2026-11")
    rows, _ = run(file, tmp_path, resumed=True)
    assert rows[: len(first)] == first
    assert {row["attempt"] for row in rows[len(first) :]} == {"2"}


def test_a_restarted_run_removes_old_rows(often, tmp_path):
    file = tmp_path / "checkpoints/memory.csv"
    file.parent.mkdir()
    file.write_text("attempt,job_gib\n7,1.0\n")
    rows, _ = run(file, tmp_path)
    assert {row["attempt"] for row in rows} == {"1"}


def test_other_gpus_after_a_resume_get_new_columns(tmp_path):
    file = tmp_path / "memory.csv"
    leading = ",".join(LEADING_COLUMNS)
    file.write_text(f"{leading},job_gib,gpu0_gib\n1,now,4.0,training,2.0,3.0\n")
    assert start_file(file, [*LEADING_COLUMNS, "job_gib", "gpu0_gib", "gpu1_gib"], resumed=True) == 2
    assert file.read_text() == f"{leading},job_gib,gpu0_gib,gpu1_gib\n1,now,4.0,training,2.0,3.0,\n"


def test_the_job_is_the_process_or_its_launcher(monkeypatch):
    """A single training process may have been started in a shell, which has other children."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    jobs = {}
    for processes in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", processes)
        jobs[processes] = find_job_process().pid
    assert jobs == {"1": os.getpid(), "2": os.getppid()}


@pytest.mark.parametrize(("rank", "local_rank", "file_name"), [("1", "1", None), ("4", "0", "memory-node7.csv")])
def test_the_first_process_of_each_node_samples(often, tmp_path, monkeypatch, rank, local_rank, file_name):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    rows, record = run(tmp_path / "memory.csv", tmp_path / "out")
    assert bool(rows) == (record is not None) == (file_name is not None)
    assert [path.name for path in tmp_path.glob("out/*")] == ([file_name] if file_name else [])


def test_a_slow_reading_is_followed_by_a_longer_pause(often, tmp_path, monkeypatch):
    took, rest = 0.005, 20
    read = read_memory
    readings = []

    def slow_read(process):
        readings.append(time.monotonic())
        time.sleep(took)
        return read(process)

    monkeypatch.setattr("dj2mgm.monitoring.readings.read_memory", slow_read)
    monkeypatch.setattr("dj2mgm.monitoring.readings.PAUSE_FACTOR", rest)
    sampler = MemorySampler(tmp_path / "memory.csv", resumed=False)
    sampler.start()
    deadline = time.monotonic() + 60
    while len(readings) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    sampler.finish(tmp_path / "out")
    _, *regular, _ = readings  # the first reading is for the columns, the last one at the end
    gaps = [later - earlier for earlier, later in pairwise(regular)]
    assert len(gaps) >= 2 and min(gaps) > rest * took and PAUSE_FACTOR > 100


def test_an_immediate_end_leaves_one_row_and_no_thread(often, tmp_path):
    rows, _ = run(tmp_path / "checkpoints/memory.csv", tmp_path, phases=())
    assert len(rows) >= 1
    assert "memory sampler" not in [thread.name for thread in threading.enumerate()]


def full(gpu: float, host: float, cgroup: float | None = None) -> Reading:
    """Return a machine with a GPU of 24 GiB and 64 GiB, in a control group of 32 GiB if its share is given."""
    group = None if cgroup is None else CgroupMemory(int(cgroup * 32 * GIB), 32 * GIB)
    gpus = [GpuMemory(0, int(gpu * 24 * GIB), 24 * GIB)]
    return Reading(GIB, int(host * 64 * GIB), 64 * GIB, group, gpus)


@pytest.mark.parametrize(
    ("reading", "warnings"),
    [
        (full(0.79, 0.69), []),
        (full(0.81, 0.69), ["GPU 0 is 81% full (19.4 of 24.0 GiB)"]),
        (full(0.5, 0.71), ["host memory is 71% full (limit 64.0 GiB"]),
        (full(0.5, 0.2, cgroup=0.75), ["host memory is 75% full (limit 32.0 GiB"]),
    ],
)
def test_nearly_full_memory_is_warned_about_once(capsys, reading, warnings):
    warned = set()
    for _ in range(3):
        warn_if_full(reading, warned)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(warnings)
    for line, text in zip(lines, warnings, strict=True):
        assert line.startswith(f"warning: {text}")


DAMAGED = {
    "nothing": "",
    "no rows": "attempt,time,seconds,phase,job_gib\n",
    "too few columns": "attempt,time,seconds,phase,job_gib\n1,now\n",
    "no number": "attempt,time,seconds,phase,job_gib\n1,now,x,training,1\n",
    "zeros": "attempt,time,seconds,phase,job_gib\n" + "\0" * 40 + "\n",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_an_error_that_training_survives(tmp_path, content, capsys):
    file = tmp_path / "memory.csv"
    file.write_text(content)
    with pytest.raises(InputError, match="memory.csv is damaged"):
        read_memory_rows(file)
    assert start_file(file, ["attempt", "time", "seconds", "phase", "job_gib"], resumed=True) == 1
    assert "is damaged" in capsys.readouterr().err
    assert file.read_text() == "attempt,time,seconds,phase,job_gib\n"
