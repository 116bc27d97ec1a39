# Plan before a training: memory on this machine, the power of a comparison, and DeepSpeed configurations for other
# numbers of GPUs.
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.settings.deepspeed_files import list_written_files


include: "inputs/plan.smk"


PLANNED = RUNS.experiments.configs[REFERENCE].model


rule deepspeed_configs:
    input:
        list_foundation_files(PLANNED.name),
        code=list_script_files("write_deepspeed_configs.py"),
    output:
        multiext("results/deepspeed_configs/", *list_written_files()),
    log:
        "results/deepspeed_configs/write_deepspeed_configs.log",
    localrule: True
    conda:
        "../envs/train.yaml"
    params:
        model=lambda wildcards: PLANNED.language_model_source,
    shell:
        build_stage_command(
            "write_deepspeed_configs.py",
            "--model={params.model:q} --output-dir results/deepspeed_configs",
        )


# Its settings name the finished runs. They are not inputs, because a plan must not run them again.
rule plan_power:
    input:
        config="results/plan/power.yaml",
        code=list_script_files("plan_power.py"),
    output:
        "results/plan/power.txt",
    log:
        "results/plan/plan_power.log",
    localrule: True
    conda:
        "../envs/report.yaml"
    shell:
        build_stage_command(
            "plan_power.py", "--config {input.config:q} --output {output:q}"
        )


# It has no output, so that it prints the plan at every request.
rule plan:
    input:
        planned_parts,
        power="results/plan/power.txt",
    log:
        "results/plan/plan.log",
    localrule: True
    conda:
        "../envs/train.yaml"
    params:
        flags=plan_flags,
    shell:
        f"python {quote_script_path('plan_memory.py')} {{params.flags:q}} --power {{input.power:q}} 2> {{log:q}}"
