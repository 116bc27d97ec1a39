"""Tables of a search's page: scores by rung, importance of settings, and costs."""

import random

from dj2mgm.features.studies.axes import Interval
from dj2mgm.features.studies.search_page import (
    build_cost_table,
    build_importance_table,
    build_trial_table,
    draw_parallels,
)
from dj2mgm.features.studies.study_records import ShownBatch, ShownSearch, ShownTrial
from dj2mgm.features.studies.study_table import StudyPageContent
from dj2mgm.reporting.comparison import HeadlineScore
from dj2mgm.reporting.rendering import build_template_environment

HEADLINE = HeadlineScore("VQA accuracy", "finetune/own", "vqa_accuracy", 0.01)
GAIN = HeadlineScore("gain over a shuffled image", "finetune/difference", "answer_log_likelihood", 0.01)
AXES = {"rate": Interval(low=0.0, high=1.0), "kind": ["a", None], "useless": Interval(low=1, high=9)}


def search(**values) -> ShownSearch:
    numbers, trials = random.Random(0), []
    for index in range(24):
        kind = numbers.choice(["a", None])
        changes = {"rate": numbers.random(), "kind": kind, "useless": numbers.randint(1, 9)}
        score = 0.5 - (changes["rate"] - 0.3) ** 2 - (0.01 if kind else 0.0)
        scores = [score, None] if index else [score, 0.7]
        trials.append(ShownTrial(name=f"t{index}", changes=changes, scores=scores))
    return ShownSearch(progress="Spent.", trials=trials, axes=AXES, **{"rungs": [0.25, 1.0]} | values)


def test_the_decisive_setting_is_the_most_important():
    [table] = build_importance_table(search(), HEADLINE)
    assert [row[0] for row in table.rows][0] == "rate" and int(table.rows[0][1].split()[0]) > 50
    low, high = (float(end) for end in table.rows[0][2].split(" to "))
    assert 0.0 <= low < 0.3 < high <= 0.6, "the best quarter is around 0.3"
    assert sum(int(row[1].split()[0]) for row in table.rows) in (99, 100, 101)
    few = search()
    assert build_importance_table(few.model_copy(update={"trials": few.trials[:7]}), HEADLINE) == []


def test_each_trial_is_a_line_through_its_settings_and_score():
    shown = search()
    plot = draw_parallels(shown, HEADLINE)
    assert [axis[0] for axis in plot.axes] == ["rate", "kind", "useless", "VQA accuracy"]
    assert plot.axes[0][1:] == ("0", "1") and plot.axes[1][1:] == ("a", "None")
    assert sum(line.best for line in plot.lines) == 6 and plot.lines[-1].points[-1] == (3, 0.0), "the best, at the top"
    best = next(trial for trial in shown.trials if plot.lines[-1].label.startswith(f"{trial.name}: "))
    assert plot.lines[-1].points[0] == (0, round(100 - 100 * best.changes["rate"], 2))
    assert plot.lines[-1].points[1] == (1, 100.0 if best.changes["kind"] == "a" else 0.0)
    page = StudyPageContent("title", [], "Variant", [], [], parallels=plot)
    html = build_template_environment(page.template.parent).get_template(page.template.name).render(page=page)
    assert html.count("<polyline") == 24 and html.count('<polyline class="best"') == 6
    few = shown.model_copy(update={"trials": shown.trials[:7]})
    assert draw_parallels(few, HEADLINE) is None


def test_all_trials_are_listed_with_full_trainings_first():
    [table] = build_trial_table(search(), [GAIN, HEADLINE], HEADLINE)
    assert len(table.rows) == 24 and table.rows[0][:3][0] == "t0" and table.rows[0][2] == "70.0 %"
    assert table.note.startswith(
        "Scores are the VQA accuracy. Trainings on 25 % of the rows are scored by the gain over a shuffled image"
    )
    later = [float(row[1]) for row in table.rows[1:]]
    assert later == sorted(later, reverse=True)
    assert build_trial_table(search(rungs=[1.0]), [HEADLINE], HEADLINE) == []


def test_planned_costs_are_compared_with_measured_ones():
    batches = [
        ShownBatch(step="explore", fraction=0.25, runs=4, price=30.0, seconds=240.0),
        ShownBatch(step="promote", fraction=1.0, runs=1, price=None, seconds=90.0),
        ShownBatch(step="promote", fraction=1.0, runs=0, price=1.0, seconds=None),
    ]
    [table] = build_cost_table(search(batches=batches))
    assert [row[0] for row in table.rows] == ["1: new trials", "2: more rows"]
    assert table.rows[0][1:3] == ["25 %", "4"] and table.rows[0][-1] == "2.00" and table.rows[1][-1] == "–"
    assert build_cost_table(search()) == []
