# Run tasks of lmms-eval. Each task is read once, answered by the fine-tuned model of every run and by the model before
# training, and scored by its own metrics.
from snakemake.settings.types import DeploymentMethod
from dj2mgm.errors import InputError
from dj2mgm.features.lmms_eval.lmms_eval_keys import (
    DATA_SUFFIXES,
    check_lmms_eval,
    find_evaluation_data,
)
from dj2mgm.storage.files import find_files


wildcard_constraints:
    evaluations="(base_)?evaluations",
    task=match_any(RUNS.shared.evaluations),


def task_settings(task):
    """Return the task of lmms-eval, and the folder of its data."""
    data = find_evaluation_data(task, RUNS.shared.evaluation_data)
    return {"task": task, "data": str(data)}


SETTINGS_FILES["configure_evaluation"] = SettingsFile(
    "results/evaluations/{task}/config.yaml", lambda w: task_settings(w.task)
)


def evaluation_data(wildcards):
    """Input function: the files of a task's data, without leftover files of downloads."""
    if DeploymentMethod.CONDA not in workflow.deployment_settings.deployment_method:
        check_lmms_eval()
    files = find_files(task_settings(wildcards.task)["data"], DATA_SUFFIXES)
    return check_user_files(map(str, files))


rule read_evaluation:
    input:
        evaluation_data,
        config="results/evaluations/{task}/config.yaml",
        code=list_script_files("read_evaluation.py"),
    output:
        images=directory("results/evaluations/{task}/images"),
        decoding="results/evaluations/{task}/decoding.json",
        questions="results/evaluations/{task}/questions.jsonl",
    log:
        "results/evaluations/{task}/read_evaluation.log",
    benchmark:
        "results/evaluations/{task}/read_evaluation.benchmark.tsv"
    priority: 100  # so that an unsupported task fails before a training starts
    conda:
        "../../envs/lmms_eval.yaml"
    resources:
        **stage_resources(CLIP_STAGE_MB, minutes=120),
    params:
        content=hash_user_files(evaluation_data),
    shell:
        build_stage_command(
            "read_evaluation.py --config {input.config:q}"
            " --output-dir results/evaluations/{wildcards.task:q}"
        )


rule answer_evaluation:
    input:
        model_files,
        answering_weights("evaluations"),
        config="results/{run}/{evaluations}/{task}/config.yaml",
        questions="results/evaluations/{task}/questions.jsonl",
        decoding="results/evaluations/{task}/decoding.json",
        images="results/evaluations/{task}/images",
        code=list_script_files("answer_evaluation.py"),
    output:
        answers="results/{run}/{evaluations}/{task}/answers.jsonl",
    log:
        "results/{run}/{evaluations}/{task}/answer_evaluation.log",
    benchmark:
        "results/{run}/{evaluations}/{task}/answer_evaluation.benchmark.tsv"
    conda:
        "../../envs/evaluate.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        **stage_resources(MODEL_STAGE_MB, minutes=240),
        gpu=single_node_gpus,
    params:
        content=hash_user_files(model_files),
        model=model_folder,
        questions=subpath(input.questions, parent=True),
        finetuned=finetuned_flags("evaluations"),
    shell:
        build_stage_command(
            "answer_evaluation.py --config {input.config:q} --questions {params.questions:q}"
            " --model={params.model:q} {params.finetuned:q}"
            " --output-dir results/{wildcards.run:q}/{wildcards.evaluations:q}/{wildcards.task:q}"
        )


rule score_evaluation:
    input:
        evaluation_data,
        config="results/evaluations/{task}/config.yaml",
        answers="results/{run}/{evaluations}/{task}/answers.jsonl",
        code=list_script_files("score_evaluation.py"),
    output:
        scores="results/{run}/{evaluations}/{task}/scores.jsonl",
        metrics="results/{run}/{evaluations}/{task}/metrics.json",
    log:
        "results/{run}/{evaluations}/{task}/score_evaluation.log",
    benchmark:
        "results/{run}/{evaluations}/{task}/score_evaluation.benchmark.tsv"
    conda:
        "../../envs/lmms_eval.yaml"
    resources:
        **stage_resources(CLIP_STAGE_MB, minutes=120),
    params:
        content=hash_user_files(evaluation_data),
    shell:
        build_stage_command(
            "score_evaluation.py --config {input.config:q} --answers {input.answers:q}"
            " --output-dir results/{wildcards.run:q}/{wildcards.evaluations:q}/{wildcards.task:q}"
        )


def evaluation_report(wildcards):
    """Input function: the report of all compared experiments, with the scores of tasks."""
    if not RUNS.shared.evaluations:
        raise InputError(
            "evaluations is empty: name tasks of lmms-eval in config/config.yaml, or with "
            "--config 'evaluations=[pope]' (docs/features/lmms_eval.md)"
        )
    for task in RUNS.shared.evaluations:
        task_settings(task)
    return target_files("evaluate", f"results/{RESULTS_PREFIX}report/report.html")(
        wildcards
    )


rule evaluate:
    input:
        evaluation_report,
    localrule: True
