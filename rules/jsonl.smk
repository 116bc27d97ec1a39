# Write the training files: LLaVA conversations with absolute image paths, every image opened and verified.
from dj2mgm.runs.experiments import REFERENCE


def dropped_leaks(wildcards):
    """Input function: near-duplicates of evaluation images, if their rows are left out."""
    drops = RUNS.by_folder(wildcards.run).config.jsonl.leaks == "drop"
    return leaks_file(wildcards) if drops else []


def reference_summary(wildcards):
    """Input function: the reference's number of samples; none for the reference itself."""
    run = RUNS.by_folder(wildcards.run)
    if run.experiment == REFERENCE:
        return []
    return RUNS.locate_output(RUNS.get(REFERENCE, run.seed), "jsonl", "summary.json")


def counted_summary(wildcards):
    """Input function: the number of rows to draw at random; none if all rows are used."""
    run = RUNS.by_folder(wildcards.run)
    experiment = run.config.jsonl.same_size_as
    if not experiment:
        return []
    return RUNS.locate_output(RUNS.get(experiment, run.seed), "jsonl", "summary.json")


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
        **stage_resources(SMALL_STAGE_MB, minutes=60),
    params:
        leaks=optional_flags("leaks", "--leaks"),
        synthesized=optional_flags("synthesized", "--synthesized"),
        same_samples=optional_flags("reference", "--same-samples-as"),
        same_rows=optional_flags("counted", "--same-rows-as"),
    shell:
        build_stage_command(
            "write_jsonl.py --config {input.config:q} --pairs {input.pairs:q}"
            " --instructions {input.instructions:q} --evaluation {input.evaluation:q}"
            " {params.same_samples:q} {params.same_rows:q} {params.leaks:q} {params.synthesized:q}"
            " --output-dir results/{wildcards.run:q}/jsonl"
        )
