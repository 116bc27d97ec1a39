# Train the parts of tiny models that do not come with the workflow, and make tiny models of transformers' classes.
import os
from dj2mgm.settings.config_files import locate_config_file

SETTINGS_FILES["configure_foundation"] = SettingsFile(
    "results/foundation/{model}/{part}.yaml",
    lambda w: getattr(MODELS[w.model].foundation, w.part).model_dump(),
)


wildcard_constraints:
    part="clip|language_model",


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
        "../../envs/foundation.yaml"
    threads: 2
    resources:
        **stage_resources(TINY_TRAINING_MB, minutes=60),
    shell:
        build_stage_command(
            "train_clip.py --config {input.config:q}"
            " --output-dir results/foundation/{wildcards.model:q}"
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
        "../../envs/foundation.yaml"
    threads: 2
    resources:
        **stage_resources(TINY_TRAINING_MB, minutes=60),
    shell:
        build_stage_command(
            "train_language_model.py --config {input.config:q}"
            " --output-dir results/foundation/{wildcards.model:q}/language_model"
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
        "../../envs/train.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=10),
    shell:
        build_stage_command(
            "make_tiny_vlm.py --config {input.config:q}"
            " --output-dir results/models/{wildcards.model:q}/vlm"
        )
