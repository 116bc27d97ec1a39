# Check a dataset before a training: `snakemake check --config dataset=path/to/my_photos`.
from dj2mgm.features.check.check_inputs import build_check_settings
from dj2mgm.runs.experiments import REFERENCE

UNLOCKED_RULES.add("check")
SETTINGS_FILES["configure_check"] = SettingsFile(
    "results/datasets/{dataset}/check/config.yaml",
    lambda w: build_check_settings(RUNS, w.dataset),
)


rule check_dataset:
    input:
        multiext(
            "results/datasets/{dataset}/",
            "pretrain.jsonl",
            "finetune.json",
            "evaluation.jsonl",
            "summary.json",
            "config.yaml",
        ),
        config="results/datasets/{dataset}/check/config.yaml",
        templates=list_templates("report_style.css.j2", feature="check"),
        code=list_script_files("check_dataset.py"),
    output:
        page="results/datasets/{dataset}/check/check.html",
        text="results/datasets/{dataset}/check/check.txt",
    log:
        "results/datasets/{dataset}/check/check_dataset.log",
    benchmark:
        "results/datasets/{dataset}/check/check_dataset.benchmark.tsv"
    conda:
        "../../envs/evaluate.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=60),
    shell:
        build_stage_command(
            "check_dataset.py --config {input.config:q}"
            " --dataset results/datasets/{wildcards.dataset:q}"
            " --output-dir results/datasets/{wildcards.dataset:q}/check"
        )


def dataset_check_folder():
    """Return the folder of the check of the configured dataset."""
    return f"results/datasets/{RUNS.first_seed(REFERENCE).dataset.name}/check"


# It has no output, so that it prints the sentences at every request.
rule check:
    input:
        text=lambda w: f"{dataset_check_folder()}/check.txt",
        page=lambda w: f"{dataset_check_folder()}/check.html",
    log:
        "results/check/check.log",
    localrule: True
    conda:
        "../../envs/evaluate.yaml"
    shell:
        "(if grep '^error: ' {input.text:q} >&2; then exit 2; fi; cat {input.text:q}) 2> {log:q}"
