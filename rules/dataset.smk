# Make a dataset in the workflow's formats: render scenes (config/datasets/shapes.yaml), or convert the user's files.


include: "inputs/dataset.smk"


rule make_dataset:
    input:
        source_files,
        config="results/datasets/{dataset}/config.yaml",
        code=list_script_files("make_dataset.py"),
    output:
        pretrain="results/datasets/{dataset}/pretrain.jsonl",
        finetune="results/datasets/{dataset}/finetune.json",
        evaluation="results/datasets/{dataset}/evaluation.jsonl",
        summary="results/datasets/{dataset}/summary.json",
    log:
        "results/datasets/{dataset}/make_dataset.log",
    benchmark:
        "results/datasets/{dataset}/make_dataset.benchmark.tsv"
    conda:
        "../envs/dataset.yaml"
    resources:
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=60,
    params:
        content=hash_user_files(source_files),
        images=dataset_images,
        folder=subpath(output.summary, parent=True),
    shell:
        build_stage_command(
            "make_dataset.py",
            "--config {input.config:q} --output-dir {params.folder:q}",
        )
