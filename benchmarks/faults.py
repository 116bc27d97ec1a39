"""Kill the workflow at random moments, and check that the same command loses no rows and repeats no stage.

    python benchmarks/faults.py                              # every kind of kill, ten times: hours
    python benchmarks/faults.py --kill scancel --times 2     # some of them

The small project of the tests runs once undisturbed. Each trial starts from a random moment of that run: a stage is
drawn with a probability proportional to its duration, the files of this and all later stages are removed, and the kill
happens when the stage has run for a random part of its duration. If Snakemake ends, the same command is run again. The
results are then compared with those of the undisturbed run. Each trial is a line of `trials.jsonl` in the folder, and
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
    "filter_data": "baseline/filter",
    "write_jsonl": "baseline/jsonl",
    "pretrain": "baseline/pretrain",
    "finetune": "baseline/finetune",
    "generate_answers": "baseline/generate",
    "evaluate_clip": "baseline/evaluate_clip",
    "evaluate_vqa": "baseline/evaluate_vqa",
    "compare_experiments": "baseline/report",
}


@dataclass(frozen=True)
class Kill:
    """A kind of kill; `do` gets the run and the running rule."""

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
    """The undisturbed run, and copies of it at the same path, because training files hold absolute paths."""

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


def durations(reference: UndisturbedRun, trials: list[dict]) -> dict[str, float]:
    """Return the least measured seconds of each stage, because other work on the machine only adds to them."""
    seen = {rule: [reference.benchmark(rule, "s")] for rule in STAGES}
    for trial in trials:
        if not trial["struck"] and "lasted_s" in trial:
            seen[trial["stage"]].append(trial["lasted_s"])
    return {rule: min(seconds) for rule, seconds in seen.items()}


def run_trial(reference: UndisturbedRun, kill: str, trial: int, seconds: dict[str, float]) -> dict:
    """Kill once, run the command again, and return the result."""
    generator = random.Random(f"{kill} {trial}")
    rule = generator.choices(list(STAGES), weights=[seconds[rule] for rule in STAGES])[0]
    part = generator.random()
    moment = 0.0 if kill == "memory" else part * seconds[rule]  # Slurm kills when the memory is used up
    reference.restore()
    repeated = list(STAGES)[list(STAGES).index(rule) :]
    for later in repeated:
        shutil.rmtree(reference.project.result(STAGES[later], ""), ignore_errors=True)
    arguments = SLURM_PROFILE if KILLS[kill].on_slurm else ()
    if kill == "memory":
        arguments += ("--set-resources", f"{rule}:mem_mb={too_little(reference, rule, part)}*(attempt+1)//2")
    run = ClusterRun(reference.project, (TARGET, *arguments))
    known = {job["JobId"] for job in run.all_jobs()} if KILLS[kill].on_slurm else set()

    run.start()
    lasted = wait_until_at_work(run, rule, moment)
    if lasted < moment:
        end(run)
        return {"kill": kill, "trial": trial, "stage": rule, "struck": False, "lasted_s": round(lasted, 1)}
    KILLS[kill].do(run, rule)
    commands = 1
    while not ends(run) and commands < 3:
        run.start()
        commands += 1
    jobs = [job for job in run.all_jobs() if job["JobId"] not in known] if KILLS[kill].on_slurm else []
    ended_right = run.process.returncode == 0 and not reference.project.job_counts(TARGET)
    found = {
        "kill": kill,
        "trial": trial,
        "stage": rule,
        "moment_s": round(moment, 1),
        "struck": kill != "memory" or any(job["JobState"] == "FAILED" for job in jobs),
        "commands": commands,
        "ended_right": ended_right,
        "lost": lost(reference),
        "done_twice": done_twice(run, jobs, repeated),
    }
    if not ended_right:
        return found
    return found | {
        "largest_difference_of_weights": weights_differ(reference, rule),
        "steps_trained_again": steps_trained_again(run, repeated, KILLS[kill].on_slurm),
    }


def ends(run: ClusterRun) -> bool:
    """Return whether Snakemake succeeds; if it hangs, end it and its stages."""
    try:
        return run.process.wait(TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        end(run)
        return False


def too_little(reference: UndisturbedRun, rule: str, part: float) -> int:
    """Return memory (MB) that is too small for the rule, except at the last attempt, which gets 2.5 times as much."""
    peak_mb = max(250, reference.benchmark(rule, "max_rss"))  # the peak of short stages is rarely measured
    snakemake_mb = 120  # in the same job
    return int((peak_mb + snakemake_mb) * (0.5 + 0.3 * part))


def at_work(run: ClusterRun, rule: str) -> float | None:
    """Return when the rule's command started, in seconds since the epoch; None if it is not running."""
    script, started = f"workflow_scripts/{rule}.py", []
    for process in psutil.process_iter(["cmdline", "cwd", "create_time"]):
        command = process.info["cmdline"] or []
        # Snakemake's own processes have the script in their command too, as an input
        if process.info["cwd"] == str(run.project.folder) and script in command and "snakemake" not in command:
            started.append(process.info["create_time"])
    return min(started, default=None)


def wait_until_at_work(run: ClusterRun, rule: str, seconds: float) -> float:
    """Wait until the rule's command has run for `seconds`, or has ended; return for how long it ran."""
    deadline = time.monotonic() + TIMEOUT_S
    while (started := at_work(run, rule)) is None:
        assert run.process.poll() is None, run.printed()[-3000:]
        assert time.monotonic() < deadline, f"{rule} was never started"
        time.sleep(0.2)
    while at_work(run, rule) and time.time() - started < seconds:
        time.sleep(0.2)
    return time.time() - started


def end(run: ClusterRun) -> None:
    """Stop a run whose stage ended before the kill."""
    run.kill_stages()
    run.kill()
    if set(SLURM_PROFILE) <= set(run.arguments):
        jobs = [job["JobId"] for job in run.all_jobs() if job["JobState"] in ("PENDING", "RUNNING")]
        slurm("scancel", *jobs)
        wait_until(lambda: not slurm("squeue", "--noheader", "--format=%i", f"--jobs={','.join(jobs)}"), "scancel")


def lost(reference: UndisturbedRun) -> list[str]:
    """Return result files that are missing, or whose rows or steps differ from the undisturbed run's."""
    wrong = []
    for path in sorted(reference.finished.glob("results/**/*")):
        name = path.relative_to(reference.finished)
        own = reference.project.folder / name
        if path.is_dir() or "tensorboard" in name.parts:
            continue
        if not own.is_file() or (path.suffix == ".jsonl" and rows(path) != rows(own)):
            wrong.append(str(name))
    return wrong


def rows(path: Path) -> list:
    return [row.get("id", row.get("step")) for row in read_jsonl(path)]


def weights_differ(reference: UndisturbedRun, rule: str) -> float:
    """Return the largest difference between weights of the killed stage and of the undisturbed run."""
    largest = 0.0
    for path in (reference.finished / "results" / STAGES[rule]).rglob("*.safetensors"):
        own = load_file(reference.project.folder / path.relative_to(reference.finished))
        for name, weight in load_file(path).items():
            if name not in CANCELLED:
                largest = max(largest, (weight.float() - own[name].float()).abs().max().item())
    return largest


def done_twice(run: ClusterRun, jobs: list[dict], repeated: list[str]) -> dict[str, int]:
    """Return rules that ended more often than expected, which is once for repeated rules and never for others."""
    if jobs:
        ends = completed(jobs)
    else:
        ends = Counter(re.findall(r"^Finished jobid: \d+ \(Rule: (\w+)\)", run.printed(), flags=re.MULTILINE))
    return {rule: count for rule, count in ends.items() if rule in STAGES and count > (rule in repeated)}


def steps_trained_again(run: ClusterRun, repeated: list[str], on_slurm: bool) -> int:
    """Return the number of optimizer steps in addition to those of an undisturbed training."""
    training = [rule for rule in ("pretrain", "finetune") if rule in repeated]
    printed = "".join(run.logs(rule, "baseline") for rule in training) if on_slurm else run.printed()
    printed = re.sub(r"^Logfile .*:\n(=+)\n.*?\n\1$", "", printed, flags=re.MULTILINE | re.DOTALL)  # repeated logs
    taken = len(re.findall(r"^step \d+/\d+  loss ", printed, flags=re.MULTILINE))
    return taken - sum(read_json(run.project.result(rule) / "metrics.json")["steps"] for rule in training)


def print_table(trials: list[dict]) -> None:
    print("| kill | trials | in stages | ended right | rows, steps or files lost | done twice | steps trained again |")
    print("|---|---|---|---|---|---|---|")
    for kill in KILLS:
        own = [trial for trial in trials if trial["kill"] == kill and trial["struck"]]
        if not own:
            continue
        stages = ", ".join(f"{stage} {count}" for stage, count in Counter(trial["stage"] for trial in own).items())
        right = sum(trial["ended_right"] for trial in own)
        missing, twice = (sum(bool(trial[key]) for trial in own) for key in ("lost", "done_twice"))
        again = max((trial["steps_trained_again"] for trial in own if trial["ended_right"]), default="–")
        print(f"| {kill} | {len(own)} | {stages} | {right} | {missing} | {twice} | at most {again} |")
    missed = sum(not trial["struck"] for trial in trials)
    print(f"\n{missed} further trials are left out, because the stage ended before the kill.")


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
    reference, record = UndisturbedRun(arguments.folder.resolve()), arguments.folder / "trials.jsonl"
    reference.prepare()
    record.touch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that Slurm is ended, too
    with slurm_if_needed(kills):
        for times, kill in product(range(1, arguments.times + 1), kills):  # kinds alternate, in case of an early stop
            trials = [trial for trial in read_jsonl(record) if trial["kill"] == kill]
            while sum(trial["struck"] for trial in trials) < times:
                seconds = durations(reference, list(read_jsonl(record)))
                trials.append(run_trial(reference, kill, len(trials), seconds))
                print(json.dumps(trials[-1]), flush=True)
                with open(record, "a", encoding="utf-8") as file:
                    file.write(json.dumps(trials[-1]) + "\n")
    print_table(list(read_jsonl(record)))


if __name__ == "__main__":
    main()
