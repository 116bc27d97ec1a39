# Write the training files: LLaVA conversations with absolute image paths, every image opened and verified.
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


rule write_jsonl:
    input:
        config="results/{run}/jsonl/config.yaml",
        pairs=pairs_file,
        reference=reference_summary,
        counted=counted_summary,
        instructions=dataset_file("finetune.json"),
        synthesized=instruction_output("synthesized.jsonl"),
        evaluation=dataset_file("evaluation.jsonl"),
        leaks=dropped_leaks,
        code=list_script_files("write_jsonl.py"),
    output:
        pretrain="results/{run}/jsonl/pretrain.jsonl",
        finetune="results/{run}/jsonl/finetune.jsonl",
        summary="results/{run}/jsonl/summary.json",
    log:
        "results/{run}/jsonl/write_jsonl.log",
    benchmark:
        "results/{run}/jsonl/write_jsonl.benchmark.tsv"
    conda:
        "../envs/jsonl.yaml"
    resources:
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=60,
    params:
        leaks=optional_flag("--leaks", "leaks"),
        synthesized=optional_flag("--synthesized", "synthesized"),
        same_samples=optional_flag("--same-samples-as", "reference"),
        same_rows=optional_flag("--same-rows-as", "counted"),
    shell:
        build_stage_command(
            "write_jsonl.py",
            "--config {input.config:q} --pairs {input.pairs:q}"
            " --instructions {input.instructions:q} --evaluation {input.evaluation:q}"
            " {params.same_samples:q} {params.same_rows:q} {params.leaks:q} {params.synthesized:q}"
            " --output-dir results/{wildcards.run:q}/jsonl",
        )
