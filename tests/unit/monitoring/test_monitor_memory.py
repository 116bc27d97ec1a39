"""The memory monitor, started like from a shell, and its summary of a series of readings."""

import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from dj2mgm.monitoring.readings import summarize_readings
from paths import PROJECT

MONITOR = [sys.executable, str(PROJECT / "workflow_scripts/monitor_memory.py")]
HOUR = 3600


def start(*arguments: str) -> subprocess.Popen:
    # a test suite in the background ignores Control-C, which its child processes would inherit
    return subprocess.Popen(
        [*MONITOR, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def python(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code])


def test_once_shows_the_machine_and_reports_missing_gpus():
    printed, _ = start("--once").communicate(timeout=60)
    used, total = map(float, re.search(r"machine\s+│\s+([\d.]+) │\s+([\d.]+)", printed).groups())
    assert 0 < used < total
    assert "GPU" in printed


def test_a_process_tree_is_watched_until_it_ends():
    child = "import time; held = bytearray(300 << 20); time.sleep(6)"
    parent = python(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    printed, _ = start("--pid", str(parent.pid), "--interval", "0.5", "--analysis").communicate(timeout=60)
    lines = re.findall(r"^\d\d:\d\d:\d\d +([\d.]+)", printed, flags=re.MULTILINE)
    assert len(lines) >= 2 and 0.29 < max(map(float, lines)) < 0.6
    peak = float(re.search(r"process tree\s+│\s+[\d.]+ │\s+([\d.]+)", printed)[1])
    assert peak == pytest.approx(max(map(float, lines)), abs=0.011)
    parent.wait()


def test_control_c_shows_the_analysis():
    monitor = start("--interval", "0.2", "--analysis")
    for _ in range(4):
        assert monitor.stdout.readline()
    monitor.send_signal(signal.SIGINT)
    printed, complaint = monitor.communicate(timeout=60)
    assert re.search(r"machine\s+│", printed) and complaint == ""
    assert monitor.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pid", "4194305"], "error: --pid 4194305: there is no such process"),
        (["--interval", "0"], "error: --interval 0: expected a number of seconds above 0"),
    ],
)
def test_an_error_is_reported_in_one_line(arguments, message):
    monitor = start(*arguments)
    _, complaint = monitor.communicate(timeout=60)
    assert monitor.returncode == 2 and complaint.startswith(message) and complaint.count("\n") == 1


def test_a_leak_is_distinguished_from_noise_and_loading():
    rng = np.random.default_rng(0)
    times = np.arange(200) * 30.0
    noise = rng.normal(0, 0.05, len(times))
    leak = summarize_readings(times, 10 + 2 * times / HOUR + noise)
    assert leak.grows and leak.slope_per_hour == pytest.approx(2, abs=0.1)
    loading = summarize_readings(times, np.minimum(times / 600, 1) * 10 + noise)
    assert not loading.grows
    sawtooth = summarize_readings(times, 10 + (times % 300) / 300)
    assert not sawtooth.grows


def test_peak_and_mean_equal_those_of_the_values():
    summary = summarize_readings([0, 10, 20, 30], [1.0, 5.0, 2.0, 2.0])
    assert (summary.peak, summary.peak_seconds, summary.mean) == (5.0, 10.0, 2.5)
    assert summarize_readings([0], [3.0]).slope_per_hour == 0
