# Write the explorer's pages next to a report, which links to them.
REPORT_FILES.append("results/{page}/explorer")


rule write_explorers:
    input:
        page_files,
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
        **stage_resources(SMALL_STAGE_MB, minutes=30),
    shell:
        build_stage_command(
            "write_explorers.py --config {input.config:q} --output {output:q}"
        )
