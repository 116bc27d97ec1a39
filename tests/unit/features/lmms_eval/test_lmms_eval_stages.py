"""Stages of tasks of lmms-eval in runs."""

from dj2mgm.runs.all_runs import Runs


def test_runs_share_the_models_answers_before_training(write, tmp_path):
    (tmp_path / "pairs.jsonl").touch()
    write("other_data", dataset=".", finetune={"epochs": 2})
    write("other_model", model="tiny-llava")
    runs = Runs({"evaluations": ["pope"], "seeds": [0, 1]})
    owner = {run.name: {stage: runs.reuse.find_owner(run, stage).name for stage in run.settings} for run in runs}
    before = {folder: stages["base_evaluations/pope"] for folder, stages in owner.items()}
    models = ["baseline", "other_model"]
    assert before == {folder: models["model" in folder] for folder in owner}
    assert all(stages["evaluations/pope"] == folder for folder, stages in owner.items() if "other" in folder)
