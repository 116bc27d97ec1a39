# Measure a whole dataset with Data-Juicer's statistics.
from dj2mgm.features.analyze.analyze_inputs import build_analysis_settings
from dj2mgm.model_files.missing_models import list_clip_files
from dj2mgm.recipes.catalogue import find_recipe_files
from dj2mgm.runs.experiments import REFERENCE

SETTINGS_FILES["configure_analysis"] = SettingsFile(
    "results/datasets/{dataset}/analyze/config.yaml",
    lambda w: build_analysis_settings(RUNS.find_analyzed(w.dataset)).file_content(),
)


def analyzed_files(wildcards):
    """Input function: the CLIP, and the recipe's files, that a dataset is analyzed with."""
    run = RUNS.find_analyzed(wildcards.dataset)
    recipe_inputs = find_recipe_files(run.settings["filter"].recipe)
    return check_user_files(list_clip_files(run.config.model.clip) + recipe_inputs)


rule analyze_data:
    input:
        analyzed_files,
        config="results/datasets/{dataset}/analyze/config.yaml",
        data="results/datasets/{dataset}/pretrain.jsonl",
        templates=list_templates(
            "report_style.css.j2", "report_charts.html.j2", feature="analyze"
        ),
        code=list_script_files("analyze_data.py"),
    output:
        stats="results/datasets/{dataset}/analyze/stats.jsonl",
        overall="results/datasets/{dataset}/analyze/overall.csv",
        page=report(
            "results/datasets/{dataset}/analyze/analysis.html",
            caption="../../workflow_scripts/dj2mgm/features/analyze/analysis.rst",
            category="Analysis",
            labels={"dataset": "{dataset}"},
        ),
        summary="results/datasets/{dataset}/analyze/summary.json",
    log:
        "results/datasets/{dataset}/analyze/analyze_data.log",
    benchmark:
        "results/datasets/{dataset}/analyze/analyze_data.benchmark.tsv"
    conda:
        "../../envs/data_juicer.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        **stage_resources(CLIP_STAGE_MB, minutes=240),
        gpu=1,
    params:
        content=hash_user_files(analyzed_files),
    shell:
        build_stage_command(
            "analyze_data.py --config {input.config:q} --data {input.data:q}"
            " --output-dir results/datasets/{wildcards.dataset:q}/analyze"
        )


def analysis_page(wildcards):
    """Input function: the page about the dataset of the requested experiment."""
    dataset = find_requested_run("analyze", REFERENCE).dataset.name
    return f"results/datasets/{dataset}/analyze/analysis.html"


rule analyze:
    input:
        analysis_page,
    localrule: True
