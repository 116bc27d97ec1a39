# Write the training files: LLaVA conversations with absolute image paths, every image opened and verified.


include: "inputs/jsonl.smk"


rule write_jsonl:
    input:
        config="results/{run}/jsonl/config.yaml",
        pairs=pairs_file,
        reference=reference_summary,
        counted=counted_summary,
        instructions=dataset_file("finetune.json"),
        synthesized=instruction_output("synthesized.jsonl"),
        evaluation=dataset_file("evaluation.jsonl"),
        leaks=dropped_leaks,
        code=list_script_files("write_jsonl.py"),
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
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=60,
    params:
        leaks=optional_flag("--leaks", "leaks"),
        synthesized=optional_flag("--synthesized", "synthesized"),
        same_samples=optional_flag("--same-samples-as", "reference"),
        same_rows=optional_flag("--same-rows-as", "counted"),
    shell:
        build_stage_command(
            "write_jsonl.py",
            "--config {input.config:q} --pairs {input.pairs:q}"
            " --instructions {input.instructions:q} --evaluation {input.evaluation:q}"
            " {params.same_samples:q} {params.same_rows:q} {params.leaks:q} {params.synthesized:q}"
            " --output-dir results/{wildcards.run:q}/jsonl",
        )
