# Write the pages that compare experiments.
from dj2mgm.runs import pages

# Files next to a report that features write before it, with the wildcard `page`.
REPORT_FILES = []


rule compare_experiments:
    input:
        lambda w: list_page_files(pages.list_page_experiments(RUNS, w.page)),
        lambda w: expand(REPORT_FILES, page=w.page),
        config="results/{page}/config.yaml",
        templates=list_templates("report*.j2"),
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
