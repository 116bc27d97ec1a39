# Share a run: `snakemake export` and `publish`, each with `--config experiment=dj_synth`.
import os

from dj2mgm.errors import InputError
from dj2mgm.features.publish import publication

READING_TARGETS |= publication.READING_TARGETS
TARGET_CHECKS.append(publication.check_learned)


SETTINGS_FILES |= {
    "configure_export": SettingsFile(
        "results/{run}/export/config.yaml",
        lambda w: publication.build_export_settings(
            RUNS.by_folder(w.run)
        ).file_content(),
    ),
    "configure_publishing": SettingsFile(
        "results/published/{run}/config.yaml",
        lambda w: publication.build_publish_settings(
            RUNS, RUNS.by_folder(w.run)
        ).file_content(),
    ),
}


def filter_folders(wildcards):
    """Params function: the output folders of the filter stage and, if it ran on pairs, the synthesize stage."""
    run = RUNS.by_folder(wildcards.run)
    names = ("filter",) if run.selects_instructions else ("filter", "synthesize")
    stages = [stage for stage in names if stage in run.settings]
    return [RUNS.find_stage_folder(run, stage) for stage in stages]


def export_folder(wildcards):
    """Params function: the folder of an export; fails if it cannot be written."""
    folder = f"results/{wildcards.run}/export"
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        raise InputError(
            f"{folder} cannot be written; allow it, or make {folder} a link to a folder on another disk"
        )
    return f"{folder}/{wildcards.format}"


rule export_data:
    input:
        pairs=pairs_file,
        stages=lambda w: [
            f"{folder}/{name}"
            for folder in filter_folders(w)
            for name in ("stats.jsonl", "summary.json")
        ],
        dataset=dataset_file("summary.json"),
        config="results/{run}/export/config.yaml",
        code=list_script_files("export_data.py"),
    output:
        "results/{run}/export/{format}/README.md",
    log:
        "results/{run}/export/{format}.log",
    benchmark:
        "results/{run}/export/{format}.benchmark.tsv"
    wildcard_constraints:
        format="dj|llava|parquet|webdataset",
    conda:
        "../../envs/dataset.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=120),
    params:
        stages=filter_folders,
        folder=export_folder,
    shell:
        build_stage_command(
            "export_data.py --config {input.config:q} --format {wildcards.format:q}"
            " --pairs {input.pairs:q} --dataset {input.dataset:q} --stages {params.stages:q}"
            " --output-dir {params.folder:q}"
        )


rule export:
    input:
        requested_files(
            "dj_synth",
            lambda run: f"results/{run.folder}/export/{RUNS.shared.format}/README.md",
        ),
    localrule: True


def record_files(*names):
    """Return the input function of the files whose figures a card states, in all folders or in the folders `names`."""

    def files(wildcards):
        records = publication.list_records(RUNS, RUNS.by_folder(wildcards.run))
        return [
            path
            for name, path in records.items()
            if not names or name.split("/")[0] in names
        ]

    return files


rule publish_model:
    input:
        model_files,
        finetuned_files,
        projector_file,
        record_files(),
        config="results/published/{run}/config.yaml",
        code=list_script_files("publish_model.py"),
    output:
        "results/published/{run}/model/README.md",
    log:
        "results/published/{run}/model.log",
    benchmark:
        "results/published/{run}/model.benchmark.tsv"
    conda:
        "../../envs/evaluate.yaml"
    resources:
        **stage_resources(WEIGHTS_STAGE_MB, minutes=120),
    params:
        content=hash_user_files(model_files),
        model=model_folder,
        stage=lambda w: RUNS.find_stage_folder(RUNS.by_folder(w.run), "finetune"),
    shell:
        build_stage_command(
            "publish_model.py --config {input.config:q} --model={params.model:q}"
            " --stage {params.stage:q} --output-dir results/published/{wildcards.run:q}/model"
        )


rule publish_dataset:
    input:
        record_files("dataset", "filter", "synthesize"),
        exported="results/{run}/export/parquet/README.md",
        config="results/published/{run}/config.yaml",
        code=list_script_files("publish_dataset.py"),
    output:
        "results/published/{run}/dataset/README.md",
    log:
        "results/published/{run}/dataset.log",
    benchmark:
        "results/published/{run}/dataset.benchmark.tsv"
    conda:
        "../../envs/evaluate.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=120),
    params:
        exported=subpath(input.exported, parent=True),
    shell:
        build_stage_command(
            "publish_dataset.py --config {input.config:q} --exported {params.exported:q}"
            " --output-dir results/published/{wildcards.run:q}/dataset"
        )


# The rule is local, because the nodes of a cluster may not reach the hub.
rule push_model:
    input:
        card="results/published/{run}/model/README.md",
        other="results/published/{run}/dataset/README.md",  # nothing is pushed before everything is complete
        code=list_script_files("push_to_hub.py"),
    output:
        "results/published/{run}/model.pushed.json",
    log:
        "results/published/{run}/model.push.log",
    localrule: True
    conda:
        "../../envs/evaluate.yaml"
    params:
        repository=RUNS.shared.publish.repository,
        private=["--private"] if RUNS.shared.publish.private else [],
        kind="model",
    shell:
        build_stage_command(
            "push_to_hub.py --folder results/published/{wildcards.run:q}/{params.kind:q}"
            " --kind {params.kind:q} --repository {params.repository:q} {params.private:q}"
            " --output {output:q}"
        )


# `use rule` does not copy `localrule`, and the directive `localrules` does not find the rules of a module.
workflow.localrules(workflow.modifier.modify_rulename("push_dataset"))


use rule push_model as push_dataset with:
    input:
        card="results/published/{run}/dataset/README.md",
        other="results/published/{run}/model/README.md",
        code=list_script_files("push_to_hub.py"),
    output:
        "results/published/{run}/dataset.pushed.json",
    log:
        "results/published/{run}/dataset.push.log",
    params:
        repository=RUNS.shared.publish.dataset_repository,
        private=["--private"] if RUNS.shared.publish.private else [],
        kind="dataset",


def publication_files(wildcards):
    """Input function: the files of `snakemake publish`, with a push to each named repository.

    Settings that may not be published are refused before anything runs.
    """
    experiments = RUNS.experiments.list_requested("dj_synth")
    keys = {"model": "repository", "dataset": "dataset_repository"}
    files = [
        (
            f"{part}.pushed.json"
            if getattr(RUNS.shared.publish, key)
            else f"{part}/README.md"
        )
        for part, key in keys.items()
    ]
    if len(experiments) > 1 and any(".pushed" in file for file in files):
        raise InputError(
            "publish: one repository holds one experiment; name one in `experiment`"
        )
    inputs = []
    for experiment in experiments:
        target_files(experiment)(wildcards)
        run = RUNS.first_seed(experiment)
        inputs += [f"results/published/{run.folder}/{file}" for file in files]
        publication.build_publish_settings(RUNS, run)
    return inputs


rule publish:
    input:
        publication_files,
    localrule: True
