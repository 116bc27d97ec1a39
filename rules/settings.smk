# Every stage is handed its slice of the configuration as one file, from which it can also be run by hand.
from dj2mgm.config.leaks import leak_settings
from dj2mgm.config.stages import foundation_settings, model_settings

# `use rule` does not take `localrule` over; the directive `localrules` does not know the names of a module's rules
workflow.localrules(
    *map(
        workflow.modifier.modify_rulename,
        (
            "configure_dataset",
            "configure_foundation",
            "configure_model",
            "configure_page",
            "configure_variants",
            "configure_attention_benchmark",
            "configure_challenge",
            "configure_analysis",
            "configure_export",
            "configure_publishing",
            "configure_leaks",
            "configure_evaluation",
            "configure_crate",
            "push_dataset",
        ),
    )
)


rule resolve_config:
    input:
        code=code("resolve_config.py"),
    output:
        "results/{run}/{stage}/config.yaml",
    log:
        "results/{run}/{stage}/config.log",
    localrule: True
    conda:
        "../envs/dataset.yaml"
    params:
        settings=settings,
    shell:
        stage_command(
            "resolve_config.py", "--settings {params.settings:q} --output {output:q}"
        )


use rule resolve_config as configure_dataset with:
    output:
        "results/datasets/{dataset}/config.yaml",
    log:
        "results/datasets/{dataset}/config.log",
    params:
        settings=lambda w: json.dumps(dataset_settings(w)),


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
        settings=lambda w: json.dumps(model_settings(MODELS[w.model])),


use rule resolve_config as configure_page with:
    output:
        "results/{page}/config.yaml",
    log:
        "results/{page}/config.log",
    params:
        settings=lambda w: json.dumps(page(pages.experiments_on(RUNS, w.page))),


use rule resolve_config as configure_variants with:
    output:
        f"results/{PLACE}{{variants}}/config.yaml",
    log:
        f"results/{PLACE}{{variants}}/config.log",
    params:
        settings=lambda w: json.dumps(page(RUNS.experiments_by_page[w.variants])),


use rule resolve_config as configure_attention_benchmark with:
    output:
        f"results/{PLACE}attention_benchmark/config.yaml",
    log:
        f"results/{PLACE}attention_benchmark/config.log",
    params:
        settings=lambda w: json.dumps(
            RUNS.attention_benchmark
            | {"cpu_threads": RUNS.first(REFERENCE).config["cpu_threads"]}
        ),


use rule resolve_config as configure_challenge with:
    output:
        f"results/{PLACE}challenge/config.yaml",
    log:
        f"results/{PLACE}challenge/config.log",
    params:
        settings=lambda w: json.dumps(challenge_settings()),


use rule resolve_config as configure_analysis with:
    output:
        "results/datasets/{dataset}/analyze/config.yaml",
    log:
        "results/datasets/{dataset}/analyze/config.log",
    params:
        settings=lambda w: json.dumps(RUNS.analysis_settings(w.dataset)),


use rule resolve_config as configure_export with:
    output:
        "results/{run}/export/config.yaml",
    log:
        "results/{run}/export/config.log",
    params:
        settings=lambda w: json.dumps(RUNS.export_settings(RUNS.at(w.run))),


use rule resolve_config as configure_publishing with:
    output:
        "results/published/{run}/config.yaml",
    log:
        "results/published/{run}/config.log",
    params:
        settings=lambda w: publishing(w),


use rule resolve_config as configure_leaks with:
    output:
        "results/datasets/{dataset}/leaks/config.yaml",
    log:
        "results/datasets/{dataset}/leaks/config.log",
    params:
        settings=lambda w: json.dumps(leak_settings(RUNS, w.dataset)),


use rule resolve_config as configure_evaluation with:
    output:
        "results/evaluations/{task}/config.yaml",
    log:
        "results/evaluations/{task}/config.log",
    params:
        settings=lambda w: json.dumps(evaluation_settings(w.task)),


use rule resolve_config as configure_crate with:
    output:
        "results/{page}/crate/config.yaml",
    log:
        "results/{page}/crate/config.log",
    params:
        settings=lambda w: json.dumps(crate_settings(w.page)),
