# Every stage receives its settings as one file, from which it can also be run by hand.
from snakemake import __version__ as SNAKEMAKE

from dj2mgm.runs import crates
from dj2mgm.runs.leaks import build_leak_settings
from dj2mgm.runs.studies.power_inputs import build_power_settings
from dj2mgm.runs.publication import build_publish_settings
from dj2mgm.settings.targets import AttentionSettings
from dj2mgm.runs.stage_settings import build_analysis_settings
from dj2mgm.storage.files import format_yaml


def crate_settings(page):
    """Return the settings of a page's crate."""
    with user_errors():
        return crates.build_crate_settings(RUNS, page) | {"snakemake": SNAKEMAKE}


def page_settings(experiments):
    """Return the settings of a page that compares experiments."""
    with user_errors():
        return pages.build_page_settings(RUNS, experiments)


def stage_settings(wildcards):
    """Return the settings of a stage of a run."""
    run = RUNS.by_folder(wildcards.run)
    # runs with other labels share a stage: its output does not depend on them
    labels = {"labels": run.labels} if wildcards.stage in TRAINING else {}
    return run.settings[wildcards.stage].file_content() | labels


def attention_settings(wildcards):
    """Return the settings of `attention_benchmark`."""
    config = RUNS.first_seed(REFERENCE).config
    return AttentionSettings.from_sections(
        config, RUNS.shared.attention_benchmark
    ).file_content()


def study_settings(wildcards):
    """Return the settings of a study's page."""
    with user_errors():
        settings = pages.build_study_settings(RUNS, wildcards.study)
        if search := search_batches.show_search(RUNS, wildcards.study):
            settings["study"]["search"] = search.model_dump()
    return settings


def mixture_settings(study):
    """Return the settings of the mixtures that a study merges."""
    with user_errors():
        return merged_mixtures.build_merge_settings(RUNS, study).model_dump()


def batch_settings(wildcards):
    """Return the settings of the scores of a batch of trials."""
    with user_errors():
        return search_batches.build_batch_settings(
            RUNS, wildcards.study, requested_search(wildcards), int(wildcards.number)
        )


def look_settings(wildcards):
    """Return the settings of a look at an experiment after a number of seeds."""
    with user_errors():
        return looks.build_look_settings(RUNS, wildcards.decided, int(wildcards.number))


def analyzed_settings(wildcards):
    """Return the settings of a dataset's analysis."""
    run = pages.find_analyzed(RUNS, wildcards.dataset)
    return build_analysis_settings(run.config, run.dataset.images).file_content()


def publishing_settings(wildcards):
    """Return the settings of a published run."""
    with user_errors():
        return build_publish_settings(
            RUNS, RUNS.by_folder(wildcards.run)
        ).file_content()


# by rule: the file, and the function that returns its content
SETTINGS = {
    "configure_stage": ("results/{run}/{stage}/config.yaml", stage_settings),
    "configure_dataset": (
        "results/datasets/{dataset}/config.yaml",
        lambda w: used_dataset(w).settings.file_content(),
    ),
    "configure_foundation": (
        "results/foundation/{model}/{part}.yaml",
        lambda w: getattr(MODELS[w.model].foundation, w.part).model_dump(),
    ),
    "configure_model": (
        "results/models/{model}/config.yaml",
        lambda w: MODELS[w.model].assembly().file_content(),
    ),
    "configure_page": (
        "results/{page}/config.yaml",
        lambda w: page_settings(pages.list_page_experiments(RUNS, w.page)),
    ),
    "configure_study": (
        f"results/{RESULTS_PREFIX}{{study}}/config.yaml",
        study_settings,
    ),
    "configure_look": (
        f"results/{RESULTS_PREFIX}{{decided}}/decide/seeds-{{number}}/config.yaml",
        look_settings,
    ),
    "configure_decision": (
        f"results/{RESULTS_PREFIX}{{decided}}/decide/budget.yaml",
        lambda w: RUNS.shared.decide.model_dump(),
    ),
    "configure_search": (
        f"results/{RESULTS_PREFIX}{{study}}/search/{{key}}/search.yaml",
        lambda w: requested_search(w).model_dump(),
    ),
    "configure_batch": (
        f"results/{RESULTS_PREFIX}{{study}}/search/{{key}}/batch-{{number}}/config.yaml",
        batch_settings,
    ),
    "configure_mixtures": (
        f"results/{RESULTS_PREFIX}{{study}}/merged/config.yaml",
        lambda w: mixture_settings(w.study),
    ),
    "configure_power": (
        "results/plan/power.yaml",
        lambda w: build_power_settings(RUNS),
    ),
    "configure_attention_benchmark": (
        f"results/{RESULTS_PREFIX}attention_benchmark/config.yaml",
        attention_settings,
    ),
    "configure_challenge": (
        f"results/{RESULTS_PREFIX}challenge/config.yaml",
        lambda w: challenge_settings(),
    ),
    "configure_analysis": (
        "results/datasets/{dataset}/analyze/config.yaml",
        analyzed_settings,
    ),
    "configure_export": (
        "results/{run}/export/config.yaml",
        lambda w: pages.build_export_settings(RUNS.by_folder(w.run)).file_content(),
    ),
    "configure_publishing": (
        "results/published/{run}/config.yaml",
        publishing_settings,
    ),
    "configure_leaks": (
        "results/datasets/{dataset}/leaks/config.yaml",
        lambda w: build_leak_settings(RUNS, w.dataset).file_content(),
    ),
    "configure_evaluation": (
        "results/evaluations/{task}/config.yaml",
        lambda w: evaluation_settings(w.task),
    ),
    "configure_crate": (
        "results/{page}/crate/config.yaml",
        lambda w: crate_settings(w.page),
    ),
}


# by rule: the results on which its settings depend
NEEDED_RESULTS = {"configure_study": lambda w: all_scores(w.study)(w)}


def in_yaml(find_settings):
    """Params function: the settings that a function of the wildcards returns, as YAML."""
    return lambda wildcards: format_yaml(find_settings(wildcards))


# Snakemake renders the template in its own process, without a job.
for name, (file, find_settings) in SETTINGS.items():

    rule:
        name:
            name
        input:
            NEEDED_RESULTS.get(name, []),
            template=os.path.relpath(SCRIPTS / "dj2mgm/settings/settings.yaml.jinja"),
        output:
            file,
        log:
            Path(file).with_suffix(".log"),  # stays empty; `snakemake --lint` requires one
        params:
            yaml=in_yaml(find_settings),
        template_engine:
            "jinja2"
