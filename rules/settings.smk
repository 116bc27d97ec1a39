# Write the settings of every stage into one file, with which the stage can also be run by hand.
from collections.abc import Callable
from typing import NamedTuple

from dj2mgm.runs import pages
from dj2mgm.runs.stages import TRAINING_STAGES
from dj2mgm.storage.files import format_yaml


class SettingsFile(NamedTuple):
    """A file of settings.

    Attributes:
        path: its path, with wildcards.
        build: function of the wildcards that returns its content.
        needs: input function of the results on which the content depends, or no files.
    """

    path: str
    build: Callable
    needs: Callable | list = []


def stage_settings(wildcards):
    """Return the settings of a stage of a run."""
    run = RUNS.by_folder(wildcards.run)
    # Labels are not part of run.settings, because runs that differ only in labels share their stages.
    labels = {"labels": run.labels} if wildcards.stage in TRAINING_STAGES else {}
    return run.settings[wildcards.stage].file_content() | labels


def format_settings(build):
    """Return the params function of the settings that a function of the wildcards returns, as YAML."""
    return lambda wildcards: format_yaml(build(wildcards))


# by the name of the rule that writes the file; features add theirs, and Snakefile makes the rules
SETTINGS_FILES = {
    "configure_stage": SettingsFile(
        "results/{run}/{stage}/config.yaml", stage_settings
    ),
    "configure_dataset": SettingsFile(
        "results/datasets/{dataset}/config.yaml",
        lambda w: find_used_dataset(w).settings.file_content(),
    ),
    "configure_model": SettingsFile(
        "results/models/{model}/config.yaml",
        lambda w: MODELS[w.model].build_assembly_settings().file_content(),
    ),
    "configure_page": SettingsFile(
        "results/{page}/config.yaml",
        lambda w: pages.build_page_settings(
            RUNS, pages.list_page_experiments(RUNS, w.page)
        ),
    ),
    "configure_leaks": SettingsFile(
        "results/datasets/{dataset}/leaks/config.yaml",
        lambda w: pages.build_leak_settings(
            RUNS, w.dataset, BENCHMARK_FILES
        ).file_content(),
    ),
}
