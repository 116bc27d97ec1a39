# Input functions of rules/plan.smk.
from pathlib import Path

from dj2mgm.records.jsonl_summary import read_jsonl_summary
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.stages import TRAINING_STAGES
from dj2mgm.settings.batch_sizes import describe_steps
from dj2mgm.settings.frozen_precision import FROZEN
from dj2mgm.storage.files import read_json


def plan_flags(wildcards):
    """Params function: flags for the memory plan of the requested experiment's stage 2, with sequences of `max_length` tokens.

    Stage 1 is planned if the experiment has it, and full fine-tuning unless only frozen layers can have the precision.
    """
    run = find_requested_run("plan", REFERENCE)
    config, finetune, lora = run.config, run.config.finetune, run.config.finetune.lora
    flags = [
        f"--model={config.model.name}",
        f"--sequence={finetune.max_length}",
        f"--precision={finetune.precision}",
    ]
    if lora:
        targets = [lora.targets] if lora.targets == "all" else lora.targets
        flags += [f"--lora-target={target}" for target in targets]
        flags.append(f"--lora-rank={lora.r}")
        if len(run.training_stages) == 1:
            flags.append("--tuning=lora")
            if finetune.precision not in FROZEN:
                flags.append("--tuning=full")
    else:
        flags.append("--tuning=full")
    if config.gpus > 1:
        flags += [f"--gpus={config.gpus}", f"--nodes={config.nodes}"]
    if not finetune.compile:
        flags.append("--no-compile")
    if finetune.global_batch_size:
        flags.append(f"--global-batch={finetune.global_batch_size}")
    return flags + [f"--note={note}" for note in list_step_notes()]


def list_step_notes():
    """Return sentences about stages of the requested experiment that add epochs, if the numbers of their rows are known."""
    run = find_requested_run("plan", REFERENCE)
    jsonl_summary = Path(RUNS.find_stage_folder(run, "jsonl"), "summary.json")
    dataset_summary = Path("results/datasets", run.dataset.name, "summary.json")
    rows = {}
    with raising_user_errors():
        if jsonl_summary.is_file():
            files = read_jsonl_summary(jsonl_summary).files
            rows = {stage: files[stage].rows_out for stage in TRAINING_STAGES}
        elif dataset_summary.is_file():
            counts = read_json(dataset_summary)
            # without instructions, stage 2 trains on the pairs
            rows = {
                stage: counts[stage] or counts["pretrain"] for stage in TRAINING_STAGES
            }
    if len(run.training_stages) == 1:
        # this stage trains on the rows of both stages
        rows = {"finetune": sum(rows.values())} if rows else {}
    notes = [
        describe_steps(stage, run.settings[stage], number)
        for stage, number in rows.items()
    ]
    return [f"{note[0].upper()}{note[1:]}." for note in notes if note]
