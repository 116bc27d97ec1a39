# Both training stages, started by workflow_scripts/launch.sh. Each resumes from the checkpoints in its folder.


include: "inputs/train.smk"


ADAPTER = multiext(
    "results/{run}/finetune/adapter/",
    "adapter_config.json",
    "adapter_model.safetensors",
)


rule pretrain:
    input:
        model_files,
        config="results/{run}/pretrain/config.yaml",
        data=stage_output("jsonl", "pretrain.jsonl"),
        held_out=held_out_files,
        code=list_script_files("pretrain.py", "launch.sh"),
    output:
        **list_training_records("pretrain"),
        projector="results/{run}/pretrain/projector.safetensors",
    log:
        "results/{run}/pretrain/pretrain.log",
    benchmark:
        "results/{run}/pretrain/pretrain.benchmark.tsv"
    conda:
        "../envs/train.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        **build_node_resources(),
        gpu=training_gpus,
        mem_mb=mem_with_retries(TRAINING_STAGE_MB),
        runtime=1440,
    params:
        content=hash_user_files(model_files),
        gpus=training_gpus,
        nodes=NODES,
        model=model_folder,
        held_out=held_out_flags,
    shell:
        build_stage_command(
            "pretrain.py",
            "--config {input.config:q} --data {input.data:q} --model={params.model:q}"
            " {params.held_out:q} --output-dir results/{wildcards.run:q}/pretrain",
            launcher="{params.gpus:q} {params.nodes:q}",
        )


rule finetune:
    input:
        model_files,
        config="results/{run}/finetune/config.yaml",
        data=stage_output("jsonl", "finetune.jsonl"),
        before=projector_or_pairs,
        held_out=held_out_files,
        code=list_script_files("finetune.py", "launch.sh"),
    output:
        **list_training_records("finetune"),
        adapter=ADAPTER,
        projector="results/{run}/finetune/projector.safetensors",
    log:
        "results/{run}/finetune/finetune.log",
    benchmark:
        "results/{run}/finetune/finetune.benchmark.tsv"
    wildcard_constraints:
        run=match_runs(select_experiments(lora=True, stages=2)),
    conda:
        "../envs/train.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        **build_node_resources(),
        gpu=training_gpus,
        mem_mb=mem_with_retries(TRAINING_STAGE_MB),
        runtime=1440,
    params:
        content=hash_user_files(model_files),
        gpus=training_gpus,
        nodes=NODES,
        model=model_folder,
        before=projector_or_pairs_flags,
        held_out=held_out_flags,
    shell:
        build_stage_command(
            "finetune.py",
            "--config {input.config:q} --data {input.data:q} --model={params.model:q}"
            " {params.before:q} {params.held_out:q} --output-dir results/{wildcards.run:q}/finetune",
            launcher="{params.gpus:q} {params.nodes:q}",
        )


use rule finetune as finetune_full with:
    output:
        **list_training_records("finetune"),
        language_model="results/{run}/finetune/language_model.safetensors",
        projector="results/{run}/finetune/projector.safetensors",
    wildcard_constraints:
        run=match_runs(select_experiments(lora=False)),


use rule finetune as finetune_in_one_stage with:
    output:
        **list_training_records("finetune"),
        adapter=ADAPTER,
    wildcard_constraints:
        run=match_runs(select_experiments(lora=True, stages=1)),


rule finetune_minimal:
    input:
        minimal_metrics,
    localrule: True
