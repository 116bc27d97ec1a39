# Export the pairs that an experiment trains on as a dataset: `snakemake export --config experiment=dj_synth`.
import os
from dj2mgm.cli.console import UserError


def filter_folders(wildcards):
    """Params function: the output folders of the filter stage and, if it ran on pairs, the synthesize stage."""
    run = RUNS.by_folder(wildcards.run)
    names = ("filter",) if run.selects_instructions else ("filter", "synthesize")
    stages = [stage for stage in names if stage in run.settings]
    return [RUNS.find_stage_folder(run, stage) for stage in stages]


def export_folder(wildcards):
    """Params function: the folder of an export; fails if it cannot be written."""
    folder = f"results/{wildcards.run}/export"
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        raise UserError(
            f"{folder} cannot be written; allow it, or make {folder} a link to a folder on another disk"
        )
    return f"{folder}/{wildcards.format}"


rule export_data:
    input:
        pairs=pairs_file,
        stages=lambda w: [
            f"{folder}/{name}"
            for folder in filter_folders(w)
            for name in ("stats.jsonl", "summary.json")
        ],
        dataset=dataset_file("summary.json"),
        config="results/{run}/export/config.yaml",
        code=list_script_files("export_data.py"),
    output:
        "results/{run}/export/{format}/README.md",
    log:
        "results/{run}/export/{format}.log",
    benchmark:
        "results/{run}/export/{format}.benchmark.tsv"
    wildcard_constraints:
        format="dj|llava|parquet|webdataset",
    conda:
        "../envs/dataset.yaml"
    resources:
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=120,
    params:
        stages=filter_folders,
        folder=export_folder,
    shell:
        build_stage_command(
            "export_data.py",
            "--config {input.config:q} --format {wildcards.format:q} --pairs {input.pairs:q}"
            " --dataset {input.dataset:q} --stages {params.stages:q}"
            " --output-dir {params.folder:q}",
        )


rule export:
    input:
        requested_files(
            None,
            "dj_synth",
            lambda run: f"results/{run.folder}/export/{RUNS.shared.format}/README.md",
        ),
    localrule: True
