# Assemble each base model into one folder, from parts that are shipped, trained (features/foundation.smk), or named as
# folders and hub ids.
import os
from glob import escape, glob
from dj2mgm.model_files.missing_models import list_part_files

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
        **stage_resources(SCRIPT_MB, minutes=10),
    params:
        folder=lambda w: os.path.relpath(RUNS.shipped_foundations[w.model]),
    shell:
        build_stage_command(
            "unpack_foundation.py --input-dir {params.folder:q}"
            " --output-dir results/foundation/{wildcards.model:q}"
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
        **stage_resources(WEIGHTS_STAGE_MB, minutes=60),
    params:
        content=hash_user_files(assembled_files),
    shell:
        build_stage_command(
            "assemble_model.py --config {input.config:q}"
            " --output-dir results/models/{wildcards.model:q}/mgm"
        )
