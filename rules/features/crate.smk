# Write the origin of a page's figures as an RO-Crate: `snakemake crate`.
from snakemake import __version__ as SNAKEMAKE
from dj2mgm.features.crate.crate_record import build_crate_settings
from dj2mgm.runs import pages
from dj2mgm.runs.command_messages import ReadingTarget
from dj2mgm.runs.experiments import REFERENCE


def crate_settings(wildcards):
    """Return the settings of a page's crate."""
    return build_crate_settings(RUNS, wildcards.page) | {"snakemake": SNAKEMAKE}


READING_TARGETS["crate"] = ReadingTarget(r"results/(.+)/crate/run\.crate\.zip")
SETTINGS_FILES["configure_crate"] = SettingsFile(
    "results/{page}/crate/config.yaml", crate_settings
)


rule write_crate:
    input:
        page_files,
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
        "../../envs/crate.yaml"
    resources:
        **stage_resources(SCRIPT_MB, minutes=240),
    shell:
        build_stage_command(
            "write_crate.py --config {input.config:q} --output {output:q}"
        )


rule crate:
    input:
        requested_files(
            REFERENCE,
            lambda run: f"results/{pages.locate_page_folder(RUNS, run.experiment)}/crate/run.crate.zip",
        ),
    localrule: True
