# Input functions of rules/jsonl.smk.
from dj2mgm.runs.experiments import REFERENCE


def dropped_leaks(wildcards):
    """Input function: near-duplicates of evaluation images, if their rows are left out."""
    drops = RUNS.by_folder(wildcards.run).config.jsonl.leaks == "drop"
    return leaks_file(wildcards) if drops else []


def reference_summary(wildcards):
    """Input function: the reference's number of samples; none for the reference itself."""
    run = RUNS.by_folder(wildcards.run)
    reference = RUNS.get(REFERENCE, run.seed)
    return (
        []
        if run.experiment == REFERENCE
        else f"{RUNS.find_stage_folder(reference, 'jsonl')}/summary.json"
    )


def counted_summary(wildcards):
    """Input function: the number of rows to draw at random; none if all rows are used."""
    run = RUNS.by_folder(wildcards.run)
    experiment = run.config.jsonl.same_size_as
    return (
        f"{RUNS.find_stage_folder(RUNS.get(experiment, run.seed), 'jsonl')}/summary.json"
        if experiment
        else []
    )


def instruction_output(file):
    """Return the input function of a file of the synthesize stage; no file if its recipe is not for instructions."""

    def path(wildcards):
        selects = RUNS.by_folder(wildcards.run).selects_instructions
        return stage_output("synthesize", file)(wildcards) if selects else []

    return path
