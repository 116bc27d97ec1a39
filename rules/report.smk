# Write the pages that compare experiments: the report, and a page for each study.
from dj2mgm.runs import pages
from dj2mgm.runs.stage_settings import count_gpus_per_node
from dj2mgm.runs.studies import merged_mixtures


rule compare_experiments:
    input:
        lambda w: list_page_files(pages.list_page_experiments(RUNS, w.page)),
        config="results/{page}/config.yaml",
        templates=list_templates("report*.j2", "explore*"),
        code=list_script_files("compare_experiments.py"),
    output:
        page=report(
            "results/{page}/report.html",
            caption="../report/comparison.rst",
            category="Report",
            labels={"page": "{page}"},
        ),
        table="results/{page}/comparison.csv",
        verdict="results/{page}/verdict.json",
        explorer=directory("results/{page}/explorer"),
    log:
        "results/{page}/compare_experiments.log",
    benchmark:
        "results/{page}/compare_experiments.benchmark.tsv"
    conda:
        "../envs/report.yaml"
    resources:
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=30,
    shell:
        build_stage_command(
            "compare_experiments.py",
            "--config {input.config:q}" " --output-dir results/{wildcards.page:q}",
        )


def list_merged_scores(study):
    """Return the file with the scores of a study's merged models; none for other studies."""
    with raising_user_errors():
        file = merged_mixtures.locate_scores_file(RUNS, study)
        if file is None:
            return []
        # called only for its errors, which are then reported before anything runs
        merged_mixtures.build_merge_settings(RUNS, study)
        return [file]


def list_study_experiments(study):
    """Return the experiments on a study's page."""
    with raising_user_errors():
        return pages.list_study_experiments(RUNS, study)


def compared_files(wildcards):
    """Input function: the files that a study's page reads."""
    scores = all_scores(wildcards.study)(wildcards)
    return [
        *scores,
        *list_page_files(list_study_experiments(wildcards.study)),
        *list_merged_scores(wildcards.study),
    ]


rule compare_study:
    input:
        compared_files,
        config=f"results/{RESULTS_PREFIX}{{study}}/config.yaml",
        templates=list_templates("variants*.j2"),
        code=list_script_files("compare_study.py"),
    output:
        page=report(
            f"results/{RESULTS_PREFIX}{{study}}/{{study}}.html",
            caption="../report/study.rst",
            category="Studies",
            labels={"page": "{study}"},
        ),
        table=f"results/{RESULTS_PREFIX}{{study}}/{{study}}.csv",
    log:
        f"results/{RESULTS_PREFIX}{{study}}/compare_study.log",
    benchmark:
        f"results/{RESULTS_PREFIX}{{study}}/compare_study.benchmark.tsv"
    conda:
        "../envs/report.yaml"
    resources:
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=30,
    params:
        folder=subpath(output.table, parent=True),
    shell:
        build_stage_command(
            "compare_study.py",
            "--config {input.config:q} --output-dir {params.folder:q}",
        )


def find_merged_run(wildcards):
    """Return the first run of the experiment whose mixtures are merged."""
    return RUNS.first_seed(RUNS.experiments.sources[wildcards.study].experiment)


def merged_model_files(wildcards):
    """Input function: the model that the merged LoRAs were trained from."""
    return list_model_files(find_merged_run(wildcards).config.model)


def merged_adapters(wildcards):
    """Input function: the weights of stage 2 of each source alone."""
    with raising_user_errors():
        folders = merged_mixtures.build_merge_settings(
            RUNS, wildcards.study
        ).sources.values()
    names = list_stage_2_weights(find_merged_run(wildcards))
    return [f"{folder}/{name}" for folder in folders for name in names]


# Mixtures of sources are not trained here: the LoRAs of single sources are merged, and the merged models are scored.
rule score_mixtures:
    input:
        merged_model_files,
        adapters=merged_adapters,
        config=f"results/{RESULTS_PREFIX}{{study}}/merged/config.yaml",
        generate=lambda w: f"{RUNS.find_stage_folder(find_merged_run(w), 'generate')}/config.yaml",
        evaluation=lambda w: f"results/datasets/{find_merged_run(w).dataset.name}/evaluation.jsonl",
        code=list_script_files("score_mixtures.py"),
    output:
        f"results/{RESULTS_PREFIX}{{study}}/merged/scores.yaml",
    log:
        f"results/{RESULTS_PREFIX}{{study}}/merged/score_mixtures.log",
    benchmark:
        f"results/{RESULTS_PREFIX}{{study}}/merged/score_mixtures.benchmark.tsv"
    conda:
        "../envs/evaluate.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        gpu=lambda w: count_gpus_per_node(find_merged_run(w).config),
        mem_mb=mem_with_retries(MODEL_STAGE_MB),
        runtime=1440,
    params:
        content=hash_user_files(merged_model_files),
        model=lambda w: find_merged_run(w).config.model.folder,
        folder=subpath(output[0], parent=True),
    shell:
        build_stage_command(
            "score_mixtures.py",
            "--config {input.config:q} --generate-config {input.generate:q} --model={params.model:q}"
            " --evaluation {input.evaluation:q}"
            " --output-dir {params.folder:q}",
        )
