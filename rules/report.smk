# Experiments side by side on one self-contained page, and what each operator of a recipe is worth.
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
        lambda w: evaluated_files(RUNS.page(RUNS.ablation)),
        config="results/ablation/config.yaml",
        templates=["workflow_scripts/reporting/ablation.html.j2"],
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
        logged("python workflow_scripts/tabulate_ablation.py --config {input.config:q} --output-dir results/ablation")
