# The words of the training captions.
rule count_words:
    input:
        data=stage_output("jsonl", "pretrain.jsonl"),
        code=list_script_files("count_words.py"),
    output:
        "results/{run}/count_words/words.json",
    log:
        "results/{run}/count_words/count_words.log",
    benchmark:
        "results/{run}/count_words/count_words.benchmark.tsv"
    conda:
        "../envs/dataset.yaml"
    resources:
        **stage_resources(SCRIPT_MB, minutes=30),
    shell:
        build_stage_command(
            "count_words.py --data {input.data:q}"
            " --output-dir results/{wildcards.run:q}/count_words"
        )
