"""The challenge: jobs, the message without files, and one run on small files in the real formats."""

import pandas

from benchmark_files import make_circular_rows, write_mmbench, write_textvqa
from small_project import Project


def write_benchmark_files(project: Project) -> str:
    """Write both benchmarks' files to the project, and return the setting that names them."""
    textvqa = write_textvqa(project.folder / "textvqa")
    mmbench = write_mmbench(project.folder / "mmbench.tsv", make_circular_rows())
    return f"benchmarks={{textvqa: {textvqa}, mmbench: {mmbench}}}".replace("'", '"')


def test_missing_files_are_reported_with_the_setting(fresh):
    printed = fresh.run("challenge", "--dry-run", ok=False)
    assert "the challenge needs benchmarks.textvqa.questions" in printed and "config/config.yaml" in printed
    printed = fresh.run("results/small/small/baseline/benchmarks/textvqa/metrics.json", "--dry-run", ok=False)
    assert "benchmarks.textvqa is not set" in printed


def test_the_challenge_runs_only_both_benchmarks(fresh):
    counts = fresh.job_counts("challenge", config=(write_benchmark_files(fresh),))
    assert counts == {
        **dict.fromkeys(("make_dataset", "train_clip", "train_language_model", "assemble_model", "filter_data"), 1),
        **dict.fromkeys(("synthesize_captions", "score_challenge"), 1),
        **dict.fromkeys(("write_jsonl", "pretrain", "finetune", "write_submission"), 2),
        **dict.fromkeys(("answer_benchmark", "score_benchmark"), 6),  # two runs and the model before training
    }


def test_each_seed_answers_the_benchmarks(fresh):
    counts = fresh.job_counts(
        "challenge", config=(write_benchmark_files(fresh), "seeds=[0,1,2]", "report={experiments: [baseline]}")
    )
    assert (counts["finetune"], counts["answer_benchmark"], counts["write_submission"]) == (3, 8, 3)


def test_the_finished_baseline_gets_its_score(finished):
    config = (write_benchmark_files(finished), "report={experiments: [baseline]}")
    jobs = finished.job_counts("challenge", config=config)
    assert set(jobs) == {"answer_benchmark", "score_benchmark", "write_submission", "score_challenge"}
    finished.run("challenge", config=config)
    table = pandas.read_csv(finished.folder / "results/small/small/challenge/challenge.csv")
    assert table["experiment"].tolist() == ["MGM-2B", "small before training", "baseline"]
    assert table["textvqa"].between(0, 100).all()
    baseline = table.iloc[2]
    assert abs(baseline["challenge_score"] - (baseline["textvqa"] / 56.2 + baseline["mmbench"] / 59.8) / 2) < 1e-5
    assert (finished.result("benchmarks") / "mmbench/submission.xlsx").is_file()
    assert finished.job_counts("challenge", config=config) == {}
