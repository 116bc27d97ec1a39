"""Console output of `snakemake` shows stages and their progress; everything else is in logs."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import time

from source_files import PAIR

DATASET = "results/datasets/small/summary.json"
NARROW = 34  # columns
FIRST = "Using workflow specific profile profiles/default for setting default command line arguments."


def test_the_console_shows_only_stages_and_their_times(fresh):
    """Snakemake's complete log is kept."""
    first, *lines = fresh.run(DATASET).splitlines()
    assert first == FIRST
    begin, end = lines
    assert begin == "[1/1] make_dataset small"
    assert re.fullmatch(r"\[1/1\] make_dataset small: done in [\d.]+ s", end)
    [log] = (fresh.folder / ".snakemake/log").iterdir()
    text = log.read_text(encoding="utf-8")
    assert "Shell command: python workflow_scripts/make_dataset.py" in text and "Job stats:" in text


def test_verbose_shows_all_that_snakemake_and_stages_print(fresh):
    printed = fresh.run(DATASET, "--verbose")
    log = (fresh.folder / "results/datasets/small/make_dataset.log").read_text(encoding="utf-8")
    assert "Job stats:" in printed and "Shell command: python workflow_scripts/make_dataset.py" in printed
    assert log.strip() and all(line in printed for line in log.splitlines())


def test_a_dry_run_is_a_summary_and_verbose_lists_the_jobs(fresh):
    command = fresh.command(DATASET, "--dry-run")
    process = subprocess.run(command, cwd=fresh.folder, env=fresh.environment(), capture_output=True, text=True)
    assert process.returncode == 0 and len((process.stdout + process.stderr).splitlines()) <= 15
    assert process.stderr.rstrip().endswith("`--verbose` lists all jobs with their commands.")
    printed = fresh.run(DATASET, "--dry-run", "--verbose")
    assert "Job stats:" in printed and "reason: Missing output files" in printed


def test_a_command_that_only_reads_works_during_a_run(fresh):
    (fresh.folder / ".snakemake").mkdir()
    with open(fresh.folder / ".snakemake/owner.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "snakemake <target>" in fresh.run("help")
        assert not (fresh.folder / ".snakemake/owner.json").exists()
        assert "another run is in progress" in fresh.run("check", ok=False), "it does not know what the run makes"
        note = {"host": "elsewhere", "pid": 1, "started": 1.0, "used_files": ["results/other"]}
        (fresh.folder / ".snakemake/owner.json").write_text(json.dumps(note))
        assert "Thumbnails and details" in fresh.run("check"), "the run makes other files"


def test_the_last_line_names_the_file_to_open(finished):
    printed = finished.run("baseline", "--forcerun", "compare_experiments")
    last = printed.splitlines()[-1]
    assert re.fullmatch(r"baseline: done in [\d.]+ s; open results/small/small/baseline/report/report.html", last)


def test_an_input_error_is_shown_once_without_a_diagnosis(fresh, tmp_path):
    (tmp_path / "captions.jsonl").write_text('{"id": "0", "text": "a", "images": []}\n')
    printed = fresh.run("baseline", "--until", "make_dataset", ok=False, config=(f"dataset={tmp_path}",))
    assert printed.count("'images' must contain") == 1
    assert "CalledProcessError" not in printed and "diagnosis:" not in printed
    assert "Its complete log: results/datasets/" in printed.split("'images' must contain")[1]


def test_a_recognized_folder_is_described_once(fresh):
    """File names cannot move the terminal's cursor."""
    (fresh.folder / "photos").mkdir()
    (fresh.folder / "photos/captions.jsonl").write_text(PAIR)
    (fresh.folder / "photos/a\x1b[2J.csv").write_text("name,size\n1,2\n")
    printed = fresh.run("baseline", "--until", "configure_dataset", config=("dataset=photos",))
    assert printed.count("recognized as pairs in Data-Juicer's format") == 1
    assert printed.count("is made for rendered scenes, and its scores on photos mean nothing") == 1
    assert "    file: photos/captions.jsonl\n    images: photos\nNot read: a\\x1b[2J.csv." in printed


def test_ctrl_c_shows_how_to_continue_and_no_failure(fresh):
    log = fresh.folder / "results/foundation/small/train_clip.log"
    process = subprocess.Popen(
        fresh.command("results/foundation/small/clip/model.safetensors"),
        cwd=fresh.folder,
        env=fresh.environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell starts background processes with this signal ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    printed = process.communicate()[1]
    assert "interrupted; the same command continues\n[1/1] train_clip small: stopped after" in printed
    assert process.returncode == 1 and not re.search("fail|error|log", printed.split("interrupted")[1], re.I)


def test_running_stages_are_updated_in_place_in_a_terminal(fresh):
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        fresh.command(DATASET),
        cwd=fresh.folder,
        env=fresh.environment() | {"TERM": "xterm-256color", "COLUMNS": str(NARROW), "NO_COLOR": ""},
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    output = b""
    try:
        while chunk := os.read(controller, 1 << 16):
            output += chunk
    except OSError:  # the other end of the terminal is closed
        pass
    assert process.wait() == 0
    lines = re.split(r"[\r\n]+", output.decode())
    plain_lines = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line) for line in lines]
    stage_lines = [line for line in plain_lines if line.startswith(("[1/1] make_dataset small", "0 of 1 stages"))]
    assert "[1/1] make_dataset small: running…" in stage_lines
    assert all(len(line) <= NARROW for line in stage_lines if "done in" not in line)
    assert any(line.startswith("0 of 1 stages done, ") for line in stage_lines)
    [end] = [line for line in lines if "make_dataset small: done in " in line]
    assert "\x1b[32m" in end, "a finished stage is green"
