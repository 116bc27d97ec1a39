# Rewrite captions that do not fit their image, or select instructions. New captions are also kept in results/captions.


include: "inputs/synthesize.smk"


rule synthesize_captions:
    input:
        clip_files("synthesize"),
        recipe_files("synthesize"),
        captioner_files,
        config="results/{run}/synthesize/config.yaml",
        data=stage_output("filter", "filtered.jsonl"),
        instruction_files=instruction_inputs,
        code=list_script_files("synthesize_captions.py"),
    output:
        synthesized="results/{run}/synthesize/synthesized.jsonl",
        stats="results/{run}/synthesize/stats.jsonl",
        dropped="results/{run}/synthesize/dropped.jsonl",
        summary="results/{run}/synthesize/summary.json",
    log:
        "results/{run}/synthesize/synthesize_captions.log",
    benchmark:
        "results/{run}/synthesize/synthesize_captions.benchmark.tsv"
    conda:
        "../envs/data_juicer.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        gpu=single_node_gpus,
        mem_mb=mem_with_retries(MODEL_STAGE_MB),
        runtime=720,
    params:
        content=hash_user_files(
            clip_files("synthesize"), recipe_files("synthesize"), captioner_files
        ),
        captioner=captioner_flags,
        instruction_flags=instruction_flags,
    shell:
        build_stage_command(
            "synthesize_captions.py",
            "--config {input.config:q} --data {input.data:q} {params.captioner:q} {params.instruction_flags:q}"
            " --output-dir results/{wildcards.run:q}/synthesize",
        )
