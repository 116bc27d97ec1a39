# Data-Juicer: what the recipe keeps, and for every row it drops, which operator dropped it.
rule filter_data:
    input:
        config="results/{experiment}/filter/config.yaml",
        data=dataset_file("pretrain.jsonl"),
        code=code("filter_data.py", loaded_by_path="juicer/operators/*.py"),
    output:
        filtered="results/{experiment}/filter/filtered.jsonl",
        stats="results/{experiment}/filter/stats.jsonl",
        dropped="results/{experiment}/filter/dropped.jsonl",
        summary="results/{experiment}/filter/summary.json",
    log:
        "results/{experiment}/filter/filter_data.log",
    benchmark:
        "results/{experiment}/filter/filter_data.benchmark.tsv"
    conda:
        "../envs/filter.yaml"
    resources:
        mem_mb=4000,
        runtime=120,
    shell:
        "python workflow_scripts/filter_data.py --config {input.config:q} --data {input.data:q}"
        " --output-dir results/{wildcards.experiment:q}/filter 2>&1 | tee {log:q}"
