# Make a dataset in the workflow's formats: render scenes (config/datasets/shapes.yaml), or convert the user's files.
from dj2mgm.dataset_resolution.experiment_dataset import (
    list_dataset_files,
    list_image_path_files,
)


def dataset_images(wildcards):
    """Params function: a digest of the user's own images in a dataset."""
    return FINGERPRINTS.hash_images(
        list_image_path_files(find_used_dataset(wildcards).settings)
    )


def source_files(wildcards):
    """Input function: the user's own files of a dataset; none of the embedded one."""
    with raising_user_errors():
        return check_user_files(
            list_dataset_files(find_used_dataset(wildcards).settings)
        )


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
