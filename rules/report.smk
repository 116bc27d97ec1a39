# Experiments side by side on one self-contained page; what each operator of a recipe, or each way to fine-tune, is worth.
TABLE_STYLE = "workflow_scripts/reporting/table_style.css.j2"


rule compare_experiments:
    input:
        lambda w: evaluated_files(RUNS.page(experiments_on(w.page))),
        config="results/{page}/config.yaml",
        templates=sorted(glob("workflow_scripts/reporting/report*.j2")),
        code=code("compare_experiments.py"),
    output:
        page=report("results/{page}/report.html", category="Report"),
        table="results/{page}/comparison.csv",
    log:
        "results/{page}/compare_experiments.log",
    benchmark:
        "results/{page}/compare_experiments.benchmark.tsv"
    conda:
        "../envs/report.yaml"
    resources:
        mem_mb=growing(4000),
        runtime=30,
    shell:
        logged(
            "python workflow_scripts/compare_experiments.py --config {input.config:q}"
            " --output-dir results/{wildcards.page:q}"
        )


rule tabulate_ablation:
    input:
        lambda w: evaluated_files(RUNS.page(RUNS.compared_on["ablation"])),
        config="results/ablation/config.yaml",
        templates=["workflow_scripts/reporting/ablation.html.j2", TABLE_STYLE],
        code=code("tabulate_ablation.py"),
    output:
        page=report("results/ablation/ablation.html", category="Ablation"),
        table="results/ablation/ablation.csv",
    log:
        "results/ablation/tabulate_ablation.log",
    benchmark:
        "results/ablation/tabulate_ablation.benchmark.tsv"
    conda:
        "../envs/report.yaml"
    resources:
        mem_mb=growing(4000),
        runtime=30,
    shell:
        logged(
            "python workflow_scripts/tabulate_ablation.py --config {input.config:q} --output-dir results/ablation"
        )


rule compare_tunings:
    input:
        lambda w: evaluated_files(RUNS.page(RUNS.compared_on[w.variants])),
        config="results/{variants}/config.yaml",
        templates=["workflow_scripts/reporting/tuning.html.j2", TABLE_STYLE],
        code=code("compare_tunings.py"),
    output:
        page=report("results/{variants}/{variants}.html", category="Fine-tuning"),
        table="results/{variants}/{variants}.csv",
    log:
        "results/{variants}/compare_tunings.log",
    benchmark:
        "results/{variants}/compare_tunings.benchmark.tsv"
    wildcard_constraints:
        variants="lora_sweep|lora_vs_full",
    conda:
        "../envs/report.yaml"
    resources:
        mem_mb=growing(4000),
        runtime=30,
    shell:
        logged(
            "python workflow_scripts/compare_tunings.py --config {input.config:q}"
            " --output-dir results/{wildcards.variants:q}"
        )
