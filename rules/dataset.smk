# The dataset: drawn (config/datasets/shapes.yaml) or brought by the user, in the workflow's own formats.
def source_files(wildcards):
    """The user's own files; the embedded dataset has none."""
    settings = DATASETS[wildcards.dataset]
    return [
        settings[split]["file"]
        for split in ("pretrain", "finetune", "evaluation")
        if split in settings
    ]


rule configure_dataset:
    input:
        code=code("resolve_config.py"),
    output:
        "results/datasets/{dataset}/config.yaml",
    log:
        "results/datasets/{dataset}/config.log",
    localrule: True
    conda:
        "../envs/dataset.yaml"
    params:
        settings=lambda w: json.dumps(DATASETS[w.dataset]),
    shell:
        "python workflow_scripts/resolve_config.py --settings {params.settings:q} --output {output:q} 2> {log:q}"


rule make_dataset:
    input:
        source_files,
        config="results/datasets/{dataset}/config.yaml",
        code=code("make_dataset.py"),
    output:
        pretrain="results/datasets/{dataset}/pretrain.jsonl",
        finetune="results/datasets/{dataset}/finetune.json",
        evaluation="results/datasets/{dataset}/evaluation.jsonl",
        summary="results/datasets/{dataset}/summary.json",
    log:
        "results/datasets/{dataset}/make_dataset.log",
    benchmark:
        "results/datasets/{dataset}/make_dataset.benchmark.tsv"
    conda:
        "../envs/dataset.yaml"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        folder=subpath(output.summary, parent=True),
    shell:
        "python workflow_scripts/make_dataset.py --config {input.config:q} --output-dir {params.folder:q}"
        " 2>&1 | tee {log:q}"
