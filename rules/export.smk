# Export the pairs that an experiment trains on as a dataset: `snakemake export --config experiment=dj_synth`.


include: "inputs/export.smk"


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
