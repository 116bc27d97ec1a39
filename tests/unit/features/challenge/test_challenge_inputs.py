"""Runs in the challenge's table, and stages of benchmarks."""

from pathlib import Path

import pytest

from dj2mgm.errors import InputError
from dj2mgm.features.challenge.challenge_stages import build_challenge_settings
from dj2mgm.runs.all_runs import Runs
from dj2mgm.storage.files import read_yaml, write_yaml

FILES = {"textvqa": {"questions": "q.jsonl", "answers": "a.json", "images": "im"}, "mmbench": {"questions": "q.tsv"}}


def test_the_challenge_names_missing_files_of_benchmarks(write):
    write("bad", nonsense=1)
    with pytest.raises(InputError, match="bad"):
        build_challenge_settings(Runs({"report": {"experiments": ["baseline", "bad"]}, "benchmarks": FILES}))
    with pytest.raises(InputError, match="benchmarks.textvqa.images, benchmarks.mmbench.questions: name them"):
        build_challenge_settings(Runs({"benchmarks": {"textvqa": {"questions": "q.jsonl", "answers": "a.json"}}}))
    stages = Runs({"benchmarks": {"textvqa": FILES["textvqa"]}}).first_seed("baseline").settings
    assert "benchmarks/textvqa" in stages and "benchmarks/mmbench" not in stages
    path = Path("config/config.yaml")
    write_yaml(path, read_yaml(path) | {"benchmarks": {"textvqa": FILES["textvqa"]}})
    with pytest.raises(InputError, match="the challenge needs benchmarks.mmbench: name them"):
        build_challenge_settings(Runs({}))


def test_the_challenge_has_all_seeds_of_its_experiments(write):
    write("mine")
    runs = Runs({"seeds": [0, 2], "report": {"experiments": ["baseline", "mine"]}, "benchmarks": FILES})
    challenge = build_challenge_settings(runs)
    assert [(run["experiment"], run["seed"]) for run in challenge["runs"]] == [
        ("tiny before training", None),
        ("baseline", 0),
        ("baseline", 2),
        ("mine", 0),
        ("mine", 2),
    ]
    assert challenge["runs"][0]["benchmarks"]["textvqa"] == "results/shapes/tiny/baseline/base_benchmarks/textvqa"
    assert challenge["runs"][4]["benchmarks"] == {
        "textvqa": "results/shapes/tiny/baseline/seed-2/benchmarks/textvqa",
        "mmbench": "results/shapes/tiny/baseline/seed-2/benchmarks/mmbench",
    }
    assert challenge["scores"]["mmbench"]["variant"] == "circular"
