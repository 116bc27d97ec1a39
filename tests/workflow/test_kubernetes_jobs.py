"""Jobs submitted by profiles/kubernetes, and a run of the workflow with this profile.

Kubernetes is not needed: tests/support/kubectl.py replaces `kubectl` and runs the commands of manifests as processes.
"""

import os
import subprocess
import sys

import pytest
import yaml

from paths import PROJECT

PROFILE = ("--profile", "profiles/kubernetes", "--seconds-between-status-checks", "1", "--latency-wait", "5")


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Put the fake `kubectl` first on the path, and return the folder in which it records Jobs."""
    notes = tmp_path / "bin"
    notes.mkdir()
    (notes / "kubectl").write_text(f'#!/bin/sh\nexec {sys.executable} "{PROJECT}/tests/support/kubectl.py" "$@"\n')
    (notes / "kubectl").chmod(0o755)
    monkeypatch.setenv("KUBECTL_NOTES", str(notes))
    monkeypatch.setenv("PATH", f"{notes}{os.pathsep}{os.environ['PATH']}")
    return notes


def manifests(notes) -> dict[str, dict]:
    jobs = [yaml.safe_load(path.read_text()) for path in sorted(notes.glob("*.yaml"))]
    return {job["metadata"]["labels"]["rule"]: job for job in jobs}


@pytest.mark.slow
def test_the_workflow_runs_through_jobs(fresh, kubectl):
    fresh.run("baseline", "--until", "filter_data", *PROFILE)
    assert (fresh.result("filter") / "summary.json").is_file()
    jobs = manifests(kubectl)
    assert set(jobs) == {"make_dataset", "filter_data"}
    pod = jobs["filter_data"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": 1, "memory": "4000M"}
    assert container["workingDir"] == str(fresh.folder)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert jobs["filter_data"]["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 120 * 60


def test_a_gpu_rule_is_limited_to_its_requested_gpus(fresh, kubectl):
    folder = fresh.folder / 'it\'s "$(touch X)" \\n: #'
    folder.mkdir()
    script = folder / "a job.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    submit = [str(PROJECT / "profiles/kubernetes/submit.sh"), "pretrain", "8", "48000", "1440", "2", str(script)]
    subprocess.run(submit, cwd=folder, check=True, capture_output=True)
    [container] = manifests(kubectl)["pretrain"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": 8, "memory": "48000M", "nvidia.com/gpu": 2}
    assert (container["command"], container["workingDir"]) == ([str(script)], str(folder))
