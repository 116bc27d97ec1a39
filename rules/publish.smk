# Publish a model and its pairs, with cards: `snakemake publish --config experiment=dj_synth`.
from dj2mgm.cli.console import UserError
from dj2mgm.runs.publication import build_publish_settings, list_records


def record_files(*names):
    """Return the input function of the files whose figures a card states, in all folders or in the folders `names`."""

    def files(wildcards):
        records = list_records(RUNS, RUNS.by_folder(wildcards.run))
        return [
            path
            for name, path in records.items()
            if not names or name.split("/")[0] in names
        ]

    return files


def finetune_folder(wildcards):
    """Params function: the folder of stage 2."""
    return RUNS.find_stage_folder(RUNS.by_folder(wildcards.run), "finetune")


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
        "../envs/evaluate.yaml"
    resources:
        mem_mb=mem_with_retries(WEIGHTS_STAGE_MB),
        runtime=120,
    params:
        content=hash_user_files(model_files),
        model=model_folder,
        stage=finetune_folder,
    shell:
        build_stage_command(
            "publish_model.py",
            "--config {input.config:q} --model={params.model:q} --stage {params.stage:q}"
            " --output-dir results/published/{wildcards.run:q}/model",
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
        "../envs/evaluate.yaml"
    resources:
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=120,
    params:
        exported=subpath(input.exported, parent=True),
    shell:
        build_stage_command(
            "publish_dataset.py",
            "--config {input.config:q} --exported {params.exported:q}"
            " --output-dir results/published/{wildcards.run:q}/dataset",
        )


# The rule is local, because the nodes of a cluster may not reach the hub.
rule push_model:
    input:
        card="results/published/{run}/model/README.md",
        other="results/published/{run}/dataset/README.md",  # nothing is pushed before everything is complete
        config="results/published/{run}/config.yaml",
        code=list_script_files("push_to_hub.py"),
    output:
        "results/published/{run}/model.pushed.json",
    log:
        "results/published/{run}/model.push.log",
    localrule: True
    conda:
        "../envs/evaluate.yaml"
    params:
        repository=RUNS.shared.publish.repository,
        private=["--private"] if RUNS.shared.publish.private else [],
        kind="model",
    shell:
        build_stage_command(
            "push_to_hub.py",
            "--config {input.config:q} --folder results/published/{wildcards.run:q}/{params.kind:q}"
            " --kind {params.kind:q} --repository {params.repository:q} {params.private:q} --output {output:q}",
        )


# `use rule` does not copy `localrule`, and the directive `localrules` does not find the rules of a module.
workflow.localrules(workflow.modifier.modify_rulename("push_dataset"))


use rule push_model as push_dataset with:
    input:
        card="results/published/{run}/dataset/README.md",
        other="results/published/{run}/model/README.md",
        config="results/published/{run}/config.yaml",
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
    with raising_user_errors():
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
        raise UserError(
            "publish: one repository holds one experiment; name one in `experiment`"
        )
    inputs = []
    for experiment in experiments:
        target_files(experiment)(wildcards)
        run = RUNS.first_seed(experiment)
        inputs += [f"results/published/{run.folder}/{file}" for file in files]
        with raising_user_errors():
            build_publish_settings(RUNS, run)
    return inputs


rule publish:
    input:
        publication_files,
    localrule: True
