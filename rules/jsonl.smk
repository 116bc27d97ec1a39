# The training files: LLaVA conversations with absolute image paths, every image opened and verified.
rule write_jsonl:
    input:
        config="results/{experiment}/jsonl/config.yaml",
        filtered=rules.filter_data.output.filtered,
        instructions=dataset_file("finetune.json"),
        code=code("write_jsonl.py"),
    output:
        pretrain="results/{experiment}/jsonl/pretrain.jsonl",
        finetune="results/{experiment}/jsonl/finetune.jsonl",
        summary="results/{experiment}/jsonl/summary.json",
    log:
        "results/{experiment}/jsonl/write_jsonl.log",
    benchmark:
        "results/{experiment}/jsonl/write_jsonl.benchmark.tsv"
    conda:
        "../envs/jsonl.yaml"
    resources:
        mem_mb=4000,
        runtime=60,
    shell:
        "python workflow_scripts/write_jsonl.py --config {input.config:q} --filtered {input.filtered:q}"
        " --instructions {input.instructions:q} --output-dir results/{wildcards.experiment:q}/jsonl"
        " 2>&1 | tee {log:q}"
