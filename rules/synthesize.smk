# Rewrite captions that do not fit their image, or select instructions. New captions are also kept in results/captions.
import os
from dj2mgm.model_files.model_folders import list_local_model_files


def captioner_files(wildcards):
    """Input function: the model that writes captions, if it is one of this workflow or a folder."""
    run = RUNS.by_folder(wildcards.run)
    folder = RUNS.find_captioner_folder(run)
    if not folder:
        captioner = run.settings["synthesize"].captioner
        return check_user_files(
            list_local_model_files(captioner and captioner.folder or "")
        )
    if os.path.basename(folder) == "finetune":
        config = RUNS.get(run.captioner, run.seed).config
        weights = "adapter/adapter_model" if config.finetune.lora else "language_model"
    else:
        weights = "projector"
    return [f"{folder}/{weights}.safetensors", *model_files(wildcards)]


def instruction_inputs(wildcards):
    """Input function: instructions and evaluation file, if the recipe of the synthesize stage is for instructions."""
    selects = RUNS.by_folder(wildcards.run).selects_instructions
    names = ("finetune.json", "evaluation.jsonl") if selects else ()
    return [dataset_file(name)(wildcards) for name in names]


def captioner_flags(wildcards):
    """Params function: the flags for the trained model that writes captions."""
    folder = RUNS.find_captioner_folder(RUNS.by_folder(wildcards.run))
    model = model_folder(wildcards)
    return (
        [f"--captioner-model={model}", f"--captioner-stage={folder}"] if folder else []
    )


rule synthesize_captions:
    input:
        clip_files("synthesize"),
        recipe_files("synthesize"),
        captioner_files,
        config="results/{run}/synthesize/config.yaml",
        data=stage_output("filter", "filtered.jsonl"),
        instruction_files=instruction_inputs,
        code=list_script_files("synthesize_captions.py"),
    output:
        synthesized="results/{run}/synthesize/synthesized.jsonl",
        stats="results/{run}/synthesize/stats.jsonl",
        dropped="results/{run}/synthesize/dropped.jsonl",
        summary="results/{run}/synthesize/summary.json",
    log:
        "results/{run}/synthesize/synthesize_captions.log",
    benchmark:
        "results/{run}/synthesize/synthesize_captions.benchmark.tsv"
    conda:
        "../envs/data_juicer.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        **stage_resources(MODEL_STAGE_MB, minutes=720),
        gpu=single_node_gpus,
    params:
        content=hash_user_files(
            clip_files("synthesize"), recipe_files("synthesize"), captioner_files
        ),
        captioner=captioner_flags,
        instruction_flags=optional_flags(
            "instruction_files", "--instructions", "--evaluation"
        ),
    shell:
        build_stage_command(
            "synthesize_captions.py --config {input.config:q} --data {input.data:q}"
            " {params.captioner:q} {params.instruction_flags:q}"
            " --output-dir results/{wildcards.run:q}/synthesize"
        )
