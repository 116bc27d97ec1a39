"""Adaptive studies: batches until the end of the budget, also after a divergence or a kill, and refusals."""

import html
import re
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest

import keep_variant
from dj2mgm.storage.files import read_yaml, write_text
from quick_stages import read_calls, replace_stages
from small_project import Project, copy_project

SPACE = "{finetune.learning_rate: auto, recipe.words_num_filter.max_num: [10, 12, 18]}"


def write_study(project, name="mine", space=SPACE, **design):
    keys = "".join(f", {key}: {value}" for key, value in design.items())
    write_text(project.folder / f"config/studies/{name}.yaml", f"design: {{kind: search, space: {space}{keys}}}\n")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Return a project with immediate stages."""
    return quick_project(tmp_path_factory.mktemp("quick"))


def quick_project(folder: Path) -> Project:
    project = copy_project(folder)
    replace_stages(project, {"baseline": 0.5}, spread=0.01)
    return project


def list_trainings(project) -> list[str]:
    return [call.split()[1] for call in read_calls(project) if call.startswith("finetune ")]


def list_trials(project, study="mine") -> list[str]:
    files = sorted((project.folder / f"results/small/small/{study}/search").glob("*/batch-*/trials.yaml"))
    return [trial["name"] for file in files for trial in read_yaml(file)["trials"]]


def test_a_search_continues_until_its_budget_is_spent(quick):
    write_study(quick, trainings=3, batch=2)
    quick.run("mine")
    assert len(list_trials(quick)) == 3 == len({*list_trials(quick)})
    assert sorted(list_trainings(quick)) == sorted(["baseline", *list_trials(quick)])
    table = pd.read_csv(quick.folder / "results/small/small/mine/mine.csv")
    assert sorted(table["experiment"]) == sorted(["baseline", *list_trials(quick)])
    assert table["finetune_answer_probability"][1:].is_monotonic_decreasing
    page = (quick.folder / "results/small/small/mine/mine.html").read_text(encoding="utf-8")
    assert (
        "The search has tried 3 variants. It spent 3 of at most 3 trainings and " in page
        and page.count('class="point') == 4
    )
    before = read_calls(quick)
    assert "Nothing to be done" in quick.run("mine") and read_calls(quick) == before
    filtered = [call.split()[1] for call in read_calls(quick) if call.startswith("filter_data")]
    limits = {
        str(read_yaml(file)["recipe"]["process"])
        for file in quick.folder.glob("results/small/small/*/filter/config.yaml")
    }
    assert len(filtered) == len(limits), "trials share equal filters"


def test_a_search_continues_after_a_divergence(quick):
    """Run after the test above, whose trials are kept."""
    first = list_trials(quick)
    write_study(quick, trainings=4, batch=2)
    (quick.folder / "finetune-diverges").touch()
    assert "training diverged" in quick.run("mine", ok=False)
    quick.run("mine")
    assert list_trials(quick)[:3] == first and len({*list_trials(quick)}) == 4
    table = pd.read_csv(quick.folder / "results/small/small/mine/mine.csv")
    assert " 1 diverged." in (quick.folder / "results/small/small/mine/mine.html").read_text(encoding="utf-8")
    assert len(table) == 4, "the experiment, and all trials except the diverged trial"
    assert not {*table["experiment"]} - {"baseline", *list_trials(quick)}


def test_a_budget_below_one_variant_is_refused_before_any_run(quick):
    write_study(quick, "other", gpu_hours=1.0e-6)
    before = read_calls(quick)
    printed = re.sub(r"\s+", " ", quick.run("other", ok=False))
    (quick.folder / "config/studies/other.yaml").unlink()
    assert "design.gpu_hours: 1e-06 is less than one variant takes" in printed
    assert "Traceback" not in printed and read_calls(quick) == before


def test_a_metric_that_no_run_reports_is_refused(quick):
    write_study(quick, "other")
    printed = quick.run("other", ok=False, config=("report={headline: clip_score}",))
    assert "report.headline: clip_score is not reported by baseline" in re.sub(r"\s+", " ", printed)
    write_study(quick, "other", goals="{clip_score: 1, gpu_hours: -0.1}")
    printed = quick.run("other", ok=False)
    assert "design.goals: clip_score is not reported by baseline" in re.sub(r"\s+", " ", printed)


def test_halving_ends_with_commands_for_the_best_trial(quick, monkeypatch, capsys):
    """Short runs are half a training; the commands of the page plan a decision on other seeds."""
    space, goals = "{recipe.words_num_filter.max_num: [6, 8, 10, 12]}", "{answer_probability: 1, gpu_hours: -0.5}"
    write_study(quick, "halved", space, rungs="[0.5, 1.0]", keep=0.5, goals=goals, trainings=4, batch=4)
    quick.run("halved")
    files = sorted(quick.result("search", "halved").glob("*/batch-*/trials.yaml"), key=lambda file: file.parent.name)
    batches = [read_yaml(file) for file in files]
    names = {
        step: [trial["name"] for batch in batches if batch["step"] == step for trial in batch["trials"]]
        for step in ("explore", "promote")
    }
    assert len(names["explore"]) == 4 and len(names["promote"]) == 2
    page = quick.result("halved.html", "halved").read_text(encoding="utf-8")
    table = pd.read_csv(quick.result("halved.csv", "halved"))
    assert sorted(table["experiment"]) == sorted(["baseline", *names["promote"]]), "short runs have their own table"
    assert "sum of 1 × answer_probability, -0.5 × gpu_hours." in page and "weighted sum of the goals" in page
    assert "50 % of the rows" in page and all(name in page for name in names["explore"])
    used_fraction = read_yaml(quick.result("jsonl/config.yaml", f"{names['explore'][0]}-0.5"))["used_fraction"]
    assert used_fraction == 0.5
    commands = [html.unescape(command) for command in re.findall("<code>(.*?)</code>", page.split("<h2>Next</h2>")[1])]
    *keep_commands, decide = map(shlex.split, commands)
    monkeypatch.chdir(quick.folder)
    for command in keep_commands:
        monkeypatch.setattr(sys, "argv", command[1:])
        keep_variant.main()
    best, second = (command[-1] for command in keep_commands)
    files = {name: read_yaml(quick.folder / f"config/experiments/{name}.yaml") for name in (best, second)}
    assert [(file["seeds"], file["controls"]) for file in files.values()] == [([1, 2], ["random"])] * 2
    assert decide[:2] == ["snakemake", "decide"]
    assert decide[-1] == f"decide={{against: [baseline, {second}, {best}-random]}}"
    before = list_trainings(quick)
    printed = quick.run("decide", "--dry-run", config=decide[decide.index("--config") + 1 :])
    assert list_trainings(quick) == before
    folders = re.findall(r"--output-dir results/small/small/(\S+)/finetune", printed)
    expected = {best, f"{best}/seed-2", "baseline/seed-1", "baseline/seed-2"}  # of the look at the first opponent
    assert {*folders} == expected, "seed 0 chose the trial"
