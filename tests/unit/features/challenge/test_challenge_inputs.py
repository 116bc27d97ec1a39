"""Runs in the challenge's table, and stages of benchmarks."""

from pathlib import Path

import pytest

from dj2mgm.errors import InputError
from dj2mgm.features.challenge.challenge_stages import build_challenge_settings
from dj2mgm.runs.all_runs import Runs
from dj2mgm.storage.files import read_yaml, write_yaml

FILES = {"textvqa": {"questions": "q.jsonl", "answers": "a.json", "images": "im"}, "mmbench": {"questions": "q.tsv"}}


def test_the_challenge_names_missing_files_of_benchmarks(write):
    with pytest.raises(InputError, match="benchmarks.textvqa.images, benchmarks.mmbench.questions: name them"):
        build_challenge_settings(Runs({"benchmarks": {"textvqa": {"questions": "q.jsonl", "answers": "a.json"}}}))


def test_a_scored_benchmark_must_have_files(write):
    path = Path("config/config.yaml")
    settings = read_yaml(path)
    write_yaml(path, settings | {"benchmarks": {"textvqa": FILES["textvqa"]}})
    with pytest.raises(InputError, match="the challenge needs benchmarks.mmbench: name them"):
        build_challenge_settings(Runs({}))


def test_the_challenge_needs_valid_experiments(write):
    write("bad", nonsense=1)
    with pytest.raises(InputError, match="bad"):
        build_challenge_settings(Runs({"report": {"experiments": ["baseline", "bad"]}, "benchmarks": FILES}))


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


def test_a_benchmark_without_files_is_not_a_stage(write):
    stages = Runs({"benchmarks": {"mmbench": FILES["mmbench"]}}).first_seed("baseline").settings
    assert "benchmarks/mmbench" in stages and "benchmarks/textvqa" not in stages
