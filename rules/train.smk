# Both training stages, started by workflow_scripts/launch.sh. Each resumes from the checkpoints in its folder.
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.stages import STAGES

ADAPTER = multiext(
    "results/{run}/finetune/adapter/",
    "adapter_config.json",
    "adapter_model.safetensors",
)


def list_training_records(stage):
    """Return the outputs of a training stage, other than its weights."""
    return [f"results/{{run}}/{stage}/{name}" for name in STAGES[stage].outputs]


def build_node_resources():
    """Return resources that make the Slurm plugin start a command once; its own srun starts the nodes."""
    return (
        {}
        if NODES == 1
        else {"nodes": NODES, "tasks": NODES, "tasks_per_gpu": -1, "mpi": "srun"}
    )


def training_gpus(wildcards):
    """Resource function: the GPUs of training."""
    return RUNS.by_folder(wildcards.run).config.gpus


def held_out_files(wildcards):
    """Input function: held-out questions to a model while it is trained, and the settings of the prompts.

    They are `ancient`: the weights do not depend on them, so their change does not repeat the training.
    """
    run = RUNS.by_folder(wildcards.run)
    if not run.config.score_while_training.questions:
        return []
    config = f"results/{wildcards.run}/generate/config.yaml"
    return [ancient(dataset_file("evaluation.jsonl")(wildcards)), ancient(config)]


rule pretrain:
    input:
        model_files,
        config="results/{run}/pretrain/config.yaml",
        data=stage_output("jsonl", "pretrain.jsonl"),
        held_out=held_out_files,
        code=list_script_files("pretrain.py", "launch.sh"),
    output:
        *list_training_records("pretrain"),
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
        **stage_resources(TRAINING_STAGE_MB, minutes=1440),
        gpu=training_gpus,
    params:
        content=hash_user_files(model_files),
        gpus=training_gpus,
        nodes=NODES,
        model=model_folder,
        held_out=optional_flags("held_out", "--evaluation", "--generate-config"),
    shell:
        build_stage_command(
            "pretrain.py --config {input.config:q} --data {input.data:q} --model={params.model:q}"
            " {params.held_out:q} --output-dir results/{wildcards.run:q}/pretrain",
            launcher="{params.gpus:q} {params.nodes:q}",
        )


def select_experiments(lora, stages=None):
    """Return the experiments that train with LoRA or without, in this number of stages."""
    return [
        name
        for name, config in RUNS.experiments.configs.items()
        if stages in (None, 2 if config.model.has_stage_1 else 1)
        and bool(config.finetune.lora) == lora
    ]


def projector_or_pairs(wildcards):
    """Input function: the projector of stage 1, or the pairs if there is no stage 1."""
    return projector_file(wildcards) or stage_output("jsonl", "pretrain.jsonl")(
        wildcards
    )


def projector_or_pairs_flags(wildcards, input):
    """Params function: the flag for the projector or the pairs."""
    return ["--projector" if projector_file(wildcards) else "--pairs", input.before]


rule finetune:
    input:
        model_files,
        config="results/{run}/finetune/config.yaml",
        data=stage_output("jsonl", "finetune.jsonl"),
        before=projector_or_pairs,
        held_out=held_out_files,
        code=list_script_files("finetune.py", "launch.sh"),
    output:
        *list_training_records("finetune"),
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
        **stage_resources(TRAINING_STAGE_MB, minutes=1440),
        gpu=training_gpus,
    params:
        content=hash_user_files(model_files),
        gpus=training_gpus,
        nodes=NODES,
        model=model_folder,
        before=projector_or_pairs_flags,
        held_out=optional_flags("held_out", "--evaluation", "--generate-config"),
    shell:
        build_stage_command(
            "finetune.py --config {input.config:q} --data {input.data:q} --model={params.model:q}"
            " {params.before:q} {params.held_out:q} --output-dir results/{wildcards.run:q}/finetune",
            launcher="{params.gpus:q} {params.nodes:q}",
        )


use rule finetune as finetune_full with:
    output:
        *list_training_records("finetune"),
        language_model="results/{run}/finetune/language_model.safetensors",
        projector="results/{run}/finetune/projector.safetensors",
    wildcard_constraints:
        run=match_runs(select_experiments(lora=False)),


use rule finetune as finetune_in_one_stage with:
    output:
        *list_training_records("finetune"),
        adapter=ADAPTER,
    wildcard_constraints:
        run=match_runs(select_experiments(lora=True, stages=1)),


def minimal_metrics(wildcards):
    """Input function: the last output of `finetune_minimal`."""
    find_requested_run("finetune_minimal", REFERENCE)
    target_files("finetune_minimal")(wildcards)
    return f"results/{RUNS.first_seed('finetune_minimal').folder}/finetune/metrics.json"


rule finetune_minimal:
    input:
        minimal_metrics,
    localrule: True
