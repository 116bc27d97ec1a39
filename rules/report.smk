# Write the pages that compare experiments.
# Files next to a report that features write before it, with the wildcard `page`.
REPORT_FILES = []


rule compare_experiments:
    input:
        page_files,
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
        **stage_resources(SMALL_STAGE_MB, minutes=30),
    shell:
        build_stage_command(
            "compare_experiments.py --config {input.config:q}"
            " --output-dir results/{wildcards.page:q}"
        )
