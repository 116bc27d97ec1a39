"""The last lines of a dry run."""

from dataclasses import replace

import pytest

from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.command_messages import PlannedJob, build_command, list_start_messages, summarize_jobs
from dj2mgm.storage.files import write_json, write_text
from paths import PROJECT
from source_files import PAIR

RUN, OTHER_RUN = "shapes/tiny/baseline", "shapes/tiny/dj_synth"
PAGE = PlannedJob((f"results/{RUN}/report/report.html",), "baseline")


def plan_job(stage: str, rule: str) -> PlannedJob:
    return PlannedJob((f"results/{RUN}/{stage}/metrics.json",), rule, True, RUN)


JOBS = [plan_job("evaluate_vqa", "evaluate_vqa"), plan_job("finetune", "finetune"), plan_job("pretrain", "pretrain")]


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Runs:
    monkeypatch.setattr("dj2mgm.runs.stage_settings.GPU_DEVICES", [])
    (tmp_path / "config").symlink_to(PROJECT / "config")
    monkeypatch.chdir(tmp_path)
    return Runs({})


def test_trainings_have_their_rows_and_steps(runs):
    lines = summarize_jobs(runs, JOBS, [PAGE])
    assert lines[1] == "Summary: 3 stages would run, 2 of them a training."
    assert lines[2:4] == [
        "  pretrain of baseline: at most 10,000 rows, 157 steps",
        "  finetune of baseline: at most 12,000 rows, 94 steps",
    ]
    assert lines[4] == "Time: about 4 to 13 minutes on two cores." and lines[5] == f"Result: {PAGE.files[0]}"
    assert all(len(line) <= 80 for line in lines)
    other = [replace(job, run=OTHER_RUN, files=(job.files[0].replace(RUN, OTHER_RUN),)) for job in JOBS]
    lines = summarize_jobs(runs, [*JOBS, *other], [PAGE])
    assert "Time: about 8 to 26 minutes on two cores for 2 experiments or seeds." in lines


def test_seeds_of_the_default_have_a_time(runs):
    lines = summarize_jobs(runs, JOBS, [PAGE], (), ["seeds=[0]", "experiment=dj_synth"])
    assert "Time: about 4 to 13 minutes on two cores." in lines


def test_a_check_of_ten_steps_has_no_time_of_a_whole_training(runs):
    job = PlannedJob(("results/x",), "finetune_minimal", True, JOBS[0].run)
    assert not any("on two cores" in line for line in summarize_jobs(runs, [job], [PAGE], (), []))


def test_plan_predicts_the_time_of_a_real_model_without_a_gpu(runs):
    runs, run = Runs({"model": "qwen3-vl-2b"}), "shapes/qwen3-vl-2b/baseline"
    job = PlannedJob((f"results/{run}/finetune/metrics.json",), "finetune", True, run)
    text = " ".join(line.strip() for line in summarize_jobs(runs, [job], [PAGE], (), ["model=qwen3-vl-2b"]))
    assert "`snakemake plan --config model=qwen3-vl-2b gpu=rtx-4090` predicts it for that card." in text


def test_models_to_fetch_are_named_in_whole_lines(runs):
    lines = summarize_jobs(
        runs, JOBS, [PAGE], ["model mgm-2b: it is not here. `snakemake fetch` downloads 8.1 GB: " * 3]
    )
    assert lines[1].startswith("First: model mgm-2b: it is not here.")
    [summary] = [number for number, line in enumerate(lines) if line.startswith("Summary: ")]
    assert "snakemake fetch" in "".join(lines[1:summary]) and all(len(line) <= 80 for line in lines)


def test_the_command_for_the_time_has_the_same_configuration(runs, monkeypatch):
    """Without a GPU, `plan` predicts no minutes and is not named."""
    arguments = ["dataset=/data/my photos", "benchmarks=[]"]
    monkeypatch.setattr("dj2mgm.runs.stage_settings.GPU_DEVICES", ["/dev/null"])
    text = " ".join(line.strip() for line in summarize_jobs(runs, JOBS, [PAGE], (), arguments))
    assert "`snakemake plan --config 'dataset=/data/my photos' 'benchmarks=[]'` predicts it." in text
    monkeypatch.setattr("dj2mgm.runs.stage_settings.GPU_DEVICES", [])
    text = " ".join(line.strip() for line in summarize_jobs(runs, JOBS, [PAGE], (), arguments))
    assert "snakemake plan" not in text and "the first steps of each tell its time" in text


def test_a_command_leaves_out_the_values_for_other_targets():
    arguments = ["model=mgm-2b", "gpu=rtx-4090", "experiment=dj_synth"]
    assert build_command("baseline -n", arguments) == "snakemake baseline -n --config model=mgm-2b"
    assert build_command("plan", arguments) == f"snakemake plan --config {' '.join(arguments)}"
    assert build_command("plan") == "snakemake plan"


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (("results/check/check.txt", "results/check/check.html"), ["results/check/check.html"]),
        (("results/decide/budget.yaml", "workflow_scripts/style.css", "results/a/README.md"), ["results/a/README.md"]),
    ],
)
def test_a_result_is_a_page_or_a_file_for_users(runs, files, shown):
    lines = summarize_jobs(runs, JOBS, [PlannedJob(files, "target", False, "")])
    assert [line for line in lines if line.startswith("Result")] == [f"Result: {file}" for file in shown]


def test_written_training_files_have_exact_rows(runs):
    counts = {"rows_in": 9, "rows_out": 640, "dropped": {}, "repeated": 0}
    summary = f"results/{RUN}/jsonl/summary.json"
    write_json(summary, {"pretrain": counts, "finetune": counts})
    assert "  finetune of baseline: 640 rows, " in summarize_jobs(runs, JOBS, [PAGE])[3]
    planned = [*JOBS, PlannedJob((f"results/{RUN}/jsonl/pretrain.jsonl",), "write_jsonl", True, RUN)]
    assert "  finetune of baseline: at most 12,000 rows, 94 steps" in summarize_jobs(runs, planned, [PAGE])
    counts["repeated"] = 600
    write_json(summary, {"pretrain": counts, "finetune": counts})
    assert "  finetune of baseline: 640 rows, 40 of them different, " in summarize_jobs(runs, JOBS, [PAGE])[3]
    folder = "shapes/tiny/dj_synth"
    other = PlannedJob((f"results/{folder}/finetune/metrics.json",), "finetune", True, folder)
    assert "  finetune of dj_synth: at most 640 rows, " in summarize_jobs(runs, [other], [PAGE])[2]
    assert summarize_jobs(runs, [], [PAGE]) == [f"Result: {PAGE.files[0]}"]


def test_times_are_those_of_the_same_rules(runs):
    for run, seconds in (("shapes/tiny/other", 50), ("shapes/tiny/more", 70), ("photos/tiny/other", 900)):
        for stage in ("pretrain", "finetune"):
            write_text(f"results/{run}/{stage}/{stage}.benchmark.tsv", f"s\th:m:s\n{seconds}\t0:01:00\n")
    [time] = [line for line in summarize_jobs(runs, JOBS, [PAGE]) if line.startswith("Time")]
    assert time == "Time: more than 2 min 00 s, which 2 of the 3 stages took here before."


def test_many_trainings_are_counted(runs):
    jobs = [plan_job("finetune", "finetune")] * 20
    assert "  … and 14 more trainings" in summarize_jobs(runs, jobs, [replace(PAGE, files=("results/x.html",) * 9)])
    assert "  … and 1 more training" in summarize_jobs(runs, jobs[:7], [PAGE])


def test_a_recognized_dataset_is_described_until_it_is_made(tmp_path, runs):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/captions.jsonl").write_text(PAIR)
    runs = Runs({"dataset": "photos"})
    assert any("recognized as pairs" in line for line in list_start_messages(runs))
    write_json("results/datasets/photos/summary.json", {})
    assert not any("recognized as pairs" in line for line in list_start_messages(runs))


def test_trainings_are_sorted_by_seed(tmp_path, runs):
    runs = Runs({"seeds": [0, 1]})
    folders = [f"{RUN}/seed-1", RUN]
    jobs = [PlannedJob((f"results/{each}/finetune/a.json",), "finetune", True, each) for each in folders]
    for order in (jobs, jobs[::-1]):
        assert [line.split(":")[0] for line in summarize_jobs(runs, order, [PAGE])[2:4]] == [
            "  finetune of baseline",
            "  finetune of baseline/seed-1",
        ]
