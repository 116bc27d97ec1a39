# Assemble each base model into one folder, from parts that are shipped, trained here, or named as folders and hub ids.
import os
from glob import escape, glob
from dj2mgm.model_files.missing_models import list_part_files
from dj2mgm.settings.config_files import locate_config_file

# names of files that transformers writes for a model
WEIGHTS = ("config.json", "model.safetensors")


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


WHOLE_MODEL = (*WEIGHTS, "processor_config.json", *TOKENIZER)


CLIP = multiext("results/foundation/{model}/clip/", *WHOLE_MODEL)


CONVNEXT = multiext("results/foundation/{model}/convnext/", *WEIGHTS)


LANGUAGE_MODEL = multiext(
    "results/foundation/{model}/language_model/", *WEIGHTS, *TOKENIZER
)


def list_shipped_foundation(model):
    """Return the trained parts of a tiny model that come with the workflow."""
    folder = os.path.relpath(RUNS.shipped_foundations[model])
    return sorted(glob(f"{escape(folder)}/*/*"))


rule unpack_foundation:
    input:
        lambda w: list_shipped_foundation(w.model),
        code=list_script_files("unpack_foundation.py"),
    output:
        clip=CLIP,
        convnext=CONVNEXT,
        language_model=LANGUAGE_MODEL,
    log:
        "results/foundation/{model}/unpack_foundation.log",
    wildcard_constraints:
        model=match_any(RUNS.shipped_foundations),
    conda:
        "../envs/foundation.yaml"
    resources:
        mem_mb=mem_with_retries(SCRIPT_MB),
        runtime=10,
    params:
        folder=lambda w: os.path.relpath(RUNS.shipped_foundations[w.model]),
    shell:
        build_stage_command(
            "unpack_foundation.py",
            "--input-dir {params.folder:q}"
            " --output-dir results/foundation/{wildcards.model:q}",
        )


rule train_clip:
    input:
        config="results/foundation/{model}/clip.yaml",
        code=list_script_files("train_clip.py"),
    output:
        clip=CLIP,
        convnext=CONVNEXT,
    log:
        "results/foundation/{model}/train_clip.log",
    benchmark:
        "results/foundation/{model}/train_clip.benchmark.tsv"
    wildcard_constraints:
        model=match_any(MODELS.keys() - RUNS.shipped_foundations.keys()),
    conda:
        "../envs/foundation.yaml"
    threads: 2
    resources:
        mem_mb=mem_with_retries(TINY_TRAINING_MB),
        runtime=60,
    shell:
        build_stage_command(
            "train_clip.py",
            "--config {input.config:q}"
            " --output-dir results/foundation/{wildcards.model:q}",
        )


def list_chat_templates(*names):
    """Return chat templates that a script reads by name, as inputs."""
    files = (locate_config_file("chat_templates", f"{name}.yaml") for name in names)
    return [os.path.relpath(file) for file in files]


rule train_language_model:
    input:
        config="results/foundation/{model}/language_model.yaml",
        chat_templates=list_chat_templates("gemma", "plain"),
        code=list_script_files("train_language_model.py"),
    output:
        LANGUAGE_MODEL,
    log:
        "results/foundation/{model}/train_language_model.log",
    benchmark:
        "results/foundation/{model}/train_language_model.benchmark.tsv"
    wildcard_constraints:
        model=match_any(MODELS.keys() - RUNS.shipped_foundations.keys()),
    conda:
        "../envs/foundation.yaml"
    threads: 2
    resources:
        mem_mb=mem_with_retries(TINY_TRAINING_MB),
        runtime=60,
    shell:
        build_stage_command(
            "train_language_model.py",
            "--config {input.config:q}"
            " --output-dir results/foundation/{wildcards.model:q}/language_model",
        )


def assembled_files(wildcards):
    """Input function: the files of the folders that an MGM is assembled from."""
    return check_user_files(list_part_files(MODELS[wildcards.model]))


rule assemble_model:
    input:
        lambda w: list_foundation_files(w.model),
        assembled_files,
        config="results/models/{model}/config.yaml",
        code=list_script_files("assemble_model.py"),
    output:
        multiext("results/models/{model}/mgm/", *WHOLE_MODEL),
    log:
        "results/models/{model}/assemble_model.log",
    benchmark:
        "results/models/{model}/assemble_model.benchmark.tsv"
    conda:
        "../envs/train.yaml"
    resources:
        mem_mb=mem_with_retries(WEIGHTS_STAGE_MB),
        runtime=60,
    params:
        content=hash_user_files(assembled_files),
    shell:
        build_stage_command(
            "assemble_model.py",
            "--config {input.config:q}"
            " --output-dir results/models/{wildcards.model:q}/mgm",
        )


rule make_tiny_vlm:
    input:
        lambda w: list_foundation_files(w.model, ["clip", "language_model"]),
        config="results/models/{model}/config.yaml",
        code=list_script_files("make_tiny_vlm.py"),
    output:
        multiext("results/models/{model}/vlm/", *WHOLE_MODEL),
    log:
        "results/models/{model}/make_tiny_vlm.log",
    benchmark:
        "results/models/{model}/make_tiny_vlm.benchmark.tsv"
    conda:
        "../envs/train.yaml"
    resources:
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=10,
    shell:
        build_stage_command(
            "make_tiny_vlm.py",
            "--config {input.config:q}"
            " --output-dir results/models/{wildcards.model:q}/vlm",
        )
