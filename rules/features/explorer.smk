# Write the explorer's pages next to a report, which links to them.
from dj2mgm.runs import pages

REPORT_FILES.append("results/{page}/explorer")


rule write_explorers:
    input:
        lambda w: list_page_files(pages.list_page_experiments(RUNS, w.page)),
        config="results/{page}/config.yaml",
        templates=list_templates(feature="explorer"),
        code=list_script_files("write_explorers.py"),
    output:
        directory("results/{page}/explorer"),
    log:
        "results/{page}/write_explorers.log",
    benchmark:
        "results/{page}/write_explorers.benchmark.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=30,
    shell:
        build_stage_command(
            "write_explorers.py", "--config {input.config:q} --output {output:q}"
        )
