# The models a run starts from: tiny ones trained here, or folders and hub ids; put together into one MGM folder.
rule train_clip:
    input:
        config="results/foundation/{model}/clip.yaml",
        code=code("train_clip.py"),
    output:
        clip=multiext(
            "results/foundation/{model}/clip/",
            "config.json",
            "model.safetensors",
            "processor_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
        convnext=multiext(
            "results/foundation/{model}/convnext/", "config.json", "model.safetensors"
        ),
    log:
        "results/foundation/{model}/train_clip.log",
    benchmark:
        "results/foundation/{model}/train_clip.benchmark.tsv"
    conda:
        "../envs/foundation.yaml"
    threads: 2
    resources:
        mem_mb=mem_with_retries(6000),
        runtime=60,
    shell:
        script(
            "train_clip.py",
            "--config {input.config:q}"
            " --output-dir results/foundation/{wildcards.model:q}",
        )


rule train_language_model:
    input:
        config="results/foundation/{model}/language_model.yaml",
        chat_templates=chat_templates("gemma", "plain"),
        code=code("train_language_model.py"),
    output:
        multiext(
            "results/foundation/{model}/language_model/",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
    log:
        "results/foundation/{model}/train_language_model.log",
    benchmark:
        "results/foundation/{model}/train_language_model.benchmark.tsv"
    conda:
        "../envs/foundation.yaml"
    threads: 2
    resources:
        mem_mb=mem_with_retries(6000),
        runtime=60,
    shell:
        script(
            "train_language_model.py",
            "--config {input.config:q}"
            " --output-dir results/foundation/{wildcards.model:q}/language_model",
        )


rule assemble_model:
    input:
        lambda w: foundation_files(w.model),
        config="results/models/{model}/config.yaml",
        code=code("assemble_model.py"),
    output:
        multiext(
            "results/models/{model}/mgm/",
            "config.json",
            "model.safetensors",
            "processor_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
    log:
        "results/models/{model}/assemble_model.log",
    benchmark:
        "results/models/{model}/assemble_model.benchmark.tsv"
    conda:
        "../envs/train.yaml"
    resources:
        mem_mb=mem_with_retries(16000),
        runtime=60,
    shell:
        script(
            "assemble_model.py",
            "--config {input.config:q}"
            " --output-dir results/models/{wildcards.model:q}/mgm",
        )
