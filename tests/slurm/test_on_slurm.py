"""Both experiments on a real Slurm, with the usual failures of a cluster.

During one run of `snakemake baseline dj_synth`, a job runs out of memory, a job is cancelled, a job reaches its
time limit, a node fails and Snakemake itself is killed. The tests then inspect Slurm's records and the results.
"""

import json
import re
import shutil
import subprocess
from base64 import urlsafe_b64decode
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cluster_runs import (
    GENERIC_PROFILE,
    SLURM_PROFILE,
    STAGE_TIMEOUT_S,
    ClusterRun,
    completed,
    end_at_time_limit,
    fail_node,
    read_rule,
)
from one_machine_slurm import slurm, wait_until
from small_project import SMALL, copy_project

TARGETS = ("baseline", "dj_synth")
SAVE_STEPS = 5  # value in tests/fixtures/small/models_small.yaml
TOO_LITTLE_MB = 120  # too little for Snakemake's two processes in a job; 2.5 times as much is enough
RESUMED = [("pretrain", "baseline"), ("pretrain", "dj_synth"), ("finetune", "dj_synth")]
WAITING = "waiting for the jobs of the killed run in Slurm"


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict[str, dict]:
    """Return count and resources of each rule's jobs that are not local, from a dry run.

    A dry run does not show which rules are local; these are the rules without a runtime.
    """
    printed = copy_project(tmp_path_factory.mktemp("dry run")).run(*TARGETS, *SLURM_PROFILE, "--dry-run")
    rule_texts = re.findall(r"^rule (\w+):\n(.*?)\n\n", printed, flags=re.MULTILINE | re.DOTALL)
    rules = {}
    for rule, text in rule_texts:
        resources = dict(re.findall(r"(\w+)=([^,\n]+)", text.split("resources: ")[1]))
        if "runtime" in resources:
            rules.setdefault(rule, {"count": 0, "resources": resources})["count"] += 1
    return rules


@pytest.fixture(scope="module")
def run(slurm_runs, tmp_path_factory) -> Iterator[ClusterRun]:
    project = copy_project(tmp_path_factory.mktemp("on slurm"))
    rule = project.folder / "rules/dataset.smk"
    rule.write_text(rule.read_text().replace("stage_resources(SMALL_STAGE_MB", f"stage_resources({TOO_LITTLE_MB}"))
    with closing(ClusterRun(project, (*TARGETS, *SLURM_PROFILE))) as run:
        run.start()
        slurm("scancel", run.wait_for_checkpoint("pretrain", "baseline"))
        job = run.wait_for_checkpoint("finetune", "baseline")
        slurm("scontrol", "suspend", job)  # or the stage may end before the next Snakemake starts
        run.kill()
        run.start()
        wait_until(lambda: WAITING in run.printed(), "the run that takes over", STAGE_TIMEOUT_S)
        slurm("scontrol", "resume", job)
        run.wait_for_checkpoint("pretrain", "dj_synth")
        fail_node()
        end_at_time_limit(run.wait_for_checkpoint("finetune", "dj_synth"))
        run.finish()
        yield run


def test_each_nonlocal_job_completed_once_in_slurm(run, planned):
    assert completed(run.all_jobs()) == Counter({rule: plan["count"] for rule, plan in planned.items()})


def test_no_jobs_remain(run):
    assert "Nothing to be done" in run.project.run(*TARGETS)


def test_only_gpu_rules_had_a_gpu_of_their_own(run, planned):
    times = []
    for job in run.all_jobs():
        requested = int(planned[read_rule(job)]["resources"].get("gpu", 0))
        assert job.get("TresPerJob", "") == (f"gres:gpu:{requested}" if requested else "")
        if requested and job["StartTime"] != "Unknown":
            times.append((job["StartTime"], job["EndTime"]))
    times.sort()
    assert len(times) >= 9
    assert all(end <= start for (_, end), (start, _) in zip(times, times[1:], strict=False))


def test_jobs_got_cores_and_time_of_their_rule_with_cores_1(run):
    [*_, job] = run.jobs("pretrain", "baseline")
    assert (job["NumCPUs"], job["TimeLimit"]) == ("8", "1-00:00:00")


def test_job_out_of_memory_was_retried_with_more_memory(run):
    jobs = run.jobs("make_dataset", "small")
    assert "exceeded memory limit" in run.logs("make_dataset", "small")
    assert [job["JobState"] == "COMPLETED" for job in jobs] == [False] * (len(jobs) - 1) + [True]
    memory = [int(job["MinMemoryNode"].removesuffix("M")) for job in jobs]
    assert memory == [TOO_LITTLE_MB * (attempt + 1) // 2 for attempt in range(1, len(jobs) + 1)] and len(memory) > 1


@pytest.mark.parametrize(
    ("rule", "experiment", "states"),
    [("pretrain", "baseline", ["CANCELLED", "COMPLETED"]), ("finetune", "dj_synth", ["TIMEOUT", "COMPLETED"])],
    ids=["cancelled", "time limit"],
)
def test_cancelled_job_was_submitted_again(run, rule, experiment, states):
    assert [job["JobState"] for job in run.jobs(rule, experiment)] == states


def test_slurm_restarted_the_job_of_a_failed_node(run):
    [job] = run.jobs("pretrain", "dj_synth")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")


@pytest.mark.parametrize(("stage", "experiment"), RESUMED, ids=["cancelled", "node failed", "time limit"])
def test_training_resumed_from_its_checkpoint(run, stage, experiment):
    assert "resuming from step" in run.logs(stage, experiment)
    folder = run.project.result(stage, experiment)
    metrics = json.loads((folder / "metrics.json").read_text())
    logged_steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    printed_steps = re.findall(
        r"^progress: (?:.*? left, )?(\d+) of \d+ steps", run.logs(stage, experiment), flags=re.MULTILINE
    )
    step_counts = Counter(map(int, printed_steps))
    assert logged_steps == sorted(step_counts) == list(range(1, metrics["steps"] + 1))
    assert sum(step_counts.values()) - metrics["steps"] <= SAVE_STEPS


def test_killed_snakemake_resumes_jobs_without_resubmitting(run):
    assert WAITING in run.printed()
    assert [job["JobState"] for job in run.jobs("finetune", "baseline")] == ["COMPLETED"]
    assert "resuming from step" not in run.logs("finetune", "baseline")


def test_jobs_are_submitted_and_retried_without_the_plugin(slurm_runs, tmp_path):
    def is_running(rule: str) -> bool:
        return any(read_rule(job) == rule and job["JobState"] == "RUNNING" for job in run.all_jobs())

    project, arguments = copy_project(tmp_path), ("baseline", "--until", "filter_data", *GENERIC_PROFILE)
    with closing(ClusterRun(project, arguments)) as run:
        run.start()
        wait_until(lambda: is_running("make_dataset"), "make_dataset", STAGE_TIMEOUT_S)
        slurm("scancel", run.running_job("make_dataset"))
        wait_until(lambda: is_running("filter_data"), "filter_data", STAGE_TIMEOUT_S)
        run.kill()
        run.start()
        run.finish()
    states = [(read_rule(job), job["JobState"]) for job in run.all_jobs()]
    assert states == [("make_dataset", "CANCELLED"), ("make_dataset", "COMPLETED"), ("filter_data", "COMPLETED")]
    assert (run.project.result("filter") / "summary.json").is_file()


def incomplete_outputs(folder: Path) -> list[str]:
    """Return the outputs that Snakemake's records in a project name as being written."""
    return [urlsafe_b64decode(record.name).decode() for record in folder.glob(".snakemake/incomplete/*")]


def test_job_on_local_scratch_resumes_a_killed_one(slurm_runs, tmp_path):
    project, scratch = copy_project(tmp_path / "shared filesystem"), tmp_path / "local disk"
    settings = project.environment() | {"SCRATCH": str(scratch), "COPY_BACK_S": "1"}
    command = ["sbatch", "--parsable", "--mem=4000", "profiles/slurm/on_local_scratch.sh"]
    command += ["baseline", "--until", "filter_data", "--config", *SMALL]

    def submit() -> str:
        process = subprocess.run(command, cwd=project.folder, env=settings, check=True, capture_output=True, text=True)
        return process.stdout.strip()

    dataset = project.folder / "results/datasets/small/summary.json"
    summary = project.result("filter") / "summary.json"
    first = submit()
    # Snakemake makes a dataset again that it has not recorded as complete, so wait for the next stage. The dataset
    # comes after the record, because copies follow the alphabet
    filtered = str(summary.relative_to(project.folder))

    def has_started_filter() -> bool:
        return filtered in incomplete_outputs(project.folder) and dataset.exists()

    wait_until(has_started_filter, "the filter's start", STAGE_TIMEOUT_S)
    modified = dataset.stat().st_mtime_ns
    slurm("scancel", first)
    wait_until(lambda: first not in slurm("squeue", "--noheader", "--format=%i"), "the end of the killed job")
    shutil.rmtree(scratch)  # as if the next job ran on another node
    last = submit()
    failed = ("squeue", "--noheader", "--states=failed", f"--jobs={last}")
    wait_until(lambda: summary.exists() or slurm(*failed), "the filter", STAGE_TIMEOUT_S)
    assert summary.exists(), (project.folder / f"slurm-{last}.out").read_text()
    assert dataset.stat().st_mtime_ns == modified
