# Pages that compare experiments: the report, the ablation of a recipe's operators, and fine-tuning methods.


rule compare_experiments:
    input:
        lambda w: page_files(pages.experiments_on(RUNS, w.page)),
        config="results/{page}/config.yaml",
        templates=templates("report*.j2", "explore*"),
        code=code("compare_experiments.py"),
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
        mem_mb=mem_with_retries(4000),
        runtime=30,
    shell:
        stage_command(
            "compare_experiments.py",
            "--config {input.config:q}" " --output-dir results/{wildcards.page:q}",
        )


rule compare_variants:
    input:
        lambda w: page_files(pages.experiments_by_page(RUNS)[w.variants]),
        config=f"results/{PLACE}{{variants}}/config.yaml",
        templates=templates("variants*.j2"),
        code=code("compare_variants.py"),
    output:
        page=report(
            f"results/{PLACE}{{variants}}/{{variants}}.html",
            caption="../report/variants.rst",
            category=lambda w: (
                "Ablation" if w.variants == "ablation" else "Fine-tuning"
            ),
            labels={"page": "{variants}"},
        ),
        table=f"results/{PLACE}{{variants}}/{{variants}}.csv",
    log:
        f"results/{PLACE}{{variants}}/compare_variants.log",
    benchmark:
        f"results/{PLACE}{{variants}}/compare_variants.benchmark.tsv"
    wildcard_constraints:
        variants="|".join(pages.experiments_by_page(RUNS)),
    conda:
        "../envs/report.yaml"
    resources:
        mem_mb=mem_with_retries(4000),
        runtime=30,
    shell:
        stage_command(
            "compare_variants.py",
            f"--config {{input.config:q}} --output-dir results/{PLACE}{{wildcards.variants:q}}",
        )
