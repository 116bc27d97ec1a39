# Input functions of rules/train.smk.
from dj2mgm.runs.experiments import REFERENCE


def list_training_records(stage):
    """Return the outputs of a training stage, other than its weights."""
    files = {
        "steps": "metrics.jsonl",
        "scores": "scores.jsonl",
        "scored": "scored.jsonl",
        "metrics": "metrics.json",
        "memory": "memory.csv",
    }
    return {key: f"results/{{run}}/{stage}/{name}" for key, name in files.items()}


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


def select_experiments(lora, stages=None):
    """Return the experiments that train with LoRA or without, in this number of stages."""
    return [
        name
        for name, config in RUNS.experiments.configs.items()
        if stages in (None, 2 if config.model.has_stage_1 else 1)
        and bool(config.finetune.lora) == lora
    ]


def held_out_files(wildcards):
    """Input function: held-out questions to a model while it is trained, and the settings of the prompts.

    They are `ancient`: the weights do not depend on them, so their change does not repeat the training.
    """
    run = RUNS.by_folder(wildcards.run)
    if not run.config.score_while_training.questions:
        return []
    config = f"results/{wildcards.run}/generate/config.yaml"
    return [ancient(dataset_file("evaluation.jsonl")(wildcards)), ancient(config)]


def held_out_flags(wildcards, input):
    """Params function: the flags for held-out questions."""
    if not input.held_out:
        return []
    evaluation, generate_config = input.held_out
    return ["--evaluation", evaluation, "--generate-config", generate_config]


def projector_or_pairs(wildcards):
    """Input function: the projector of stage 1, or the pairs if there is no stage 1."""
    return projector_file(wildcards) or stage_output("jsonl", "pretrain.jsonl")(
        wildcards
    )


def projector_or_pairs_flags(wildcards, input):
    """Params function: the flag for the projector or the pairs."""
    return ["--projector" if projector_file(wildcards) else "--pairs", input.before]


def minimal_metrics(wildcards):
    """Input function: the last output of `finetune_minimal`."""
    find_requested_run("finetune_minimal", REFERENCE)
    target_files("finetune_minimal")(wildcards)
    return f"results/{RUNS.first_seed('finetune_minimal').folder}/finetune/metrics.json"
