# Search for copies of evaluation images in the training data. The embedded dataset is left out, because its held-out
# scenes are drawn in the same way as its training scenes.
from itertools import chain

from dj2mgm.runs.pages import list_decontamination_images

# Features add the files of benchmarks, by benchmark and key; `images` is a folder.
BENCHMARK_FILES = {}


def decontamination_files(wildcards):
    """Input function: the user's own files that training images are compared with."""
    images = list_decontamination_images(RUNS)
    files = chain.from_iterable(map(dict.items, BENCHMARK_FILES.values()))
    return check_user_files([file for key, file in files if key != "images"] + images)


rule find_leaks:
    input:
        decontamination_files,
        pairs="results/datasets/{dataset}/pretrain.jsonl",
        instructions="results/datasets/{dataset}/finetune.json",
        evaluation="results/datasets/{dataset}/evaluation.jsonl",
        config="results/datasets/{dataset}/leaks/config.yaml",
        code=list_script_files("find_leaks.py"),
    output:
        leaks="results/datasets/{dataset}/leaks/leaks.jsonl",
        summary="results/datasets/{dataset}/leaks/summary.json",
    log:
        "results/datasets/{dataset}/leaks/find_leaks.log",
    benchmark:
        "results/datasets/{dataset}/leaks/find_leaks.benchmark.tsv"
    conda:
        "../envs/evaluate.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=120),
    params:
        content=hash_user_files(decontamination_files),
        folder=subpath(input.pairs, parent=True),
    shell:
        build_stage_command(
            "find_leaks.py --config {input.config:q} --dataset {params.folder:q}"
            " --output-dir {params.folder:q}/leaks"
        )
