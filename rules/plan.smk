# The memory plan for this machine, and DeepSpeed configurations for other numbers of GPUs, both for the reference's
# model.
PLANNED = RUNS.experiments.configs[REFERENCE].model


rule deepspeed_configs:
    input:
        foundation_files(PLANNED.name),
        code=code("write_deepspeed_configs.py"),
    output:
        expand(
            "results/deepspeed_configs/deepspeed_{gpus}gpu.json", gpus=[1, 2, 4, 6, 8]
        ),
        multiext(
            "results/deepspeed_configs/",
            "zero2_offload.json",
            "zero3.json",
            "zero3_offload.json",
        ),
    log:
        "results/deepspeed_configs/write_deepspeed_configs.log",
    localrule: True
    conda:
        "../envs/train.yaml"
    params:
        model=lambda wildcards: PLANNED.with_language_model,
    shell:
        stage_command(
            "write_deepspeed_configs.py",
            "--model={params.model:q} --output-dir results/deepspeed_configs",
        )


# It prints the plan, and runs at every request because it has no output.
rule plan:
    input:
        foundation_files(PLANNED.name),
    log:
        "results/plan/plan.log",
    localrule: True
    conda:
        "../envs/train.yaml"
    params:
        flags=plan_flags,
    shell:
        f"python {script_path('plan_memory.py')} {{params.flags:q}} 2> {{log:q}}"
