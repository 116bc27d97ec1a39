"""A change reruns its stage and all later stages, but no earlier one."""

import shutil

import pytest

from edited_files import edit_file
from small_project import Project
from tiny_clip import save_tiny_clip

REPORT = {"write_explorers", "compare_experiments"}
EVALUATE = {"generate_answers", "evaluate_clip", "evaluate_vqa"} | REPORT
FINETUNE = {"finetune"} | EVALUATE
PRETRAIN = {"pretrain"} | FINETUNE
JSONL = {"write_jsonl"} | PRETRAIN
FILTER = {"filter_data"} | JSONL


CONFIG, SMALL = "config/config.yaml", "config/models/small.yaml"
LIBRARY = "workflow_scripts/dj2mgm"


@pytest.mark.parametrize(
    ("file", "old", "new", "rules"),
    [
        (CONFIG, "    r: 16", "    r: 8", FINETUNE),
        (CONFIG, 'question_prompt: "{question}"', "question_prompt: '{question}?'", EVALUATE),  # scored in training too
        (CONFIG, "  questions: 300", "  questions: 0", PRETRAIN),  # no scores during training
        pytest.param(SMALL, "learning_rate: 3.0e-3", "learning_rate: 2.0e-3", PRETRAIN, marks=pytest.mark.slow),
        pytest.param(SMALL, "max_new_tokens: 12", "max_new_tokens: 13", EVALUATE, marks=pytest.mark.slow),
        ("config/recipes/baseline.yaml", "max_ratio: 4.0", "max_ratio: 3.5", FILTER),
        (f"{LIBRARY}/training/checkpoints.py", "import shutil", "import shutil  # touched", PRETRAIN),
        (f"{LIBRARY}/juicer/operators/image_file_operators.py", '"""', '"""Touched. ', FILTER),
    ],
    ids=["rank", "prompt", "scores", "rate", "answers", "recipe", "trainer", "operator"],
)
def test_a_change_reruns_its_stage_and_all_later_ones(finished, file, old, new, rules):
    with edit_file(finished.folder / file, old, new):
        assert finished.jobs() == rules


def test_comments_and_a_touched_module_rerun_nothing(finished):
    (finished.folder / "workflow_scripts/dj2mgm/training/checkpoints.py").touch()
    folder = finished.folder / "config"
    with edit_file(folder / "config.yaml", "seeds: [0]", "seeds: [0] # a comment"):
        with edit_file(folder / "recipes/baseline.yaml", "process:", "# a comment\nprocess:"):
            assert finished.jobs() == set()


def test_another_judge_reruns_its_scores_and_the_report_only(finished, tmp_path):
    for key in ("judge_clip", "second_judge"):
        judge = save_tiny_clip(tmp_path / key)
        with edit_file(finished.folder / "config/config.yaml", f"  {key}: null", f"  {key}: {judge}"):
            assert finished.jobs() == {"evaluate_clip"} | REPORT


def test_files_of_a_recipe_are_inputs_of_its_stage(fresh):
    (fresh.folder / "results/clip").mkdir(parents=True)
    for file in ("words.txt", "results/clip/model.safetensors"):
        (fresh.folder / file).touch()
    for argument, file, config in (
        ("image_text_similarity_filter: {hf_clip: results/clip}", "results/clip/model.safetensors", ()),
        ("text_length_filter: {text_key: words.txt}", "words.txt", ("trusted_recipes=true",)),
    ):
        with edit_file(fresh.folder / "config/recipes/baseline.yaml", "process:", f"process:\n  - {argument}"):
            printed = fresh.run("baseline", "--dry-run", config=config)
        assert file in printed.split("rule filter_data:")[1].split("output:")[0]


def test_a_moved_project_reruns_from_its_training_files(finished, tmp_path):
    moved = Project(shutil.copytree(finished.folder, tmp_path / "moved"))
    assert moved.jobs() == JSONL
