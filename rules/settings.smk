# Write the settings of every stage into one file, with which the stage can also be run by hand.
import os
from pathlib import Path

from dj2mgm.runs.export_settings import build_export_settings
from dj2mgm.runs.leaks import build_leak_settings


include: "inputs/settings.smk"


# by the name of the rule that writes the file
SETTINGS_FILES = {
    "configure_stage": SettingsFile(
        "results/{run}/{stage}/config.yaml", stage_settings
    ),
    "configure_dataset": SettingsFile(
        "results/datasets/{dataset}/config.yaml",
        lambda w: find_used_dataset(w).settings.file_content(),
    ),
    "configure_foundation": SettingsFile(
        "results/foundation/{model}/{part}.yaml",
        lambda w: getattr(MODELS[w.model].foundation, w.part).model_dump(),
    ),
    "configure_model": SettingsFile(
        "results/models/{model}/config.yaml",
        lambda w: MODELS[w.model].build_assembly_settings().file_content(),
    ),
    "configure_page": SettingsFile("results/{page}/config.yaml", page_settings),
    "configure_study": SettingsFile(
        f"results/{RESULTS_PREFIX}{{study}}/config.yaml",
        study_settings,
        needs=study_scores,
    ),
    "configure_look": SettingsFile(
        f"results/{RESULTS_PREFIX}{{decided}}/decide/seeds-{{number}}/config.yaml",
        look_settings,
    ),
    "configure_decision": SettingsFile(
        f"results/{RESULTS_PREFIX}{{decided}}/decide/budget.yaml",
        lambda w: RUNS.shared.decide.model_dump(),
    ),
    "configure_search": SettingsFile(
        f"results/{RESULTS_PREFIX}{{study}}/search/{{key}}/search.yaml",
        lambda w: find_requested_search(w).model_dump(),
    ),
    "configure_batch": SettingsFile(
        f"results/{RESULTS_PREFIX}{{study}}/search/{{key}}/batch-{{number}}/config.yaml",
        batch_settings,
    ),
    "configure_mixtures": SettingsFile(
        f"results/{RESULTS_PREFIX}{{study}}/merged/config.yaml",
        mixture_settings,
    ),
    "configure_power": SettingsFile("results/plan/power.yaml", power_settings),
    "configure_challenge": SettingsFile(
        f"results/{RESULTS_PREFIX}challenge/config.yaml",
        lambda w: build_challenge_settings(),
    ),
    "configure_analysis": SettingsFile(
        "results/datasets/{dataset}/analyze/config.yaml", analyzed_settings
    ),
    "configure_export": SettingsFile(
        "results/{run}/export/config.yaml",
        lambda w: build_export_settings(RUNS.by_folder(w.run)).file_content(),
    ),
    "configure_publishing": SettingsFile(
        "results/published/{run}/config.yaml", publishing_settings
    ),
    "configure_leaks": SettingsFile(
        "results/datasets/{dataset}/leaks/config.yaml",
        lambda w: build_leak_settings(RUNS, w.dataset).file_content(),
    ),
    "configure_evaluation": SettingsFile(
        "results/evaluations/{task}/config.yaml",
        lambda w: build_evaluation_settings(w.task),
    ),
    "configure_crate": SettingsFile("results/{page}/crate/config.yaml", crate_settings),
}


# Snakemake renders templates in its own process, which saves a start of Python for each file.
for name, settings_file in SETTINGS_FILES.items():

    rule:
        name:
            name
        input:
            settings_file.needs,
            template=os.path.relpath(SCRIPTS / "dj2mgm/settings/settings.yaml.jinja"),
        output:
            settings_file.path,
        log:
            Path(settings_file.path).with_suffix(".log"),  # stays empty; `snakemake --lint` requires one
        params:
            yaml=format_settings(settings_file.build),
        template_engine:
            "jinja2"
