"""Training on two nodes of a real Slurm, as one job with one process per node."""

from contextlib import closing

import pytest

from cluster_runs import SLURM_PROFILE, ClusterRun
from dj2mgm.storage.files import read_json, read_jsonl
from one_machine_slurm import NODE, SECOND
from small_project import copy_project

STAGE = "results/small/small/baseline/pretrain/metrics.json"
# the small model's global batch, with one node's accumulation steps divided between two
TWO_NODES = (
    "gpus=2",
    "nodes=2",
    "pretrain={gradient_accumulation_steps: 1}",
    "finetune={gradient_accumulation_steps: 1}",
)


def read_losses(project) -> list[float]:
    return [row["loss"] for row in read_jsonl(project.result("pretrain") / "metrics.jsonl")]


def test_losses_on_two_nodes_equal_those_on_one(slurm_runs, tmp_path):
    project = copy_project(tmp_path)
    project.run(STAGE)
    one_node_losses = read_losses(project)
    # These resources replace the profile's.
    two_node_flags = ("--set-resources", "pretrain:slurm_partition=both", "pretrain:cpus_per_task=8")
    with closing(ClusterRun(project, (STAGE, *SLURM_PROFILE, *two_node_flags), TWO_NODES)) as run:
        run.start()
        run.finish()
    [job] = run.all_jobs()
    assert (job["JobState"], job["NumNodes"]) == ("COMPLETED", "2")
    assert {NODE, SECOND} == set(job["NodeList"].split(","))
    assert read_json(project.folder / STAGE)["engine"]["world_size"] == 2
    assert read_losses(project) == pytest.approx(one_node_losses, rel=1e-4)
