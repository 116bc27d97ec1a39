# Filter the pairs with the recipe; list every dropped row with the operator that dropped it.


def filter_gpus(wildcards):
    """Resource function: 1 if the filter's recipe uses a CLIP, else 0."""
    return int(RUNS.by_folder(wildcards.run).settings["filter"].clip is not None)


def filter_memory(wildcards):
    """Resource function: the memory of the filter in MB, which may measure with CLIP."""
    return CLIP_STAGE_MB if filter_gpus(wildcards) else SMALL_STAGE_MB


rule filter_data:
    input:
        clip_files("filter"),
        recipe_files("filter"),
        config="results/{run}/filter/config.yaml",
        data=dataset_file("pretrain.jsonl"),
        code=list_script_files("filter_data.py"),
    output:
        filtered="results/{run}/filter/filtered.jsonl",
        stats="results/{run}/filter/stats.jsonl",
        dropped="results/{run}/filter/dropped.jsonl",
        summary="results/{run}/filter/summary.json",
    log:
        "results/{run}/filter/filter_data.log",
    benchmark:
        "results/{run}/filter/filter_data.benchmark.tsv"
    conda:
        "../envs/data_juicer.yaml"
    threads: lambda w: GPU_STAGE_THREADS if filter_gpus(w) else 1
    resources:
        **stage_resources(filter_memory, minutes=120),
        gpu=filter_gpus,
    params:
        content=hash_user_files(clip_files("filter"), recipe_files("filter")),
    shell:
        build_stage_command(
            "filter_data.py --config {input.config:q} --data {input.data:q}"
            " --output-dir results/{wildcards.run:q}/filter"
        )
