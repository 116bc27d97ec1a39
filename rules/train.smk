# Both training stages, under the deepspeed launcher. Each resumes from the checkpoints beside its outputs.
rule pretrain:
    input:
        model_file,
        config="results/{experiment}/pretrain/config.yaml",
        data=rules.write_jsonl.output.pretrain,
        code=code("pretrain.py"),
    output:
        projector="results/{experiment}/pretrain/projector.safetensors",
        steps="results/{experiment}/pretrain/metrics.jsonl",
        metrics="results/{experiment}/pretrain/metrics.json",
    log:
        "results/{experiment}/pretrain/pretrain.log",
    benchmark:
        "results/{experiment}/pretrain/pretrain.benchmark.tsv"
    conda:
        "../envs/train.yaml"
    threads: 8
    resources:
        gpu=gpus,
        mem_mb=48000,
        runtime=1440,
    params:
        gpus=gpus,
        port=free_port,
        model=model_folder,
    shell:
        "deepspeed --num_gpus {params.gpus} --master_port {params.port} workflow_scripts/pretrain.py"
        " --config {input.config:q} --data {input.data:q} --model {params.model:q}"
        " --output-dir results/{wildcards.experiment:q}/pretrain 2>&1 | tee {log:q}"


rule finetune:
    input:
        model_file,
        config="results/{experiment}/finetune/config.yaml",
        data=rules.write_jsonl.output.finetune,
        projector=rules.pretrain.output.projector,
        code=code("finetune.py"),
    output:
        adapter=multiext(
            "results/{experiment}/finetune/adapter/",
            "adapter_config.json",
            "adapter_model.safetensors",
        ),
        projector="results/{experiment}/finetune/projector.safetensors",
        steps="results/{experiment}/finetune/metrics.jsonl",
        metrics="results/{experiment}/finetune/metrics.json",
    log:
        "results/{experiment}/finetune/finetune.log",
    benchmark:
        "results/{experiment}/finetune/finetune.benchmark.tsv"
    conda:
        "../envs/train.yaml"
    threads: 8
    resources:
        gpu=gpus,
        mem_mb=48000,
        runtime=1440,
    params:
        gpus=gpus,
        port=free_port,
        model=model_folder,
    shell:
        "deepspeed --num_gpus {params.gpus} --master_port {params.port} workflow_scripts/finetune.py"
        " --config {input.config:q} --data {input.data:q} --model {params.model:q}"
        " --projector {input.projector:q} --output-dir results/{wildcards.experiment:q}/finetune"
        " 2>&1 | tee {log:q}"
