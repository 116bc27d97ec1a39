# Write the provenance of a page's figures as an RO-Crate, and reproduce the run of a crate.
import sys

from dj2mgm.runs import pages
from dj2mgm.runs.experiments import REFERENCE


include: "inputs/crate.smk"


rule write_crate:
    input:
        lambda w: list_page_files(pages.list_page_experiments(RUNS, w.page)),
        page="results/{page}/report.html",
        table="results/{page}/comparison.csv",
        config="results/{page}/crate/config.yaml",
        code=list_script_files("write_crate.py"),
    output:
        "results/{page}/crate/run.crate.zip",
    log:
        "results/{page}/crate/write_crate.log",
    benchmark:
        "results/{page}/crate/write_crate.benchmark.tsv"
    conda:
        "../envs/crate.yaml"
    resources:
        mem_mb=mem_with_retries(SCRIPT_MB),
        runtime=240,
    shell:
        build_stage_command(
            "write_crate.py", "--config {input.config:q} --output {output:q}"
        )


# It has no output, so it runs at every request. Its own Snakemake works in another folder, because this one is locked.
rule reproduce:
    log:
        "results/reproduced/reproduce.log",
    localrule: True
    conda:
        "../envs/crate.yaml"
    threads: workflow.resource_settings.cores or 1
    params:
        crate=crate_to_reproduce,
        folders=RUNS.shared.crate_folders,
        python=sys.executable,
        deployment=sorted(map(str, workflow.deployment_settings.deployment_method)),
    shell:
        f"python {quote_script_path('reproduce.py')} --crate={{params.crate:q}} --python={{params.python:q}}"
        f" --folders {{params.folders:q}} --cores {{threads:q}} --deployment {{params.deployment:q}} {PRINT_AND_LOG}"


rule crate:
    input:
        requested_files(
            None,
            REFERENCE,
            lambda run: f"results/{pages.locate_page_folder(RUNS, run.experiment)}/crate/run.crate.zip",
        ),
    localrule: True
