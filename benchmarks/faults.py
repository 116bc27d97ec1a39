"""Kill the workflow at random moments, and check that the same command loses no rows and repeats no stage.

    python benchmarks/faults.py                              # every kind of kill, ten times: hours
    python benchmarks/faults.py --kill scancel --times 2     # some of them

The small project of the tests runs once undisturbed. Each trial starts from a random moment of that run: a stage is
drawn with a probability proportional to its duration, the files of this and all later stages are removed, and the kill
happens when the stage has run for a random part of its duration. If Snakemake ends, the same command is run again. The
results are then compared with the undisturbed run's results. Each trial is a line of `trials.jsonl` in the folder, and
is not repeated when the benchmark is run again. The table of docs/measurements/reliability.md is printed. Kills on a
cluster have the requirements of tests/slurm.
"""

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil

PROJECT = Path(__file__).resolve().parents[1]
for library in ("workflow_scripts", "tests/support", "tests/workflow"):
    sys.path.insert(0, str(PROJECT / library))

from safetensors.torch import load_file  # noqa: E402
from test_kill_and_resume import CANCELLED  # noqa: E402

from cluster_runs import SLURM_PROFILE, ClusterRun, completed, end_at_time_limit, fail_node  # noqa: E402
from dj2mgm.storage.files import read_json, read_jsonl  # noqa: E402
from one_machine_slurm import running_slurm, slurm, wait_until, why_not  # noqa: E402
from small_project import Project, copy_project  # noqa: E402

TARGET = "baseline"
SAVE_STEPS = 5  # save_steps of tests/fixtures/small/models_small.yaml
TIMEOUT_S = 1800
# the folder of each rule in results/, in an order in which no rule comes before its inputs
STAGES = {
    "make_dataset": "datasets/small",
    "train_clip": "foundation/small/clip",
    "train_language_model": "foundation/small/language_model",
    "assemble_model": "models/small/mgm",
    "filter_data": "small/small/baseline/filter",
    "write_jsonl": "small/small/baseline/jsonl",
    "pretrain": "small/small/baseline/pretrain",
    "finetune": "small/small/baseline/finetune",
    "generate_answers": "small/small/baseline/generate",
    "evaluate_clip": "small/small/baseline/evaluate_clip",
    "evaluate_vqa": "small/small/baseline/evaluate_vqa",
    "write_explorers": "small/small/baseline/report",
    "compare_experiments": "small/small/baseline/report",
}


@dataclass(frozen=True)
class Kill:
    """A kind of kill; `do` kills, and receives the run and the running rule."""

    on_slurm: bool
    do: Callable[[ClusterRun, str], None]


KILLS = {
    "stage": Kill(False, lambda run, rule: run.kill_stages()),
    "snakemake": Kill(False, lambda run, rule: run.kill()),
    "snakemake with jobs in Slurm": Kill(True, lambda run, rule: run.kill()),
    "scancel": Kill(True, lambda run, rule: slurm("scancel", run.running_job(rule))),
    "node": Kill(True, lambda run, rule: fail_node()),
    "time limit": Kill(True, lambda run, rule: end_at_time_limit(run.running_job(rule))),
    "memory": Kill(True, lambda run, rule: None),  # killed because run_trial requests too little memory
}


class UndisturbedRun:
    """The undisturbed run, and copies of it at the same path, because training files contain absolute paths."""

    def __init__(self, folder: Path):
        self.finished, self.project = folder / "finished", Project(folder / "project")

    def prepare(self) -> None:
        if not self.finished.exists():
            shutil.rmtree(self.project.folder, ignore_errors=True)
            copy_project(self.project.folder).run(TARGET)
            self.project.folder.rename(self.finished)

    def restore(self) -> None:
        shutil.rmtree(self.project.folder, ignore_errors=True)
        shutil.copytree(self.finished, self.project.folder, symlinks=True)

    def benchmark(self, rule: str, column: str) -> float:
        [path] = self.finished.glob(f"results/**/{rule}.benchmark.tsv")
        names, values = (line.split("\t") for line in path.read_text().splitlines())
        return float(dict(zip(names, values, strict=True))[column])


def measure_durations(undisturbed: UndisturbedRun, trials: list[dict]) -> dict[str, float]:
    """Return the fewest measured seconds of each stage, because other work on the machine can only slow it down."""
    measurements = {rule: [undisturbed.benchmark(rule, "s")] for rule in STAGES}
    for trial in trials:
        if not trial["struck"] and "lasted_s" in trial:
            measurements[trial["stage"]].append(trial["lasted_s"])
    return {rule: min(seconds) for rule, seconds in measurements.items()}


def run_trial(undisturbed: UndisturbedRun, kill: str, trial: int, seconds: dict[str, float]) -> dict:
    """Kill once, run the command again, and return the result."""
    generator = random.Random(f"{kill} {trial}")
    rule = generator.choices(list(STAGES), weights=[seconds[rule] for rule in STAGES])[0]
    share = generator.random()
    kill_after_s = 0.0 if kill == "memory" else share * seconds[rule]  # Slurm kills when the memory is used up
    undisturbed.restore()
    repeated = list(STAGES)[list(STAGES).index(rule) :]
    for later_rule in repeated:
        shutil.rmtree(undisturbed.project.result(STAGES[later_rule], ""), ignore_errors=True)
    arguments = SLURM_PROFILE if KILLS[kill].on_slurm else ()
    if kill == "memory":
        arguments += (
            "--set-resources",
            f"{rule}:mem_mb={choose_insufficient_mb(undisturbed, rule, share)}*(attempt+1)//2",
        )
    run = ClusterRun(undisturbed.project, (TARGET, *arguments))
    earlier_jobs = {job["JobId"] for job in run.all_jobs()} if KILLS[kill].on_slurm else set()

    run.start()
    seconds_run = wait_for_command(run, rule, kill_after_s)
    if seconds_run < kill_after_s:
        stop(run)
        return {"kill": kill, "trial": trial, "stage": rule, "struck": False, "lasted_s": round(seconds_run, 1)}
    KILLS[kill].do(run, rule)
    commands = 1
    while not wait_for_success(run) and commands < 3:
        run.start()
        commands += 1
    jobs = [job for job in run.all_jobs() if job["JobId"] not in earlier_jobs] if KILLS[kill].on_slurm else []
    succeeded = run.process.returncode == 0 and not undisturbed.project.job_counts(TARGET)
    result = {
        "kill": kill,
        "trial": trial,
        "stage": rule,
        "moment_s": round(kill_after_s, 1),
        "struck": kill != "memory" or any(job["JobState"] == "FAILED" for job in jobs),
        "commands": commands,
        "ended_right": succeeded,
        "lost": find_missing_files(undisturbed),
        "done_twice": count_repeated_rules(run, jobs, repeated),
    }
    if not succeeded:
        return result
    return result | {
        "largest_difference_of_weights": compare_weights(undisturbed, rule),
        "steps_trained_again": count_repeated_steps(run, repeated, KILLS[kill].on_slurm),
    }


def wait_for_success(run: ClusterRun) -> bool:
    """Return whether Snakemake succeeds; if it hangs, end it and its stages."""
    try:
        return run.process.wait(TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        stop(run)
        return False


def choose_insufficient_mb(undisturbed: UndisturbedRun, rule: str, share: float) -> int:
    """Return memory (MB) that is too small for the rule, except at the last attempt, which has 2.5 times as much."""
    peak_mb = max(250, undisturbed.benchmark(rule, "max_rss"))  # the peak of short stages is rarely measured
    snakemake_mb = 120  # Snakemake runs in the same job
    return int((peak_mb + snakemake_mb) * (0.5 + 0.3 * share))


def find_start(run: ClusterRun, rule: str) -> float | None:
    """Return when the rule's command started, in seconds since the epoch; None if it is not running."""
    script, start_times = f"workflow_scripts/{rule}.py", []
    for process in psutil.process_iter(["cmdline", "cwd", "create_time"]):
        command = process.info["cmdline"] or []
        # Snakemake's own processes have the script in their command too, as an input
        if process.info["cwd"] == str(run.project.folder) and script in command and "snakemake" not in command:
            start_times.append(process.info["create_time"])
    return min(start_times, default=None)


def wait_for_command(run: ClusterRun, rule: str, seconds: float) -> float:
    """Wait until the rule's command has run for `seconds`, or has ended; return the seconds that it ran."""
    deadline = time.monotonic() + TIMEOUT_S
    while (start_time := find_start(run, rule)) is None:
        assert run.process.poll() is None, run.printed()[-3000:]
        assert time.monotonic() < deadline, f"{rule} was never started"
        time.sleep(0.2)
    while find_start(run, rule) and time.time() - start_time < seconds:
        time.sleep(0.2)
    return time.time() - start_time


def stop(run: ClusterRun) -> None:
    """Stop a run whose stage ended before the kill."""
    run.kill_stages()
    run.kill()
    if set(SLURM_PROFILE) <= set(run.arguments):
        jobs = [job["JobId"] for job in run.all_jobs() if job["JobState"] in ("PENDING", "RUNNING")]
        slurm("scancel", *jobs)
        wait_until(lambda: not slurm("squeue", "--noheader", "--format=%i", f"--jobs={','.join(jobs)}"), "scancel")


def find_missing_files(undisturbed: UndisturbedRun) -> list[str]:
    """Return result files that are missing, or whose rows or steps differ from the undisturbed run's."""
    missing_files = []
    for expected in sorted(undisturbed.finished.glob("results/**/*")):
        name = expected.relative_to(undisturbed.finished)
        file = undisturbed.project.folder / name
        if expected.is_dir() or "tensorboard" in name.parts:
            continue
        if not file.is_file() or (expected.suffix == ".jsonl" and read_row_ids(expected) != read_row_ids(file)):
            missing_files.append(str(name))
    return missing_files


def read_row_ids(path: Path) -> list:
    return [row.get("id", row.get("step")) for row in read_jsonl(path)]


def compare_weights(undisturbed: UndisturbedRun, rule: str) -> float:
    """Return the largest difference between weights of the killed stage and of the undisturbed run."""
    largest = 0.0
    for path in (undisturbed.finished / "results" / STAGES[rule]).rglob("*.safetensors"):
        weights = load_file(undisturbed.project.folder / path.relative_to(undisturbed.finished))
        for name, expected in load_file(path).items():
            if name not in CANCELLED:
                largest = max(largest, (expected.float() - weights[name].float()).abs().max().item())
    return largest


def count_repeated_rules(run: ClusterRun, jobs: list[dict], repeated: list[str]) -> dict[str, int]:
    """Return rules that were completed more often than expected: repeated rules once, other rules never."""
    if jobs:
        completions = completed(jobs)
    else:
        completions = Counter(re.findall(r"^Finished jobid: \d+ \(Rule: (\w+)\)", run.printed(), flags=re.MULTILINE))
    return {rule: count for rule, count in completions.items() if rule in STAGES and count > (rule in repeated)}


def count_repeated_steps(run: ClusterRun, repeated: list[str], on_slurm: bool) -> int:
    """Return the number of optimizer steps in addition to the steps of an undisturbed training."""
    trainings = [rule for rule in ("pretrain", "finetune") if rule in repeated]
    log = "".join(run.logs(rule, "baseline") for rule in trainings) if on_slurm else run.printed()
    log = re.sub(r"^Logfile .*:\n(=+)\n.*?\n\1$", "", log, flags=re.MULTILINE | re.DOTALL)  # repeated logs
    steps = len(re.findall(r"^step \d+/\d+  loss ", log, flags=re.MULTILINE))
    return steps - sum(read_json(run.project.result(rule) / "metrics.json")["steps"] for rule in trainings)


def print_table(trials: list[dict]) -> None:
    print("| kill | trials | in stages | ended right | rows, steps or files lost | done twice | steps trained again |")
    print("|---|---|---|---|---|---|---|")
    for kill in KILLS:
        selected = [trial for trial in trials if trial["kill"] == kill and trial["struck"]]
        if not selected:
            continue
        stages = ", ".join(f"{stage} {count}" for stage, count in Counter(trial["stage"] for trial in selected).items())
        succeeded = sum(trial["ended_right"] for trial in selected)
        missing, twice = (sum(bool(trial[key]) for trial in selected) for key in ("lost", "done_twice"))
        steps = max((trial["steps_trained_again"] for trial in selected if trial["ended_right"]), default="–")
        print(f"| {kill} | {len(selected)} | {stages} | {succeeded} | {missing} | {twice} | at most {steps} |")
    too_late = sum(not trial["struck"] for trial in trials)
    print(f"\n{too_late} further trials are left out, because the stage ended before the kill.")


@contextmanager
def slurm_if_needed(kills: list[str]) -> Iterator[None]:
    if not any(KILLS[kill].on_slurm for kill in kills):
        yield
        return
    if reason := why_not():
        sys.exit(f"kills on a cluster: {reason}")
    with tempfile.TemporaryDirectory() as folder, running_slurm(Path(folder)):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", choices=KILLS, action="append", help="default: all")
    parser.add_argument("--times", type=int, default=10, help="successful kills of each kind")
    parser.add_argument("--folder", type=Path, default=PROJECT / "results/faults", help="folder of the trials")
    arguments = parser.parse_args()
    kills = arguments.kill or list(KILLS)
    undisturbed, record = UndisturbedRun(arguments.folder.resolve()), arguments.folder / "trials.jsonl"
    undisturbed.prepare()
    record.touch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that Slurm is ended, too
    with slurm_if_needed(kills):
        for times, kill in product(range(1, arguments.times + 1), kills):  # kinds alternate, in case of an early stop
            trials = [trial for trial in read_jsonl(record) if trial["kill"] == kill]
            while sum(trial["struck"] for trial in trials) < times:
                seconds = measure_durations(undisturbed, list(read_jsonl(record)))
                trials.append(run_trial(undisturbed, kill, len(trials), seconds))
                print(json.dumps(trials[-1]), flush=True)
                with open(record, "a", encoding="utf-8") as file:
                    file.write(json.dumps(trials[-1]) + "\n")
    print_table(list(read_jsonl(record)))


if __name__ == "__main__":
    main()
