# Before anything is trained: DeepSpeed configurations for other numbers of GPUs, for the reference's model.
PLANNED = RUNS.configs[REFERENCE]["model"]["name"]


rule deepspeed_configs:
    input:
        foundation_files(PLANNED),
        config=f"results/models/{PLANNED}/config.yaml",
        code=code("write_deepspeed_configs.py"),
    output:
        expand("results/deepspeed_configs/deepspeed_{gpus}gpu.json", gpus=[1, 2, 4, 6, 8]),
        multiext("results/deepspeed_configs/", "zero2_offload.json", "zero3.json", "zero3_offload.json"),
    log:
        "results/deepspeed_configs/write_deepspeed_configs.log",
    localrule: True
    conda:
        "../envs/train.yaml"
    shell:
        logged(
            "python workflow_scripts/write_deepspeed_configs.py --config {input.config:q}"
            " --output-dir results/deepspeed_configs"
        )
