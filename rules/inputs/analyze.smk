# Input functions of rules/analyze.smk.
from dj2mgm.model_files.clips import list_clip_files
from dj2mgm.recipes.recipe_files import find_recipe_files
from dj2mgm.runs.analyzed_runs import find_analyzed
from dj2mgm.runs.experiments import REFERENCE


def analyzed_files(wildcards):
    """Input function: the CLIP, and the recipe's files, that a dataset is analyzed with."""
    run = find_analyzed(RUNS, wildcards.dataset)
    recipe_inputs = find_recipe_files(run.settings["filter"].recipe)
    return check_user_files(list_clip_files(run.config.model.clip) + recipe_inputs)


def analysis_page(wildcards):
    """Input function: the page about the dataset of the requested experiment."""
    dataset = find_requested_run("analyze", REFERENCE).dataset.name
    return f"results/datasets/{dataset}/analyze/analysis.html"
