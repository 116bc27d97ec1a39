# Input functions of rules/lmms_eval.smk.
from snakemake.settings.types import DeploymentMethod

from dj2mgm.cli.console import UserError
from dj2mgm.runs.evaluations import DATA_SUFFIXES, check_lmms_eval
from dj2mgm.storage.files import find_files


def evaluation_data(wildcards):
    """Input function: the files of a task's data, without leftover files of downloads."""
    with raising_user_errors():
        if DeploymentMethod.CONDA not in workflow.deployment_settings.deployment_method:
            check_lmms_eval()
        files = find_files(
            build_evaluation_settings(wildcards.task)["data"], DATA_SUFFIXES
        )
    return check_user_files(map(str, files))


def evaluation_report(wildcards):
    """Input function: the report of all compared experiments, with the scores of tasks."""
    if not RUNS.shared.evaluations:
        raise UserError(
            "evaluations is empty: name tasks of lmms-eval in config/config.yaml, or with "
            "--config 'evaluations=[pope]' (docs/evaluation.md)"
        )
    for task in RUNS.shared.evaluations:
        build_evaluation_settings(task)
    return target_files("evaluate", f"results/{RESULTS_PREFIX}report/report.html")(
        wildcards
    )
