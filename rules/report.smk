# Write the pages that compare experiments: the report, and a page for each study.
from dj2mgm.runs import pages
from dj2mgm.runs.stage_settings import count_gpus_per_node


include: "inputs/report.smk"


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
