"""`snakemake decide` on a real Slurm: each look is a job and adds the jobs of another seed."""

from contextlib import closing

import pytest

from cluster_runs import SLURM_PROFILE, ClusterRun, completed
from dj2mgm.storage.files import read_json, read_yaml, write_text
from quick_stages import replace_stages
from small_project import copy_project

BUDGET = ("experiment=alike", "decide={seeds: 3}", "report={margin: 0.0}")


@pytest.mark.slow
def test_a_decision_takes_two_looks_as_jobs(slurm_runs, tmp_path):
    project = copy_project(tmp_path)
    write_text(project.folder / "config/experiments/alike.yaml", "finetune: {learning_rate: 3.0e-3}\n")
    replace_stages(project, {"baseline": 0.5, "alike": 0.5}, spread=0.05)
    with closing(ClusterRun(project, ("decide", *SLURM_PROFILE), BUDGET)) as run:
        run.start()
        run.finish()
        job_counts, printed = completed(run.all_jobs()), run.printed()
    folder = project.folder / "results/small/small/alike/decide"
    looks = [read_yaml(folder / f"seeds-{number}/look.yaml") for number in (2, 3)]
    assert [(look["seeds"], look["kind"]) for look in looks] == [([0, 1], "undecided"), ([0, 1, 2], "undecided")]
    assert (job_counts["take_look"], job_counts["finetune"], job_counts["evaluate_vqa"]) == (2, 6, 6)
    assert "After 3 of at most 3 seeds, it is undecided whether alike is better than baseline" in printed
    assert read_json(folder / "decision.json")["verdict"] == "Undecided after 3 seeds"
