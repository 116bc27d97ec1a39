"""profiles/example_cluster with profiles/slurm: merged settings, and resources of the planned jobs."""

import re
import sys

import pytest
from snakemake.cli import get_argument_parser

from paths import PROJECT

PROFILES = ("profiles/slurm", "profiles/example_cluster")
ON_A_GPU = {"slurm_partition": "gpu", "gpu_model": "a100", "cpus_per_task": "8", "gpu": "1"}
CONDA = """#!{python}
import json, sys
print("conda 26.1.0" if "--version" in sys.argv else json.dumps(
    {{"conda_prefix": "/conda", "platform": "linux-64", "get": {{"channel_priority": "strict"}}}}
))
"""


@pytest.fixture
def login_node(tmp_path, monkeypatch):
    """Put stand-ins for conda and sbatch onto PATH; a dry run asks conda for its version, and looks sbatch up."""
    for name in ("conda", "sbatch"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(CONDA.format(python=sys.executable))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")


def test_settings_of_both_profiles_are_merged(monkeypatch):
    monkeypatch.chdir(PROJECT)
    monkeypatch.setenv("USER", "ada")
    args = get_argument_parser(profiles=[*PROFILES, "profiles/default"]).parse_args([])
    assert args.executor == "slurm" and args.slurm_requeue and args.retries == 3
    assert str(args.conda_prefix) == "/scratch/my_project/dj2mgm-conda"
    assert str(args.slurm_logdir) == "/scratch/my_project/ada/dj2mgm-logs"


def test_jobs_are_planned_with_the_resources_of_the_cluster(fresh, login_node, tmp_path):
    arguments = [argument for profile in PROFILES for argument in ("--profile", profile)]
    printed = fresh.run("baseline", "--dry-run", *arguments, "--conda-prefix", str(tmp_path / "environments"))
    assert "Conda environment envs/train.yaml will be created" in printed
    jobs = dict(re.findall(r"^rule (\w+):\n(?:    .*\n)*?    resources: (.*)$", printed, flags=re.MULTILINE))
    resources = {rule: dict(item.split("=") for item in line.split(", ")) for rule, line in jobs.items()}
    for rule, minutes in {"pretrain": "1440", "finetune": "1440", "generate_answers": "240"}.items():
        expected = ON_A_GPU | {"slurm_account": "my_project", "runtime": minutes}
        assert expected.items() <= resources[rule].items(), rule
    assert {"slurm_account": "my_project", "slurm_partition": "cpu"}.items() <= resources["filter_data"].items()
    assert "gpu_model" not in resources["filter_data"]
    on_gpus = {rule for rule, values in resources.items() if values.get("gpu", "0") != "0"}
    assert on_gpus == {rule for rule, values in resources.items() if values["slurm_partition"] == "gpu"}


def test_every_line_says_what_to_change():
    text = (PROJECT / "profiles/example_cluster/config.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    keys = [line for line in lines if not re.fullmatch(r"[\w-]+:|  \w+:( &\w+)?", line)]
    assert keys and [line for line in keys if not re.search(r" # (change|keep|delete)\b", line)] == []
