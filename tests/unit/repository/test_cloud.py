"""Files for rented machines are accepted by their services' libraries, and results outlive a machine."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from paths import PROJECT

CLOUD = PROJECT / "cloud"
CONFIG = "model=qwen3-vl-2b dataset=llava-pretrain"
SNAKEMAKE = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
echo $# >> words
if [ "$1" = fetch ]; then exit; fi
cat results/checkpoint 2> /dev/null >> "$CALLS"
echo step-1 > results/checkpoint
touch -d 2001-02-03 results/checkpoint
ln -s checkpoint results/link
sleep "$WORK"
exit 3
"""


@pytest.fixture
def machine(tmp_path):
    """Return a function that starts run.sh in a new folder, with a stand-in for Snakemake."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/snakemake"
    program.write_text(SNAKEMAKE)
    program.chmod(0o755)

    def start(name: str, work: float, config: str = CONFIG) -> tuple[subprocess.Popen, Path]:
        here = tmp_path / name
        here.mkdir()
        variables = {
            "WORK": str(work),
            "SAVE_SECONDS": "0.2",
            "CONFIG": config,
            "CALLS": str(tmp_path / name / "calls"),
        }
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        command = [CLOUD / "run.sh", tmp_path / "kept", "baseline"]
        environment = os.environ | variables | {"PATH": path}
        return subprocess.Popen(command, cwd=here, env=environment, start_new_session=True), here

    return start


def test_results_outlive_a_preempted_machine(machine, tmp_path):
    first, here = machine("first", work=60)
    marker, limit = tmp_path / "kept/latest", time.monotonic() + 30
    while not marker.is_file() and time.monotonic() < limit:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    calls = [f"fetch --config {CONFIG}", f"--cores all baseline --config {CONFIG}"]
    assert (here / "calls").read_text().splitlines() == calls

    second, here = machine("second", work=0)
    assert second.wait(30) == 3, "the status is that of Snakemake"
    assert (here / "calls").read_text().splitlines() == [*calls, "step-1"]
    assert (here / "results/link").is_symlink()
    before = marker.read_text()
    third, here = machine("third", work=0)
    third.wait(30)
    assert marker.read_text() != before, "packs have two names in turn"
    assert (here / "results/checkpoint").stat().st_mtime == time.mktime((2001, 2, 3, 0, 0, 0, 0, 0, -1))


def test_quoted_values_may_contain_blanks(machine, tmp_path):
    values = ["model=tiny", 'synth={epochs: 2, x: "a b"}', "description=$(touch ran) `touch ran`"]
    job, here = machine("quoted", work=0, config=shlex.join(values))
    job.wait(30)
    assert (here / "calls").read_text().splitlines()[0] == f"fetch --config {' '.join(values)}"
    assert (here / "words").read_text().splitlines()[0] == str(2 + len(values)) and not (here / "ran").exists()
    job, here = machine("open", work=0, config="model=tiny 'synth={epochs: 2}")
    assert job.wait(30) == 2 and not (here / "calls").exists()


def test_hugging_faces_library_accepts_the_job():
    variables = {"IMAGE": "registry.example.org/dj2mgm:latest", "SOURCE": "https://git.example.org/me/dj2mgm"}
    environment = os.environ | variables | {"CONFIG": CONFIG, "HF_TOKEN": "hf_abc", "COLUMNS": "300"}
    command = [CLOUD / "hf_jobs.sh", "--dry-run", "baseline", "dj_synth"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  "))
    assert (lines["image"], lines["flavor"], lines["timeout"]) == (variables["IMAGE"], "l4x1", "4h")
    assert lines["env"] == f"CONFIG={CONFIG}" and lines["volumes"] == "hf://buckets/dj2mgm-results:/kept"
    assert (
        lines["command"].endswith(f"{variables['SOURCE']} baseline dj_synth")
        and "cloud/run.sh /kept" in lines["command"]
    )


def test_skypilot_accepts_the_spot_job(tmp_path, monkeypatch):
    values = yaml.safe_load((CLOUD / "skypilot.yaml").read_text(encoding="utf-8"))
    assert values["run"].endswith("cloud/run.sh /kept $TARGETS\n") and "/kept" in values["file_mounts"]
    for script in CLOUD.glob("*.sh"):
        assert subprocess.run(["bash", "-n", script]).returncode == 0 and os.access(script, os.X_OK)
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed")
    task = sky.Task.from_yaml(str(CLOUD / "skypilot.yaml"))
    assert all(resources.use_spot for resources in task.resources) and task.storage_mounts.keys() == {"/kept"}
