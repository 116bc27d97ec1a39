# Input functions of rules/settings.smk.
from collections.abc import Callable
from typing import NamedTuple

from snakemake import __version__ as SNAKEMAKE

from dj2mgm.runs import crates, pages
from dj2mgm.runs.analyzed_runs import find_analyzed
from dj2mgm.runs.publication import build_publish_settings
from dj2mgm.runs.stage_settings import build_analysis_settings
from dj2mgm.runs.stages import TRAINING_STAGES
from dj2mgm.runs.studies.power_inputs import build_power_settings, find_decisive_score
from dj2mgm.runs.studies import looks, merged_mixtures, search_batches
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


def crate_settings(wildcards):
    """Return the settings of a page's crate."""
    with raising_user_errors():
        settings = crates.build_crate_settings(RUNS, wildcards.page)
    return settings | {"snakemake": SNAKEMAKE}


def page_settings(wildcards):
    """Return the settings of a page that compares experiments."""
    experiments = pages.list_page_experiments(RUNS, wildcards.page)
    with raising_user_errors():
        return pages.build_page_settings(RUNS, experiments)


def stage_settings(wildcards):
    """Return the settings of a stage of a run."""
    run = RUNS.by_folder(wildcards.run)
    # Labels are not part of run.settings, because runs that differ only in labels share their stages.
    labels = {"labels": run.labels} if wildcards.stage in TRAINING_STAGES else {}
    return run.settings[wildcards.stage].file_content() | labels


def study_settings(wildcards):
    """Return the settings of a study's page."""
    with raising_user_errors():
        settings = pages.build_study_settings(RUNS, wildcards.study)
        if search := search_batches.show_search(RUNS, wildcards.study):
            settings["study"]["search"] = search.model_dump()
    return settings


def study_scores(wildcards):
    """Input function: the scores of all batches of a study's search; none for other designs."""
    return all_scores(wildcards.study)(wildcards)


def mixture_settings(wildcards):
    """Return the settings of the mixtures that a study merges."""
    with raising_user_errors():
        settings = merged_mixtures.build_merge_settings(RUNS, wildcards.study)
    return settings.model_dump()


def batch_settings(wildcards):
    """Return the settings of the scores of a batch of trials."""
    with raising_user_errors():
        return search_batches.build_batch_settings(
            RUNS,
            wildcards.study,
            find_requested_search(wildcards),
            int(wildcards.number),
        )


def look_settings(wildcards):
    """Return the settings of a look at an experiment after a number of seeds."""
    with raising_user_errors():
        return looks.build_look_settings(RUNS, wildcards.decided, int(wildcards.number))


def analyzed_settings(wildcards):
    """Return the settings of a dataset's analysis."""
    run = find_analyzed(RUNS, wildcards.dataset)
    return build_analysis_settings(run.config, run.dataset.images).file_content()


def publishing_settings(wildcards):
    """Return the settings of a published run."""
    with raising_user_errors():
        return build_publish_settings(
            RUNS, RUNS.by_folder(wildcards.run)
        ).file_content()


def power_settings(wildcards):
    """Return the settings of the plan's power analysis."""
    with raising_user_errors():
        return build_power_settings(RUNS) | {"headline": find_decisive_score(RUNS)}


def format_settings(build):
    """Return the params function of the settings that a function of the wildcards returns, as YAML."""
    return lambda wildcards: format_yaml(build(wildcards))
