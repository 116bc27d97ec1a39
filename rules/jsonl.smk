# Writes the training files: LLaVA conversations with absolute image paths, every image opened and verified.


rule write_jsonl:
    input:
        config="results/{run}/jsonl/config.yaml",
        pairs=pairs,
        budget=budget,
        sizes=same_size,
        instructions=dataset_file("finetune.json"),
        synthesized=instruction_output("synthesized.jsonl"),
        evaluation=dataset_file("evaluation.jsonl"),
        leaks=dropped_leaks,
        code=code("write_jsonl.py"),
    output:
        pretrain="results/{run}/jsonl/pretrain.jsonl",
        finetune="results/{run}/jsonl/finetune.jsonl",
        summary="results/{run}/jsonl/summary.json",
    log:
        "results/{run}/jsonl/write_jsonl.log",
    benchmark:
        "results/{run}/jsonl/write_jsonl.benchmark.tsv"
    conda:
        "../envs/jsonl.yaml"
    resources:
        mem_mb=mem_with_retries(4000),
        runtime=60,
    params:
        leaks=leaks_flag,
        synthesized=lambda w, input: (
            ["--synthesized", input.synthesized] if input.synthesized else []
        ),
        budget=lambda w, input: (
            ["--same-samples-as", input.budget] if input.budget else []
        ),
        sizes=lambda w, input: (["--same-rows-as", input.sizes] if input.sizes else []),
    shell:
        stage_command(
            "write_jsonl.py",
            "--config {input.config:q} --pairs {input.pairs:q}"
            " --instructions {input.instructions:q} --evaluation {input.evaluation:q} {params.budget:q} {params.sizes:q} {params.leaks:q}"
            " {params.synthesized:q}"
            " --output-dir results/{wildcards.run:q}/jsonl",
        )
