"""`snakemake evaluate`: jobs, messages about missing inputs, and one task on a finished run."""

import shutil

import pandas
import pytest

from dj2mgm.features.lmms_eval.lmms_eval_keys import LMMS_EVAL
from evaluation_files import write_evaluations
from small_project import Project

ALONE = "report={experiments: [baseline]}"


def with_data(project: Project, *tasks: str) -> tuple[str, ...]:
    """Return the settings of the data, and fake an installed lmms-eval."""
    (project.folder / ".lmms_eval/lmms_eval").mkdir(parents=True)
    for task in tasks:
        (project.folder / "data" / task).mkdir(parents=True)
    return (f"evaluations=[{','.join(tasks)}]", "evaluation_data=data", ALONE)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ((), "evaluations is empty: name tasks of lmms-eval"),
        (("evaluations=[pope]", "evaluation_data=nowhere"), "there is no folder nowhere/pope"),
        (("evaluations=[pope]", "evaluation_data=config"), "lmms-eval is not installed: run `make lmms_eval`"),
    ],
)
def test_missing_inputs_are_reported_before_anything_runs(fresh, config, sentence):
    if "evaluation_data=config" in config:
        (fresh.folder / "config/pope").mkdir()
    assert sentence in " ".join(fresh.run("evaluate", "--dry-run", ok=False, config=config).split())


def test_each_task_is_run_for_every_run_and_once_for_the_base(fresh):
    config = with_data(fresh, "pope", "mmstar")
    counts = fresh.job_counts("evaluate", config=(*config, "seeds=[0,1]"))
    # two seeds and the model before training
    assert [counts[f"{verb}_evaluation"] for verb in ("read", "answer", "score")] == [2, 6, 6]
    assert (counts["finetune"], counts["compare_experiments"]) == (2, 1)


@pytest.mark.skipif(not (LMMS_EVAL / "lmms_eval").is_dir(), reason="not installed: `make lmms_eval` does it")
def test_a_finished_run_gets_its_scores_in_the_report(finished, tmp_path):
    project = Project(shutil.copytree(finished.folder, tmp_path / "copy"))
    project.run("baseline", "--touch")  # its training files contain the path of the original folder
    (project.folder / ".lmms_eval").symlink_to(LMMS_EVAL)
    write_evaluations(project.folder / "data")
    config = ("evaluations=[pope]", "evaluation_data=data", ALONE)
    jobs = {"read_evaluation", "answer_evaluation", "score_evaluation", "write_explorers", "compare_experiments"}
    assert set(project.job_counts("evaluate", config=config)) == jobs
    project.run("evaluate", config=config)
    table = pandas.read_csv(project.folder / "results/small/small/report/comparison.csv")
    rows = table[table["metric"] == "pope/pope_accuracy"].set_index("group")
    groups = {f"finetune/{images}" for images in ("own", "shuffled", "difference", "none")}
    assert set(rows.index) == groups | {"base/own"}
    assert rows.loc["finetune/own", "n"] == 8 and rows["value"].abs().max() <= 1
    page = (project.folder / "results/small/small/report/report.html").read_text(encoding="utf-8")
    assert "pope/pope accuracy" in page[page.index("What training changed") :] and "Fine-tuned, no image" in page
    assert project.job_counts("evaluate", config=config) == {}
