# Every stage is handed its slice of the configuration as one file, from which it can also be run by hand.
rule resolve_config:
    input:
        code=code("resolve_config.py"),
    output:
        "results/{experiment}/{stage}/config.yaml",
    log:
        "results/{experiment}/{stage}/config.log",
    localrule: True
    conda:
        "../envs/dataset.yaml"
    params:
        settings=lambda w: json.dumps(SETTINGS[w.experiment][w.stage]),
    shell:
        "python workflow_scripts/resolve_config.py --settings {params.settings:q} --output {output:q} 2> {log:q}"


use rule resolve_config as configure_dataset with:
    output:
        "results/datasets/{dataset}/config.yaml",
    log:
        "results/datasets/{dataset}/config.log",
    params:
        settings=lambda w: json.dumps(DATASETS[w.dataset]),


use rule resolve_config as configure_foundation with:
    output:
        "results/foundation/{model}/{part}.yaml",
    log:
        "results/foundation/{model}/{part}.config.log",
    params:
        settings=lambda w: json.dumps(foundation_settings(MODELS[w.model], w.part)),


use rule resolve_config as configure_model with:
    output:
        "results/models/{model}/config.yaml",
    log:
        "results/models/{model}/config.log",
    params:
        settings=lambda w: json.dumps(assemble_settings(MODELS[w.model])),
