# Input functions of rules/influence.smk.
from dj2mgm.runs.experiments import REFERENCE


def influence_page(wildcards):
    """Input function: the page of wrong answers of the experiment that the configuration names."""
    experiment = RUNS.shared.experiment or REFERENCE
    page = f"results/{RESULTS_PREFIX}{experiment}/influence/influence.html"
    return target_files(experiment, page)(wildcards)
