# Input functions of rules/report.smk.
from dj2mgm.runs import pages
from dj2mgm.runs.studies import merged_mixtures


def compared_files(wildcards):
    """Input function: the files that a study's page reads."""
    scores = all_scores(wildcards.study)(wildcards)
    return [
        *scores,
        *list_page_files(list_study_experiments(wildcards.study)),
        *list_merged_scores(wildcards.study),
    ]


def list_merged_scores(study):
    """Return the file with the scores of a study's merged models; none for other studies."""
    with raising_user_errors():
        file = merged_mixtures.locate_scores_file(RUNS, study)
        if file is None:
            return []
        # called only for its errors, which are then reported before anything runs
        merged_mixtures.build_merge_settings(RUNS, study)
        return [file]


def find_merged_run(wildcards):
    """Return the first run of the experiment whose mixtures are merged."""
    return RUNS.first_seed(RUNS.experiments.studies[wildcards.study].experiment)


def merged_model_files(wildcards):
    """Input function: the model that the merged LoRAs were trained from."""
    return list_model_files(find_merged_run(wildcards).config.model)


def merged_adapters(wildcards):
    """Input function: the weights of stage 2 of each source alone."""
    with raising_user_errors():
        folders = merged_mixtures.build_merge_settings(
            RUNS, wildcards.study
        ).sources.values()
    names = list_stage_2_weights(find_merged_run(wildcards))
    return [f"{folder}/{name}" for folder in folders for name in names]


def list_study_experiments(study):
    """Return the experiments on a study's page."""
    with raising_user_errors():
        return pages.list_study_experiments(RUNS, study)
