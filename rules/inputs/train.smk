# Input functions of the training rules.
from dj2mgm.settings.batch_sizes import describe_steps
from dj2mgm.storage.files import read_json


def training_records(stage):
    """Return the outputs of a training stage, other than its weights."""
    files = {
        "steps": "metrics.jsonl",
        "scores": "scores.jsonl",
        "scored": "scored.jsonl",
        "metrics": "metrics.json",
        "memory": "memory.csv",
    }
    return {key: f"results/{{run}}/{stage}/{name}" for key, name in files.items()}


def several_nodes():
    """Return resources for which Snakemake's Slurm plugin starts a command once, and leaves the nodes to its srun."""
    return (
        {}
        if NODES == 1
        else {"nodes": NODES, "tasks": NODES, "tasks_per_gpu": -1, "mpi": "srun"}
    )


def training_gpus(wildcards):
    """Resource function: the GPUs of training."""
    return RUNS.by_folder(wildcards.run).config.gpus


def experiments_tuned(lora, stages=None):
    """Return the experiments that train with LoRA or without, in this number of stages."""
    return [
        name
        for name, config in RUNS.experiments.configs.items()
        if stages in (None, 2 if config.model.has_stage_1 else 1)
        and bool(config.finetune.lora) == lora
    ]


def held_out_files(wildcards):
    """Input function: held-out questions to a model while it is trained, and the settings of the prompts.

    They are `ancient`: the weights do not depend on them, so a change does not train again.
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


def plan_flags(wildcards):
    """Params function: the reference's settings of stage 2 that decide about memory; sequences of the greatest length."""
    config = RUNS.first_seed(REFERENCE).config
    finetune, lora = config.finetune, config.finetune.lora
    flags = [f"--model={config.model.name}", f"--sequence={finetune.max_length}"]
    if lora:
        targets = [lora.targets] if lora.targets == "all" else lora.targets
        flags += [f"--lora-target={target}" for target in targets]
        flags.append(f"--lora-rank={lora.r}")
    else:
        flags.append("--tuning=full")
    if config.gpus > 1:
        flags += [f"--gpus={config.gpus}", f"--nodes={config.nodes}"]
    if finetune.compile:
        flags.append("--fused")
    if finetune.global_batch_size:
        flags.append(f"--global-batch={finetune.global_batch_size}")
    return flags + [f"--note={note}" for note in steps_notes()]


def steps_notes():
    """Return sentences about stages of the reference that add epochs, if the numbers of their rows are known."""
    run = RUNS.first_seed(REFERENCE)
    jsonl_summary = Path(RUNS.stage_folder(run, "jsonl"), "summary.json")
    dataset_summary = Path("results/datasets", run.dataset.name, "summary.json")
    rows = {}
    with user_errors():
        if jsonl_summary.is_file():
            summary = read_json(jsonl_summary)
            rows = {stage: summary[stage]["rows_out"] for stage in TRAINING}
        elif dataset_summary.is_file():
            counts = read_json(dataset_summary)
            # without instructions, stage 2 trains on the pairs
            rows = {stage: counts[stage] or counts["pretrain"] for stage in TRAINING}
    if len(run.trains) == 1:
        rows = {"finetune": sum(rows.values())} if rows else {}  # one stage, on both
    notes = [
        describe_steps(stage, run.settings[stage], number)
        for stage, number in rows.items()
    ]
    return [f"{note[0].upper()}{note[1:]}." for note in notes if note]
