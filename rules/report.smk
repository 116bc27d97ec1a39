# Pages that compare experiments: the report, and those of studies.


rule compare_experiments:
    input:
        lambda w: page_files(pages.experiments_on(RUNS, w.page)),
        config="results/{page}/config.yaml",
        templates=templates("report*.j2", "explore*"),
        code=script_files("compare_experiments.py"),
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


rule compare_study:
    input:
        compared_files,
        config=f"results/{RESULTS_PREFIX}{{study}}/config.yaml",
        templates=templates("variants*.j2"),
        code=script_files("compare_study.py"),
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
        mem_mb=mem_with_retries(4000),
        runtime=30,
    shell:
        stage_command(
            "compare_study.py",
            f"--config {{input.config:q}} --output-dir results/{RESULTS_PREFIX}{{wildcards.study:q}}",
        )
