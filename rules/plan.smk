# Plan before a training: memory, time and disk on this machine or another one.
from pathlib import Path
from dj2mgm.model_files.missing_models import (
    compute_download_gb,
    find_downloads,
    find_missing_models,
)
from dj2mgm.runs.command_messages import build_command, count_training_rows
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.settings.training_stages import (
    count_samples,
    describe_steps,
)
from dj2mgm.storage.files import read_json

PLAN_TEXTS = []  # files of text that features add to the plan


def list_machine_flags():
    """Return the flags for another machine's card, and for memory that the configuration states."""
    settings = RUNS.shared
    flags = {
        "--gpu": settings.gpu,
        "--desktop-memory": settings.plan.desktop_gib if settings.gpu else None,
        "--host-memory": settings.plan.host_gib,
    }
    return [f"{flag}={value}" for flag, value in flags.items() if value is not None]


def find_dataset_summary(run):
    """Return the file with the counts of a run's dataset."""
    return Path("results/datasets", run.dataset.name, "summary.json")


def count_rows(run):
    """Return the row counts of a run's training stages, and its held-out images; none before its dataset is made."""
    dataset_summary = find_dataset_summary(run)
    with raising_user_errors():
        if not dataset_summary.is_file():
            return {}, 0
        return (
            count_training_rows(RUNS, run),
            read_json(dataset_summary)["evaluation"],
        )


def list_notes(counts, samples):
    """Return sentences about the samples of each stage, and about stages that add epochs."""
    settings = find_requested_run("plan", REFERENCE).settings
    notes = [
        describe_steps(stage, settings[stage], count.rows)
        for stage, count in counts.items()
    ]
    explained = [
        f"{stage}: {samples[stage]:,} samples from {count.describe()}"
        + (f", each used about {uses:.3g} times" if uses != 1 else "")
        for stage, count in counts.items()
        for uses in [samples[stage] / count.rows]
    ]
    return [f"{note[0].upper()}{note[1:]}." for note in explained + notes if note]


def list_next_commands(run):
    """Return the commands that follow the plan: a download if the model is missing, a dry run and the run."""
    model, arguments = run.config.model, workflow.config_settings.config_args or ()
    is_made = model.trained_by_workflow
    needs_download = not is_made and find_downloads(model, find_missing_models(model))
    fetch = [build_command("fetch", [f"model={model.name}"])] if needs_download else []
    words = [f"-n {run.experiment}", run.experiment]
    return fetch + [build_command(text, arguments) for text in words]


def plan_flags(wildcards):
    """Params function: flags for the memory plan of the requested experiment's stage 2, with sequences of `max_length` tokens.

    Stage 1 is planned if the experiment has it. Full fine-tuning needs more memory than LoRA, and is planned without it.
    """
    run = find_requested_run("plan", REFERENCE)
    config, finetune, lora = run.config, run.config.finetune, run.config.finetune.lora
    flags = [
        f"--model={config.model.name}",
        f"--max-length={finetune.max_length}",
        f"--precision={finetune.precision}",
    ]
    if lora:
        targets = [lora.targets] if lora.targets == "all" else lora.targets
        flags += [f"--lora-target={target}" for target in targets]
        flags.append(f"--lora-rank={lora.r}")
    tunings = ["stage1"] * (len(run.training_stages) - 1) + ["lora" if lora else "full"]
    flags += [f"--tuning={tuning}" for tuning in tunings]
    if config.gpus > 1:
        flags += [f"--gpus={config.gpus}", f"--nodes={config.nodes}"]
    if not finetune.compile:
        flags.append("--no-compile")
    if finetune.global_batch_size:
        flags.append(f"--global-batch={finetune.global_batch_size}")
    if batch := config.pretrain.global_batch_size:
        flags.append(f"--pretrain-batch={batch}")
    counts, held_out = count_rows(run)
    samples = {
        stage: count_samples(run.settings[stage], count.rows)
        for stage, count in counts.items()
    }
    flags += [f"--samples={stage}={number}" for stage, number in samples.items()]
    if counts:
        flags.append(f"--held-out={held_out}")
        flags.append(f"--dataset={find_dataset_summary(run).parent}")
    if size := compute_download_gb(config.model):
        flags.append(f"--weights-gb={size}")
    return (
        flags
        + list_machine_flags()
        + [f"--next={command}" for command in list_next_commands(run)]
        + [f"--note={note}" for note in list_notes(counts, samples)]
    )


def planned_parts(wildcards):
    """Input function: the trained parts of the planned model, if it is tiny."""
    model = find_requested_run("plan", REFERENCE).config.model
    return list_foundation_files(model.name)


def planned_dataset(wildcards):
    """Input function: the counts of the user's own data, whose sizes decide; rendered scenes are not made for a plan."""
    run = find_requested_run("plan", REFERENCE)
    return [] if run.dataset.settings.is_rendered else str(find_dataset_summary(run))


# It has no output, so that it prints the plan at every request.
rule plan:
    input:
        planned_parts,
        planned_dataset,
        texts=lambda w: PLAN_TEXTS,
    log:
        "results/plan/plan.log",
    localrule: True
    conda:
        "../envs/train.yaml"
    params:
        flags=plan_flags,
        texts=optional_flag("--text", "texts"),
    message:
        "tracing training steps without weights and data, about half a minute"
    shell:
        f"python {quote_script_path('plan_memory.py')} {{params.flags:q}} {{params.texts:q}} 2> {{log:q}}"
