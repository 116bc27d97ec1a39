# Make a dataset in the workflow's formats: render scenes (config/datasets/shapes.yaml), or convert the user's files.
from functools import cache

from dj2mgm.dataset_resolution.experiment_dataset import (
    list_dataset_files,
    list_image_path_files,
)
from dj2mgm.storage.image_files import IMAGE_SUFFIXES


def dataset_images(wildcards):
    """Params function: a digest of the user's own images in a dataset."""
    return FINGERPRINTS.hash_images(
        list_image_path_files(find_used_dataset(wildcards).settings)
    )


@cache
def list_source_files(dataset):
    """List them once, because Snakemake evaluates input functions and params several times."""
    return check_user_files(list_dataset_files(RUNS.datasets[dataset].settings))


def source_files(wildcards):
    """Return the user's own files of a dataset; the embedded one has none."""
    return list_source_files(find_used_dataset(wildcards).name)


def row_files(wildcards):
    """Input function: the user's own files, without images and their captions.

    Snakemake needs up to a millisecond for each input. It notices changes of the others by the digest of all files,
    which leaves out files below results/.
    """
    return [
        file
        for file in source_files(wildcards)
        if file.startswith("results/")
        or not file.lower().endswith((*IMAGE_SUFFIXES, ".txt"))
    ]


rule make_dataset:
    input:
        row_files,
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
        **stage_resources(SMALL_STAGE_MB, minutes=60),
    params:
        content=hash_user_files(source_files),
        images=dataset_images,
        folder=subpath(output.summary, parent=True),
    shell:
        build_stage_command(
            "make_dataset.py --config {input.config:q} --output-dir {params.folder:q}"
        )
