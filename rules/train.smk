# Both training stages, by workflow_scripts/launch.sh. Each resumes from the checkpoints beside its outputs.
from training.checkpoints import discard_finished


onsuccess:
    discard_finished(Path(RUNS.stage(run, stage)) for run in RUNS for stage in TRAINING)


rule pretrain:
    input:
        model_files,
        config="results/{run}/pretrain/config.yaml",
        data=output_of("jsonl", "pretrain.jsonl"),
        code=[*code("pretrain.py"), "workflow_scripts/launch.sh"],
    output:
        projector="results/{run}/pretrain/projector.safetensors",
        steps="results/{run}/pretrain/metrics.jsonl",
        metrics="results/{run}/pretrain/metrics.json",
        memory="results/{run}/pretrain/memory.csv",
    log:
        "results/{run}/pretrain/pretrain.log",
    benchmark:
        "results/{run}/pretrain/pretrain.benchmark.tsv"
    conda:
        "../envs/train.yaml"
    threads: 8
    resources:
        **several_nodes(),
        gpu=gpus,
        mem_mb=growing(48000),
        runtime=1440,
    params:
        gpus=gpus,
        nodes=NODES,
        model=model_folder,
    shell:
        logged(
            "bash workflow_scripts/launch.sh {params.gpus:q} {params.nodes:q} workflow_scripts/pretrain.py"
            " --config {input.config:q} --data {input.data:q} --model={params.model:q}"
            " --output-dir results/{wildcards.run:q}/pretrain"
        )


rule finetune:
    input:
        model_files,
        config="results/{run}/finetune/config.yaml",
        data=output_of("jsonl", "finetune.jsonl"),
        projector=output_of("pretrain", "projector.safetensors"),
        code=[*code("finetune.py"), "workflow_scripts/launch.sh"],
    output:
        adapter=multiext(
            "results/{run}/finetune/adapter/",
            "adapter_config.json",
            "adapter_model.safetensors",
        ),
        projector="results/{run}/finetune/projector.safetensors",
        steps="results/{run}/finetune/metrics.jsonl",
        metrics="results/{run}/finetune/metrics.json",
        memory="results/{run}/finetune/memory.csv",
    log:
        "results/{run}/finetune/finetune.log",
    benchmark:
        "results/{run}/finetune/finetune.benchmark.tsv"
    wildcard_constraints:
        run=runs_of(
            name for name in RUNS.configs if RUNS.configs[name]["finetune"]["lora"]
        ),
    conda:
        "../envs/train.yaml"
    threads: 8
    resources:
        **several_nodes(),
        gpu=gpus,
        mem_mb=growing(48000),
        runtime=1440,
    params:
        gpus=gpus,
        nodes=NODES,
        model=model_folder,
    shell:
        logged(
            "bash workflow_scripts/launch.sh {params.gpus:q} {params.nodes:q} workflow_scripts/finetune.py"
            " --config {input.config:q} --data {input.data:q} --model={params.model:q}"
            " --projector {input.projector:q} --output-dir results/{wildcards.run:q}/finetune"
        )


use rule finetune as finetune_whole with:
    output:
        language_model="results/{run}/finetune/language_model.safetensors",
        projector="results/{run}/finetune/projector.safetensors",
        steps="results/{run}/finetune/metrics.jsonl",
        metrics="results/{run}/finetune/metrics.json",
        memory="results/{run}/finetune/memory.csv",
    wildcard_constraints:
        run=runs_of(
            name for name in RUNS.configs if not RUNS.configs[name]["finetune"]["lora"]
        ),
