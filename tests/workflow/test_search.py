"""Adaptive studies: batches until the budget is spent, after a kill and a divergence too, and refusals."""

import re

import pandas as pd
import pytest
from test_kill_and_resume import kill_midway

from dj2mgm.files import read_yaml, write_text
from quick_stages import calls, replace_stages
from small_project import copy_project

SPACE = "{finetune.learning_rate: auto, recipe.words_num_filter.max_num: [12, 14, 20]}"


def write_study(project, name="mine", space=SPACE, **design):
    keys = "".join(f", {key}: {value}" for key, value in design.items())
    write_text(project.folder / f"config/studies/{name}.yaml", f"design: {{kind: search, space: {space}{keys}}}\n")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Return a project whose stages take no time."""
    project = copy_project(tmp_path_factory.mktemp("quick"))
    replace_stages(project, {"baseline": 0.5}, spread=0.01)
    return project


def trained(project) -> list[str]:
    return [call.split()[1] for call in calls(project) if call.startswith("finetune ")]


def asked(project, study="mine") -> list[str]:
    files = sorted((project.folder / f"results/{study}/search").glob("*/batch-*/trials.yaml"))
    return [trial["name"] for file in files for trial in read_yaml(file)["trials"]]


def test_a_killed_search_goes_on_until_its_budget_is_spent(quick):
    write_study(quick, trainings=3, batch=2)
    quick.run("results/baseline/evaluate_vqa/metrics.json")
    (quick.folder / "finetune-0.wait").touch()
    kill_midway(quick, lambda: len(trained(quick)) == 2, "mine", whole_tree=True)
    first = asked(quick)
    (quick.folder / "finetune-0.wait").unlink()
    quick.run("mine")
    assert asked(quick)[:2] == first and len(asked(quick)) == 3 == len({*asked(quick)})
    assert sorted({*trained(quick)}) == sorted(["baseline", *asked(quick)])
    assert len(trained(quick)) == 5, "only the killed one runs again"
    table = pd.read_csv(quick.folder / "results/mine/mine.csv")
    assert sorted(table["experiment"]) == sorted(["baseline", *asked(quick)])
    assert table["finetune_answer_probability"][1:].is_monotonic_decreasing
    page = (quick.folder / "results/mine/mine.html").read_text(encoding="utf-8")
    assert "The search has trained 3 of at most 3 variants in " in page and page.count('class="point') == 4
    before = calls(quick)
    assert "Nothing to be done" in quick.run("mine") and calls(quick) == before
    filtered = [call.split()[1] for call in calls(quick) if call.startswith("filter_data")]
    limits = {
        read_yaml(file)["recipe"]["process"].__str__() for file in quick.folder.glob("results/*/filter/config.yaml")
    }
    assert len(filtered) == len(limits), "trials share equal filters"


def test_a_larger_budget_continues_and_a_divergence_is_no_end(quick):
    """Run after the test above, whose trials are kept."""
    first = asked(quick)
    write_study(quick, trainings=5, batch=2)
    (quick.folder / "finetune-diverges").touch()
    assert "training diverged" in quick.run("mine", ok=False)
    quick.run("mine")
    assert asked(quick)[:3] == first and len({*asked(quick)}) == 5
    table = pd.read_csv(quick.folder / "results/mine/mine.csv")
    assert " 1 diverged." in (quick.folder / "results/mine/mine.html").read_text(encoding="utf-8")
    assert len(table) == 5, "the experiment, and all trials but the one that diverged"
    assert not {*table["experiment"]} - {"baseline", *asked(quick)}


@pytest.mark.parametrize(
    ("design", "sentence"),
    [
        ({"space": "{finetune.learning_rat: auto}"}, "finetune.learning_rat: the setting declares no range"),
        ({"space": "{finetune.lora.q: [4, 8]}"}, "finetune.lora.q: unknown key"),
        ({"space": "{finetune.lora.r: {low: 8, high: 4}}"}, "finetune.lora.r: low, 8, must be below high, 4"),
        (
            {"space": "{recipe.words_num_filter.min_num: [4, 30], recipe.words_num_filter.max_num: [20, 40]}"},
            "min_num 30, recipe.words_num_filter.max_num 20: ",
        ),
        ({"space": "{model: [tiny, tiny-llava]}"}, "design.space.model: a search cannot vary it"),
        ({"trainings": 0}, "design.trainings: expected an integer from 1 to 1000, found 0"),
        ({"gpu_hours": 1.0e-6}, "design.gpu_hours: 1e-06 is less than one training takes, as baseline did; raise it"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_runs(quick, design, sentence):
    write_study(quick, "other", **design)
    before = calls(quick)
    printed = re.sub(r"\s+", " ", quick.run("other", ok=False))
    (quick.folder / "config/studies/other.yaml").unlink()
    assert sentence in printed and "Traceback" not in printed and calls(quick) == before


def test_a_metric_that_no_run_reports_is_refused(quick):
    write_study(quick, "other")
    printed = quick.run("other", ok=False, config=("report={headline: clip_score}",))
    assert "report.headline: clip_score is not reported by baseline" in re.sub(r"\s+", " ", printed)
