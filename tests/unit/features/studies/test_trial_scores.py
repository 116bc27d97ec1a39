"""The score that ranks the trials of a search: the headline, or a weighted sum of scores and GPU hours."""

import pytest

from dj2mgm.errors import InputError
from dj2mgm.features.studies.trial_scores import WEIGHTED_GOAL, find_trial_score, measure_trial
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.storage.files import write_yaml
from evaluated_runs import build_entry, write_dataset, write_run
from training_records import write_training_record


@pytest.fixture
def trial(tmp_path):
    """Write a run with a probability of 0.5, a CLIPScore of 0.25 and an hour of training."""
    images = {f"e{n}": (0.5, 1) for n in range(8)}
    clip = {"finetune/own": {"clip_score": dict.fromkeys(images, (0.25, 1))}}
    run = write_run(tmp_path / "trial", clip, {"finetune/own": {"answer_probability": images}})
    for stage in ("pretrain", "finetune"):
        write_training_record(tmp_path / "trial" / stage, train_seconds=1800.0)
    entries = [build_entry("trial", write_dataset(tmp_path / "datasets/shapes"), {0: run})]
    write_yaml(tmp_path / "config.yaml", {"experiments": entries})
    [experiment] = load_experiments(tmp_path / "config.yaml")
    return experiment


def test_goals_are_a_weighted_sum_of_scores_and_hours(trial):
    goals = {"answer_probability": 1, "clip_score": 0.5, "gpu_hours": -0.01}
    assert find_trial_score([trial], goals, 0.25) == WEIGHTED_GOAL
    scores = 0.5 + 0.5 * 0.25
    assert measure_trial(trial, WEIGHTED_GOAL, goals, 1) == pytest.approx(scores - 0.01 * trial.config.gpus)
    in_all = measure_trial(trial, WEIGHTED_GOAL, goals, 0.25)
    assert in_all == pytest.approx(scores - 0.04 * trial.config.gpus), "a quarter of the rows takes a quarter"
    headline = find_trial_score([trial], {}, 1)
    assert headline.metric == "answer_probability" and measure_trial(trial, headline, {}, 1) == pytest.approx(0.5)
    with pytest.raises(InputError, match="trial does not report vqa_accuracy; choose another score in design.goals"):
        measure_trial(trial, WEIGHTED_GOAL, {"vqa_accuracy": 1}, 1)
