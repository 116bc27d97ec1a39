# DeepSpeed configurations of the configured model for several numbers of GPUs.
from dj2mgm.features.presets.gpu_counts import list_written_files
from dj2mgm.runs.experiments import REFERENCE

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
        "../../envs/train.yaml"
    params:
        model=lambda wildcards: PLANNED.language_model_source,
    shell:
        build_stage_command(
            "write_deepspeed_configs.py --model={params.model:q}"
            " --output-dir results/deepspeed_configs"
        )
